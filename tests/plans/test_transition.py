"""Each cell of the table of transitions, and its law."""

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from fdtensor import (
    Layout,
    LayoutError,
    Mesh,
    Partial,
    Plan,
    Ragged,
    Replicate,
    Shard,
    SimulatedComm,
    StridedShard,
    TensorType,
    run,
    transition,
)
from fdtensor.plans.cost import NCCL
from fdtensor.testing.strategies import placements, types
from fdtensor.testing.values import full_tensor, gather_full, scatter

MESH = Mesh(dp=2, tp=4)


def cell(before, to, *, other=None, dtype=torch.float32, shape=(8, 16)) -> list[str]:
    """The collectives that take tp from `before` to `to`, with dp at `other`."""
    src = TensorType(shape, dtype, Layout(MESH, [other or Replicate(), before]))
    return [str(step.collective) for step in transition(src, "tp", to)]


R, S, P = Replicate(), Shard, Partial


@pytest.mark.parametrize(
    ("before", "to", "steps"),
    [
        (R, R, []),
        (R, S(1), ["slice[axis=tp dim=1]"]),
        (R, P("sum"), ["mask[axis=tp reduce_op=sum]"]),
        (R, P("avg"), ["mask[axis=tp reduce_op=avg]"]),
        (S(0), R, ["all_gather[axis=tp dim=0]"]),
        (S(0), S(1), ["all_to_all[axis=tp dim=0->1]"]),
        (S(0), P("max"), ["pad[axis=tp dim=0 reduce_op=max]"]),
        (S(0), P("avg"), ["all_gather[axis=tp dim=0]", "mask[axis=tp reduce_op=avg]"]),
        (P("sum"), R, ["all_reduce[axis=tp reduce_op=sum]"]),
        (P("sum"), S(0), ["reduce_scatter[axis=tp dim=0 reduce_op=sum]"]),
        (P("sum"), P("avg"), ["scale[axis=tp reduce_op=avg]"]),
        (
            P("sum"),
            P("max"),
            ["reduce_scatter[axis=tp dim=0 reduce_op=sum]", "pad[axis=tp dim=0 reduce_op=max]"],
        ),
    ],
    ids=str,
)
def test_a_cell_of_the_table(before, to, steps):
    assert cell(before, to) == steps


@pytest.mark.parametrize(
    ("before", "to", "other", "shape"),
    [
        (S(0), R, None, (7, 5)),
        (S(0), S(1), None, (7, 5)),
        (P("sum"), S(0), None, (7, 5)),
        (StridedShard(0, 2), R, None, (8, 16)),
        (S(0), StridedShard(0, 2), None, (8, 16)),
        (S(0), Ragged(0, (1, 2, 3, 2)), None, (8, 16)),
        (S(1), S(0), S(0), (7, 16)),
    ],
    ids=str,
)
def test_what_has_no_named_collective_is_an_exchange(before, to, other, shape):
    (step,) = cell(before, to, other=other, shape=shape)
    assert step.startswith("exchange[axis=tp")


def test_the_outer_of_two_cuts_is_an_exchange_over_both_axes():
    src = TensorType((8, 16), torch.float32, MESH.layout(("dp", "tp")))
    (step,) = transition(src, "dp", Replicate())
    assert str(step.collective) == "exchange[axes=(dp,tp) way=peer_to_peer]"


def test_float16_sums_are_reduced_before_they_become_averages():
    steps = cell(P("sum"), P("avg"), dtype=torch.float16)
    assert steps == ["all_reduce[axis=tp reduce_op=sum]", "mask[axis=tp reduce_op=avg]"]


@given(types(), st.data(), st.integers(0, 99))
def test_a_transition_keeps_the_tensor(src, data, seed):
    assume(src.mesh.axes)
    axis = data.draw(st.sampled_from(src.mesh.axes))
    to = data.draw(placements(shape=src.shape, count=src.mesh.axis_size(axis)))
    try:
        dst = src.placed(axis, to)
    except LayoutError:
        with pytest.raises(LayoutError):
            transition(src, axis, to)
        return
    steps = transition(src, axis, to)
    value = scatter(full_tensor(src, seed), src, seed)
    moved = run(Plan(src, dst, steps, NCCL), value, SimulatedComm(src.mesh))
    assert torch.equal(gather_full(moved, dst), full_tensor(src, seed))
