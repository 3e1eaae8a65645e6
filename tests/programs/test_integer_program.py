"""A large integer program is solved near its least cost, and wholly."""

from itertools import product

import numpy as np
import pytest
from highspy import HighsModelStatus
from hypothesis import given
from hypothesis import strategies as st

from fdtensor.programs import integer_program
from fdtensor.programs.integer_program import IntegerProgram
from fdtensor.programs.linear_program import LinearProgram, Solver


@st.composite
def pairs(draw):
    """Groups of options with their costs, and what each pair of options of two groups costs."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=2, max_size=7))
    costs = [[draw(st.integers(0, 4)) for _ in range(size)] for size in sizes]
    both = {}
    for a, b in product(range(len(sizes)), repeat=2):
        if a < b and draw(st.booleans()):
            both[a, b] = [[draw(st.integers(0, 9)) for _ in costs[b]] for _ in costs[a]]
    tied = [pair for pair in both if sizes[pair[0]] == sizes[pair[1]] and draw(st.booleans())]
    return costs, both, tied


def program_of(costs, both, tied):
    program = IntegerProgram()
    picks = [[program.variable(c * 1e-6, whole=len(cs) > 1) for c in cs] for cs in costs]
    for pick in picks:
        program.constraint(pick, [], 1, 1)
    for (a, b), prices in both.items():
        for i, j in product(range(len(costs[a])), range(len(costs[b]))):
            y = program.variable(prices[i][j] * 1e-6)  # at least both - 1
            program.constraint([y], [picks[a][i], picks[b][j]], -1, np.inf)
    for a, b in tied:  # the same option of both
        for x, y in zip(picks[a], picks[b], strict=True):
            program.constraint([x], [y], 0, 0)
    return program, picks


def least(costs, both, tied):
    """The least cost of all combinations."""

    def cost(picked):
        alone = sum(cs[k] for cs, k in zip(costs, picked, strict=True))
        return alone + sum(p[picked[a]][picked[b]] for (a, b), p in both.items())

    every = product(*(range(len(cs)) for cs in costs))
    return min(cost(k) for k in every if all(k[a] == k[b] for a, b in tied))


@pytest.mark.parametrize("window", [2, 128])
@given(drawn=pairs())
def test_a_large_program_is_solved_near_the_least_cost(window, drawn):
    program, picks = program_of(*drawn)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(integer_program, "LARGE", 0)
        patch.setattr(integer_program, "WINDOW", window)
        x = program.solve().x
    for pick in picks:
        assert sorted(np.round(x[pick], 6)) == [0] * (len(pick) - 1) + [1]
    for a, b in drawn[2]:
        assert np.argmax(x[picks[a]]) == np.argmax(x[picks[b]])
    cost = round(float(np.dot(x, program.costs)) * 1e6, 4)
    assert least(*drawn) <= cost <= max(2 * least(*drawn), least(*drawn) + 9)


@given(drawn=pairs())
def test_a_small_one_at_it(drawn):
    program, _ = program_of(*drawn)
    x, relaxed = program.solve().x, program.solve(whole=False)
    assert round(float(np.dot(x, program.costs)) * 1e6, 4) == least(*drawn)
    cost = round(float(np.dot(relaxed.x, program.costs)) * 1e6, 4)
    assert cost == least(*drawn) if relaxed.whole else cost <= least(*drawn)


def test_what_is_given_up_without_presolve_is_solved_with_it():
    program = LinearProgram()
    x, y = program.variable(2.0), program.variable(1.0)
    program.constraint([x, y], [], 1, 1)
    solver = Solver(program, presolved=False)
    highs, asked = solver._highs, []

    class GivesUp:
        """A solver that knows no solution at first."""

        def __getattr__(self, name):
            return getattr(highs, name)

        def getModelStatus(self):
            asked.append(highs.getOptionValue("presolve")[1])
            return HighsModelStatus.kUnknown if len(asked) == 1 else highs.getModelStatus()

    solver._highs = GivesUp()
    assert solver.solve().x.tolist() == [0, 1]
    assert asked[0] == "off"
    assert set(asked[1:]) == {"choose"}
