"""Plans that come from outside: a text is a plan that is right, or it is refused."""

import collections

import pytest
import torch

from fdtensor import (
    GLOO,
    NCCL,
    Layout,
    Mesh,
    Plan,
    PlanError,
    SimulatedComm,
    TensorType,
    plan,
    run,
)
from fdtensor.layouts.placement import parse_placement
from fdtensor.testing.values import block, full_tensor, gather_full, scatter
from tests.support.audit import nothing_runs
from tests.support.depth import times
from tests.support.mutants import mutants

SMALL = 4096
"""Plans of tensors with more elements, or for more ranks, are not run."""


def typed(mesh: Mesh, shape, placements: str, dtype=torch.float32, order=None) -> TensorType:
    parts = [parse_placement(part) for part in placements.split("; ") if part]
    return TensorType(shape, dtype, Layout(mesh, parts, order))


LINE, GRID = Mesh(dp=4), Mesh(dp=2, tp=2)
MIXED = Mesh.from_ranks([[3, 1, 5], [4, 0, 2]], ("x", "y"))
CUBE = Mesh(a=2, b=1, c=2)
PAIRS = [
    (typed(LINE, (8, 4), "S(0)"), typed(LINE, (8, 4), "R")),
    (typed(LINE, (8, 4), "S(0)"), typed(LINE, (8, 4), "S(1)")),
    (typed(LINE, (7,), "S(0)"), typed(LINE, (7,), "S(0, [1,1,2,3])")),
    (typed(LINE, (8, 8), "P(sum)"), typed(LINE, (8, 8), "S(1)")),
    (typed(LINE, (8,), "P(sum)"), typed(LINE, (8,), "R")),
    (typed(LINE, (), "P(max)"), typed(LINE, (), "R")),
    (typed(LINE, (8,), "P(sum)"), typed(LINE, (8,), "P(avg)")),
    (typed(LINE, (6,), "R"), typed(LINE, (6,), "P(sum)")),
    (typed(LINE, (6,), "S(0)"), typed(LINE, (6,), "P(min)")),
    (typed(GRID, (8, 6), "S(0); P(sum)"), typed(GRID, (8, 6), "R; S(1)")),
    (typed(GRID, (8,), "S(0); S(0)"), typed(GRID, (8,), "S(0); S(0)", order={0: ("tp", "dp")})),
    (typed(GRID, (8, 8), "P(sum); P(sum)"), typed(GRID, (8, 8), "R; R")),
    (typed(GRID, (5, 4), "S(0, f=2); R"), typed(GRID, (5, 4), "R; S(1)")),
    (typed(GRID, (4, 4), "P(sum); S(0)"), typed(LINE, (4, 4), "S(1)")),
    (typed(MIXED, (6, 5), "S(0); P(sum)"), typed(MIXED, (6, 5), "P(sum); S(1)")),
    (typed(MIXED, (6,), "R; S(0)"), typed(GRID, (6,), "R; P(sum)")),
    (typed(Mesh(one=1), (3, 2), "R"), typed(Mesh.from_ranks([2, 3, 4], "z"), (3, 2), "R")),
    (typed(CUBE, (4, 6), "S(0); S(0); P(max)"), typed(CUBE, (4, 6), "S(0); P(max); R")),
    (typed(CUBE, (4, 0), "S(0); R; S(1)"), typed(CUBE, (4, 0), "R; R; R")),
    (typed(CUBE, (4, 6), "S(0); R; R"), typed(CUBE, (4, 6), "S(0); P(sum); R")),
    (typed(GRID, (9,), "S(0); R", torch.int64), typed(GRID, (9,), "S(0, 0:6 3:9); R", torch.int64)),
    (typed(GRID, (9,), "P(sum); S(0)"), typed(GRID, (9,), "S(0, 0:6 3:9); R")),
    (typed(GRID, (4,), "P(bor); R", torch.uint8), typed(GRID, (4,), "R; S(0)", torch.uint8)),
]
PLANS = [
    *(plan(src, dst, cost=cost) for src, dst in PAIRS for cost in (NCCL, GLOO)),
    plan(*PAIRS[1], max_bytes=100),
    plan(*PAIRS[3], max_bytes=500),
]
TEXTS = [found.to_json() for found in PLANS]


def verdict(text: str) -> str:
    """What becomes of a text: `refused`, `right`, `large`, or what is wrong."""
    try:
        found = Plan.from_json(text)
    except PlanError:
        return "refused"
    except Exception as error:  # whatever else comes out is what this looks for
        return f"raises {type(error).__name__}"
    return judged(found)


def judged(found: Plan) -> str:
    """Whether a plan does what it says: on values, and in the bytes that it announces."""
    src, dst = found.src, found.dst
    if src.numel > SMALL or src.mesh.size + dst.mesh.size > 64:
        return "large"
    if not isinstance(found, Plan) or Plan.from_json(found.to_json()) is not found:
        return "wrong: it is not read back"
    tensor = full_tensor(src, 1)
    ranks = sorted({*src.mesh.order, *dst.mesh.order})
    comm = SimulatedComm(Mesh.from_ranks(ranks, "rank"))
    try:
        moved = run(found, scatter(tensor, src, 2), comm)
        due = [tuple(map(len, dst.index(rank))) for rank in dst.mesh.order]
        if [(tuple(t.shape), t.dtype) for t in moved] != [(shape, dst.dtype) for shape in due]:
            return "wrong: another type"
        if dst.layout.overlaps:
            blocks = [block(tensor, dst, rank) for rank in dst.mesh.order]
            whole = dst.layout.partial or all(map(torch.equal, moved, blocks))
        else:
            whole = close(gather_full(moved, dst), tensor)
    except Exception as error:
        return f"wrong: running it raises {type(error).__name__}"
    if not whole:
        return "wrong: other values"
    if {r: comm.received[r] for r in ranks} != {r: found.received_bytes_at(r) for r in ranks}:
        return "wrong: other bytes"
    return "right"


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether tensors of integers are the same; an average may round."""
    if a.dtype.is_floating_point or a.dtype.is_complex:
        return torch.allclose(a.to(torch.complex128), b.to(torch.complex128), atol=1e-2)
    return torch.equal(a, b)


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_a_plan_of_the_planner_is_right(text):
    assert verdict(text) == "right"


COUNT = times(400, 10_000)


def test_a_mutant_of_a_plan_is_right_or_refused():
    verdicts = collections.defaultdict(list)
    with nothing_runs():
        for text in mutants(TEXTS, COUNT, seed=16):
            verdicts[verdict(text)].append(text)
    wrong = {said: texts[0][:2000] for said, texts in verdicts.items() if said not in ALLOWED}
    assert not wrong, {said: len(texts) for said, texts in verdicts.items()}
    assert len(verdicts["right"]) > COUNT / 100
    assert len(verdicts["refused"]) > COUNT / 2


ALLOWED = ("refused", "right", "large")
