"""A small part of the hunt, always the same programs; the whole of it is `python -m tests.hunt`."""

import pytest
import torch

from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import Shard
from tests.hunt.findings import known_as, signature
from tests.hunt.generate import Extent, generated
from tests.hunt.ops import FAMILIES, MISTAKES, RANDOM
from tests.hunt.records import Input, Line, Program
from tests.hunt.script import script
from tests.hunt.shrink import shrunk
from tests.hunt.ways import GOOD, Outcome, outcome

SEED = 0
EXTENT = Extent(least=4, most=10, ranks=6)


WAYS = ("spmd", "call", "grad", "backward", "call_backward", "run", "jvp", "vmap", "hessian", "fx")


@pytest.mark.few(12)
@pytest.mark.parametrize("number", range(20))
def test_a_random_program_gives_what_torch_gives(number):
    found = outcome(generated(SEED, number, EXTENT))

    if found.kind not in GOOD:
        known = known_as(signature(found))
        if known:
            pytest.skip(known)
        pytest.fail(f"{found}\nrun python -m tests.hunt for a script of it")


def test_a_program_is_the_same_whenever_it_is_drawn():
    one, other = (generated(SEED, 3) for _ in range(2))

    assert one == other
    assert one != generated(SEED, 4)


def test_programs_are_of_many_ops():
    lines = [line for number in range(60) for line in generated(SEED, number).lines]

    assert len({line.op for line in lines}) > 200
    every = (*(op for ops, _ in FAMILIES.values() for op in ops), *MISTAKES, *RANDOM)
    table = {op.name for op in every}
    assert {line.op.partition(":")[0] for line in lines} <= table


def test_a_failure_is_shrunk_to_the_line_that_fails():
    def fails(program):
        return any(line.op == "softmax" for line in program.lines)

    program = next(p for p in (generated(1, number) for number in range(100)) if fails(p))

    small = shrunk(program, fails, attempts=5000)

    assert [line.op for line in small.lines] == ["softmax"]
    assert small.mesh.size == 1
    assert all(n <= 1 for i in small.inputs for n in i.shape)


@pytest.mark.parametrize("way", WAYS)
def test_a_script_runs_and_says_the_same_twice(way, capsys):
    programs = (generated(2, number, Extent(2, 5, 4)) for number in range(200))
    program = next(p for p in programs if p.setting.way == way and outcome(p).kind == "ok")
    text = script(program, Outcome("ok"))

    exec(compile(text, "script", "exec"), {})

    said = [line for line in capsys.readouterr().out.splitlines() if "Error" in line]
    assert said == []


def test_a_wrong_rule_is_seen(monkeypatch):
    """A rule that leaves out what other ranks hold is told of, at its op."""
    from fdtensor.ops.notation import core

    op = torch.ops.aten.cumsum.default
    wrong = core.Rule(
        lambda x, dim, **_: [((core.S(dim % x.ndim),), core.S(dim % x.ndim))],
        {},
        None,
        False,
        False,
    )
    monkeypatch.setitem(core._RULES, op, wrong)
    layout = Layout(Mesh(x=2), [Shard(0)])
    given = Input("v0", (4,), torch.float64, "positive", 0, "contiguous", layout)
    lines = (Line("cumsum", "v1 = torch.cumsum(v0, 0)", ("v1",), (), False),)
    found = outcome(Program(layout.mesh, (given,), lines, ("v1",)))

    assert (found.kind, found.op) == ("value", "cumsum")
