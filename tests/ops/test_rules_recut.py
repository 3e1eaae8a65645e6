"""Ops that take an operand as it is cut: in each of several blocks, or in blocks of any size."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from fdtensor import (
    Layout,
    Mesh,
    Partial,
    Ragged,
    Replicate,
    Shard,
    SimulatedComm,
    StridedShard,
    TensorType,
    distribute,
    like,
    spmd,
    trace,
)
from fdtensor.errors import FdtensorError
from fdtensor.ops.graph import Full
from fdtensor.ops.lift import layout_of
from fdtensor.ops.rows import kinds_of, recut_rows, rows_of
from fdtensor.ops.same_elements import same_elements
from fdtensor.testing.row_checks import call_of, verify

aten = torch.ops.aten


def factored(draw, total):
    shape = []
    while total > 1:
        shape.append(draw(st.sampled_from([n for n in range(2, total + 1) if total % n == 0])))
        total //= shape[-1]
    return tuple(draw(st.permutations(shape)))


@st.composite
def reshapes(draw):
    total = draw(st.sampled_from([8, 16, 24, 32, 36, 48, 64, 72]))
    before, after = factored(draw, total), factored(draw, total)
    dim = draw(st.integers(0, len(before) - 1))
    return before, after, StridedShard(dim, draw(st.sampled_from([2, 3, 4, 6, 8])))


@given(reshapes(), st.integers(2, 4))
def test_each_block_that_is_cut_stays_where_it_is(reshape, count):
    before, after, kind = reshape
    call, tensors, _ = call_of(aten.view.default, (torch.zeros(before), list(after)), {})
    types = [Full(tuple(tensors[0].shape), torch.float32), Full(after, torch.float32)]
    mesh = Mesh(x=count)
    rows = [*recut_rows(call, types, count, [kind])]
    for row in rows:
        assert row.ins == (kind,)
        src, dst = (
            TensorType(shape, torch.float32, Layout(mesh, [p]))
            for shape, p in ((before, row.ins[0]), (after, row.outs[0]))
        )
        assert same_elements(src, dst)
    assert not {row.ins for row in rows} & {row.ins for row in rows_of(call, types, count)}


@st.composite
def windows(draw):
    """A slice, padding, split or diagonal, and the sizes of blocks of a dim that it takes."""
    sizes = draw(st.lists(st.integers(0, 5), min_size=2, max_size=4).filter(sum))
    x = torch.arange(float(sum(sizes) * 3)).reshape(sum(sizes), 3)
    start, end = draw(st.integers(-3, sum(sizes))), draw(st.integers(0, sum(sizes) + 2))
    step, pads = draw(st.integers(1, 3)), draw(st.lists(st.integers(-2, 3), min_size=4, max_size=4))
    op, args = draw(
        st.sampled_from(
            [
                (aten.slice.Tensor, (0, start, end, step)),
                (aten.constant_pad_nd.default, ([max(p, 0) for p in pads], 7.0)),
                (aten.split.Tensor, (draw(st.integers(1, 4)),)),
                (aten.diagonal_copy.default, (draw(st.integers(-2, 2)), 1, 0)),
            ]
        )
    )
    return op, (x, *args), Ragged(0, tuple(sizes))


@given(windows())
def test_windows_of_a_dim_are_cut_where_its_blocks_end(window):
    op, args, kind = window
    call, ins, outs = call_of(op, args, {})
    types = [Full(tuple(t.shape), t.dtype) for t in (*ins, *outs)]
    rows = [*recut_rows(call, types, len(kind.sizes), [kind])]
    assert all(row.ins == (kind,) for row in rows)
    assert verify(op, [args], rows, count=len(kind.sizes)) == []
    if op is aten.slice.Tensor and types[1].shape[0] not in (0, types[0].shape[0]):
        assert len(rows) == 1


def test_a_stencil_between_walls_sends_a_row_to_each_side():
    mesh = Mesh(x=4)

    def stencil(u):
        p = F.pad(u, (1, 1, 1, 1))
        return p[2:, 1:-1] + p[:-2, 1:-1] + p[1:-1, 2:] + p[1:-1, :-2] - 4 * u

    u = TensorType((1 << 14, 1 << 12), torch.float32, mesh.layout("x"))
    assert trace(stencil, u, out_layouts=mesh.layout("x")).received_bytes == 2 * (1 << 12) * 4


@pytest.mark.parametrize("pad", [(1, 1, 1, 1), (0, 2, 3, 0), (0, 0, 0, 1), (1, 1), (-1, 1, 0, 0)])
def test_a_circular_padding_is_that_of_torch(pad):
    x = torch.arange(96.0).reshape(1, 1, 16, 6) if len(pad) > 2 else torch.arange(96.0).view(16, 6)
    mesh = Mesh(x=4)
    cut = mesh.layout(None, None, "x") if len(pad) > 2 else mesh.layout("x")
    held = distribute(x, cut, SimulatedComm(mesh))

    def f(x):
        return F.pad(x, pad, mode="circular")

    assert torch.equal(spmd(f)(held).full(), f(x))
    gradient = torch.func.grad(lambda x: (f(x) ** 2).sum())
    assert torch.equal(spmd(gradient)(held).full(), gradient(x))


def test_a_padding_that_torch_refuses_is_refused():
    held = distribute(torch.zeros(8, 4), Mesh(x=4).layout("x"), SimulatedComm(Mesh(x=4)))
    for pad in ((5, 0), (1, 1, 1, 1, 1, 1), (1, 1, 1)):
        with pytest.raises(FdtensorError):
            spmd(lambda x, pad=pad: F.pad(x, pad, mode="circular"))(held)


@pytest.mark.parametrize("of_slices", [True, False])
def test_a_stencil_in_a_ring_sends_a_row_to_each_side(of_slices):
    mesh = Mesh(x=4)

    def stencil(u, kernel):
        p = F.pad(u[None, None], (1, 1, 1, 1), mode="circular")
        if not of_slices:
            return F.conv2d(p, kernel)[0, 0]
        p = p[0, 0]
        return p[2:, 1:-1] + p[:-2, 1:-1] + p[1:-1, 2:] + p[1:-1, :-2] - 4 * u

    u = TensorType((1 << 14, 1 << 12), torch.float32, mesh.layout("x"))
    kernel = TensorType((1, 1, 3, 3), torch.float32, mesh.layout())
    program = trace(stencil, u, kernel, out_layouts=mesh.layout("x"))
    assert program.received_bytes <= 2 * ((1 << 12) + 2) * 4


def test_a_dim_of_three_that_each_cut_one_goes_into_a_larger_one():
    mesh = Mesh(a=2, b=2, c=2)
    cuts = Layout(mesh, [Shard(0), StridedShard(0, 2), StridedShard(0, 4)], {0: ["c", "b", "a"]})
    x = TensorType((8, 2, 4), torch.float32, cuts)
    program = trace(lambda x: x.flatten(0, 1).exp().unflatten(0, (8, 2)), x)
    assert not program.collectives
    assert program.out_types == (x,)


def test_axes_that_cut_merged_dims_do_so_in_the_order_in_which_they_were_merged():
    mesh = Mesh(a=2, b=2, c=2)
    placements = (Shard(0), StridedShard(0, 2), StridedShard(0, 4))
    assert layout_of(mesh, placements).cuts(0) == ("c", "b", "a")
    assert layout_of(mesh, placements, ("a",)).cuts(0) == ("a", "c", "b")  # what is kept stays
    assert layout_of(mesh, (Shard(0),) * 3).cuts(0) == mesh.axes


def test_a_few_kinds_of_blocks_are_followed_through_many_slices():
    """Each slice adds a kind of blocks; pairs of all of them would be priced."""
    kinds = [Ragged(1, (n, 40 - n)) for n in range(1, 21)]
    others = [Partial("avg"), StridedShard(0, 2)]
    followed = kinds_of([Replicate(), Shard(0), *kinds, Partial("max")])
    assert followed == [*kinds[:4], *kinds[-4:], Partial("max")]
    assert kinds_of([Shard(1), *others]) == others


def test_a_chain_of_slices_stays_where_its_blocks_are():
    def narrowing(x):
        for n in range(1, 16):
            x = torch.tanh(x[:, : 40 - n])
        return x

    mesh = Mesh(x=4)
    x = torch.randn(4, 40)
    held = distribute(x, mesh.layout(None, "x"), SimulatedComm(mesh))
    program = trace(narrowing, held, out_layouts=like(None))
    assert program.received_bytes == 0
    torch.testing.assert_close(spmd(narrowing)(held).full(), narrowing(x))
