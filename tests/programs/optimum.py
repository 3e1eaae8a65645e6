"""`python -m tests.programs.optimum N`: the choice on two axes beside the best there is.

Random functions of matrices on random meshes. What the best choice takes at least is proved by
`bound_of`, over all combinations of rows. Printed are the graphs whose choice may be off by more
than a thousandth, and then the mean, the most, and how often the choice is proved the best.
With `--beside` a second way checks the proof: an integer program over all pairs of rows of each
call, in both orders of the axes. Nothing in it may take less than was proved.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch

from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import Replicate, Shard
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.layouts.tree import flatten
from fdtensor.ops.flops import Work
from fdtensor.ops.graph import Call, Graph
from fdtensor.ops.lift import layout_of, lifted
from fdtensor.plans.cost import NCCL
from fdtensor.programs.assembly import boundaries_of
from fdtensor.programs.bound.least import bound_of
from fdtensor.programs.choice import prices_of, problem_of, total_seconds
from fdtensor.programs.choices import Body, Constraints
from fdtensor.programs.joint import INNERMOST
from fdtensor.programs.nested import place_of, ways_of, ways_of_end
from fdtensor.programs.nodes import Node, Option
from fdtensor.programs.prices import Prices
from fdtensor.programs.recording import recorded
from fdtensor.programs.solver import cheapest
from fdtensor.programs.together import chosen_together
from fdtensor.programs.tracer import is_typed

SIZES = (256, 512, 1024, 2048, 4096)
MESHES = (Mesh(a=2, b=4), Mesh(a=4, b=4), Mesh(a=8, b=2))

OPS: dict[str, Callable[..., torch.Tensor]] = {
    "mm": lambda x, y: x @ y,
    "add": lambda x, y: x + y,
    "relu": lambda x, _: torch.relu(x),
    "t": lambda x, _: x.t(),
    "sum": lambda x, _: x.sum(0),
}


@attrs.frozen
class Case:
    """A function of matrices, the types of its arguments, and the layouts wanted of its results."""

    steps: tuple[tuple[str, int, int], ...]
    """Each with an op and the numbers of its operands, counted from the arguments on."""
    types: tuple[TensorType, ...]
    wants: tuple[Layout | None, ...]

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values = list(tensors)
        for op, i, j in self.steps:
            values.append(OPS[op](values[i], values[j]))
        return tuple(values[-2:])

    @property
    def mesh(self) -> Mesh:
        return self.types[0].mesh


def drawn(seed: int) -> Case:
    """The case of a seed."""
    rng = random.Random(seed)
    mesh = rng.choice(MESHES)
    sizes = [rng.choice(SIZES) for _ in range(4)]
    shapes = [(rng.choice(sizes), rng.choice(sizes)) for _ in range(rng.randint(2, 4))]
    types = [TensorType(s, torch.float32, _layout(rng, mesh, 2)) for s in shapes]
    known: list[tuple[int, ...]] = list(shapes)
    steps: list[tuple[str, int, int]] = []
    for _ in range(rng.randint(3, 7)):
        op, i = rng.choice(["mm", "mm", "mm", "add", "relu", "t", "sum"]), rng.randrange(len(known))
        fits = [j for j, shape in enumerate(known) if _shape(op, known[i], shape) is not None]
        op, j = (op, rng.choice(fits)) if fits else ("relu", i)
        shape = _shape(op, known[i], known[j])
        assert shape is not None
        known.append(shape)
        steps.append((op, i, j))
    ends = [len(shape) for shape in known[-2:]]
    wants = [None if rng.random() < 0.5 else _layout(rng, mesh, ndim) for ndim in ends]
    return Case(tuple(steps), tuple(types), tuple(wants))


def _shape(op: str, a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...] | None:
    match op:
        case "mm":
            return (a[0], b[1]) if len(a) == len(b) == 2 and a[1] == b[0] else None
        case "add":
            return a if a == b else None
        case "t":
            return a[::-1]
        case "sum":
            return a[1:] if len(a) == 2 else None
        case _:
            return a


def _layout(rng: random.Random, mesh: Mesh, ndim: int) -> Layout:
    places = [Replicate(), *[Shard(d) for d in range(ndim)]]
    drawn = tuple([rng.choice(places) for _ in mesh.axes])
    return layout_of(mesh, drawn, tuple(rng.sample(mesh.axes, mesh.ndim)))


@attrs.frozen
class Measured:
    """The seconds of a choice, and of the best one."""

    chosen: float
    least: float
    """What every choice takes at least."""
    beside: float | None
    """What the best one takes without decompositions; None where it was not asked for."""

    @property
    def ratio(self) -> float:
        """How many times the least seconds the choice takes, at most."""
        return self.chosen / self.least if self.least else 1.0 + self.chosen


def measured(case: Case, beside: bool = False) -> Measured:
    """The choice of a case, and the best there is."""
    leaves, spec = flatten((case.types, {}), is_leaf=is_typed)
    graph = recorded(case, spec, leaves, case.types).graph
    boundaries = boundaries_of(case.mesh, case.types, case.wants)
    constraints = Constraints(ins=tuple([t.layout for t in case.types]), outs=case.wants)
    prices = prices_of(graph, case.mesh, NCCL, constraints)
    choices = chosen_together(graph, boundaries, prices, constraints)
    chosen = next(iter(choices.values())).seconds
    least = bound_of(choices).least
    if not beside:
        return Measured(chosen, least, None)
    nodes = {
        axis: problem_of(graph, axis, boundary, {}, prices, constraints, depth=INNERMOST).nodes
        for axis, boundary in boundaries.items()
    }
    prices = attrs.evolve(prices, nested=True)
    best = _all_of(graph, list(nodes.values()), prices, constraints)
    picks = cheapest(best, prices, lambda v: True).options
    taken = [node.options[k] for node, k in zip(best, picks, strict=True)]
    return Measured(chosen, least, total_seconds(best, taken, prices, frozenset()))


def _all_of(
    graph: Graph, along: Sequence[Sequence[Node]], prices: Prices, constraints: Constraints
) -> list[Node]:
    """The nodes with all combinations of the options of each axis."""
    first, last = len(graph.inputs), len(graph.outs)
    given = [*constraints.ins, *[None] * (len(along[0]) - first - last), *constraints.outs]
    calls: list[Call | None] = [*[None] * first, *[None] * len(graph.constants), *graph.calls]
    nodes: list[Node] = []
    for call, layout, *alone in zip([*calls, *[None] * last], given, *along, strict=True):
        options = [
            option
            for rows in itertools.product(*(node.options for node in alone))
            for option in (
                _ends(rows, layout, prices.mesh)
                if call is None
                else _combined(call, rows, graph, prices)
            )
        ]
        nodes.append(Node(alone[0].ins, alone[0].outs, tuple(options)))
    return nodes


def _ends(rows: Sequence[Option], layout: Layout | None, mesh: Mesh) -> list[Option]:
    """The options of an input or an output, in the layout that is given or in any order."""
    places = tuple([(row.ins or row.outs)[0] for row in rows])
    each = ways_of_end(mesh, places) if layout is None else [place_of(layout)]
    return [Option((p,) * len(rows[0].ins), (p,) * len(rows[0].outs), 0.0) for p in each]


def _combined(call: Call, rows: Sequence[Option], graph: Graph, prices: Prices) -> list[Option]:
    """The options that take these rows, one for each axis; none where they do not hold together."""
    notes: dict[str, Any] = {
        axis: row.note for axis, row in zip(prices.mesh.axes, rows, strict=True)
    }
    if any(isinstance(note, Body) for note in notes.values()):
        return []
    if lifted(call, prices.mesh, notes, graph.types) is None:
        return []
    along = dict(zip(prices.mesh.axes, rows, strict=True))
    ways = ways_of(call, graph.types, prices.mesh, along, nested=True)
    work = Work(call, graph.types, prices.mesh.sizes, prices.cost)
    values = [None if v is None else v.index for v in (*call.ins, *call.outs)]
    sides = zip(values, (*ways[0].ins, *ways[0].outs), strict=True)
    seconds = work.seconds(work.part(v, p) for v, p in sides)
    return [Option(way.ins, way.outs, seconds) for way in ways]


def main() -> int:
    """Prints what the choice lacks; 1 where it is off by more than 2 %, or the proof is wrong."""
    parser = argparse.ArgumentParser("python -m tests.programs.optimum", description=__doc__)
    parser.add_argument("graphs", type=int, nargs="?", default=100, help="how many graphs")
    parser.add_argument("--first", type=int, default=0, help="the seed of the first")
    parser.add_argument("--beside", action="store_true", help="check the proof in a second way")
    options = parser.parse_args()
    ratios: list[float] = []
    wrong = 0
    for seed in range(options.first, options.first + options.graphs):
        one = measured(drawn(seed), options.beside)
        ratios.append(one.ratio)
        if one.ratio > 1.001:
            print(f"seed {seed}: {one.ratio:.4f} times the least seconds")
        if one.beside is not None and one.beside < one.least * (1 - 1e-6):
            wrong += 1
            print(f"seed {seed}: {one.beside} is less than what was proved, {one.least}")
    best = sum(ratio < 1.001 for ratio in ratios)
    mean = sum(ratios) / len(ratios)
    print(f"{best} of {len(ratios)} proved the best; mean {mean:.5f}, most {max(ratios):.4f}")
    return int(max(ratios) > 1.02 or wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
