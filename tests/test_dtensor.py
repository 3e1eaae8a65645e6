"""Distributed values: made, refused, walked as pytrees."""

import attrs
import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fdtensor import (
    CommError,
    DTensor,
    Layout,
    LayoutError,
    Mesh,
    Partial,
    Replicate,
    SimulatedComm,
    TensorType,
    connect,
    distribute,
    from_local,
    shards,
)
from fdtensor.testing.strategies import types
from fdtensor.testing.values import block, full_tensor, gather_full

MESH = Mesh(dp=2, tp=2)
DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int64,
    torch.bfloat16,
    torch.float64,
    torch.complex64,
    torch.float8_e4m3fn,
]


@given(types(dtype=torch.int64), st.integers(0, 99), st.booleans(), st.data())
def test_distribute_gives_every_rank_its_block(type, seed, from_one, data):
    tensor = full_tensor(type, seed)
    src_rank = data.draw(st.sampled_from(type.mesh.ranks)) if from_one else None
    comm = SimulatedComm(type.mesh)
    value = distribute(tensor, type.layout, comm, src_rank=src_rank)
    assert value.type is type
    assert torch.equal(gather_full(value.local, type), tensor)
    assert not comm.received or src_rank is not None
    assert torch.equal(value.full(), tensor)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_moves(dtype):
    tensor = torch.arange(35).reshape(7, 5).to(dtype)
    value = distribute(tensor, MESH.layout("dp", "tp"), SimulatedComm(MESH))
    moved = value.redistribute(MESH.layout(("tp", "dp")))
    whole = moved.full()
    assert whole.dtype == dtype
    assert torch.equal(whole.view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12).reshape(3, 4).t(),
        torch.arange(3)[:, None].expand(3, 4),
        torch.arange(24).reshape(6, 4)[::2],
        torch.tensor(7),
        torch.empty(0, 3),
    ],
    ids=["transposed", "expanded", "strided", "0-d", "empty"],
)
def test_any_strides_are_taken_and_nothing_is_aliased(tensor):
    layout = MESH.layout("dp") if tensor.dim() else MESH.layout()
    value = distribute(tensor, layout, SimulatedComm(MESH))
    again = value.redistribute(layout)
    for local, other in zip(value.local, again.local, strict=True):
        assert local.is_contiguous()
        for held in (tensor, local):
            same = other.untyped_storage().data_ptr() == held.untyped_storage().data_ptr()
            assert not same or other.numel() == 0
    assert torch.equal(again.full(), tensor)


def test_a_dtensor_is_a_frozen_pytree_node():
    value = distribute(torch.arange(8), MESH.layout("dp"), SimulatedComm(MESH))
    leaves, spec = optree.tree_flatten({"w": value}, namespace="fdtensor")
    assert len(leaves) == 4
    assert all(map(torch.equal, leaves, value.local))
    doubled = optree.tree_map(lambda t: 2 * t, {"w": value}, namespace="fdtensor")["w"]
    assert isinstance(doubled, DTensor)
    assert torch.equal(doubled.full(), 2 * torch.arange(8))
    assert optree.tree_unflatten(spec, [None] * 4)["w"].type is value.type
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        value.local = ()
    assert not isinstance(value, torch.Tensor)


def test_a_dtensor_says_what_it_is():
    value = distribute(torch.arange(8), MESH.layout("dp"), SimulatedComm(MESH))
    assert (value.shape, value.dtype, value.layout) == ((8,), torch.int64, MESH.layout("dp"))
    assert repr(value).startswith("DTensor(i64[8@dp] on Mesh(dp=2, tp=2)")


TYPE = TensorType((6, 4), torch.float32, Layout(MESH, [Partial(), Replicate()]))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (torch.zeros(5, 4), r"rank 2 has shape \(5, 4\), expected \(6, 4\)"),
        (torch.zeros(6, 4).double(), "rank 2 has dtype torch.float64, expected torch.float32"),
        (torch.zeros(6, 4, device="meta"), "rank 2 has device meta, expected cpu"),
        (None, "rank 2 has None, expected a tensor"),
    ],
    ids=["shape", "dtype", "device", "None"],
)
def test_a_local_tensor_that_does_not_fit_is_refused(wrong, says):
    blocks = [torch.zeros(6, 4), torch.zeros(6, 4), wrong, torch.zeros(6, 4)]
    with pytest.raises(CommError, match=says):
        from_local(tuple(blocks), TYPE, SimulatedComm(MESH))


@pytest.mark.mesh
def test_every_rank_refuses_what_does_not_fit_on_one(pool4):
    def refused():
        import torch.distributed as dist

        from fdtensor import FuncolComm

        comm, said = FuncolComm(MESH), []
        good, meta = torch.zeros(6, 4), torch.zeros(6, 4, device="meta")
        for wrong in (torch.zeros(5, 4), torch.zeros(6, 4).double(), meta, None):
            try:
                from_local(wrong if dist.get_rank() == 2 else good, TYPE, comm)
            except CommError as error:
                said.append(str(error))
        return said, from_local(good, TYPE, comm).full().sum().item()

    answers = pool4.run(refused)
    assert len({tuple(said) for said, _ in answers}) == 1
    assert len(answers[0][0]) == 4
    assert all("rank 2 has" in text for text in answers[0][0])
    assert [total for _, total in answers] == [0.0] * 4


def test_what_is_no_layout_type_or_tensor_is_refused():
    comm = SimulatedComm(MESH)
    with pytest.raises(LayoutError, match="is not a Layout"):
        distribute(torch.zeros(3), "dp", comm)
    with pytest.raises(LayoutError, match="is not a TensorType"):
        from_local((torch.zeros(3),) * 4, MESH.layout("dp"), comm)
    with pytest.raises(CommError, match="not in the mesh of this Comm"):
        distribute(torch.zeros(3), MESH.layout("dp"), comm, src_rank=9)


def test_without_processes_connect_simulates():
    assert isinstance(connect(MESH), SimulatedComm)


def test_shards_are_the_blocks_of_all_ranks():
    tensor = torch.arange(35).reshape(7, 5)
    layout = MESH.layout("tp", "dp")
    type = TensorType(tensor.shape, tensor.dtype, layout)
    for rank, local in zip(MESH.ranks, shards(tensor, layout), strict=True):
        assert torch.equal(local, block(tensor, type, rank))
