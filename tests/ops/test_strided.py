"""`as_strided` of a row-major tensor, as slices of it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fdtensor import Mesh, TensorType, call, distribute, trace
from fdtensor.ops.strided import part_of, put_back, shape_of, sliced
from fdtensor.runtime.simulator import SimulatedComm


@st.composite
def views(draw):
    """A row-major tensor and slices and selections of it, with dims of size 1 between."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    x = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    view = x
    for d in reversed(range(len(shape))):
        start = draw(st.integers(0, shape[d] - 1))
        if draw(st.booleans()):
            view = view.select(d, start)
        else:
            stop, step = draw(st.integers(start + 1, shape[d])), draw(st.integers(1, 3))
            view = view[(slice(None),) * d + (slice(start, stop, step),)]
        if draw(st.integers(0, 4)) == 0:
            view = view.unsqueeze(d)
    return x, view


@given(views())
def test_a_view_by_slices_is_found_and_written_back(pair):
    x, view = pair
    size, stride, offset = view.size(), view.stride(), view.storage_offset()
    part = part_of(x.shape, size, stride, offset)
    assert part is not None
    assert torch.equal(sliced(x, part, size), view)
    wanted = torch.as_strided_scatter(x, -view - 1, size, stride, offset)
    assert torch.equal(put_back(x, -view - 1, part), wanted)


numbers = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 9)), max_size=3)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), numbers, st.integers(0, 9))
def test_what_is_found_is_what_the_strides_say(shape, dims, offset):
    x = torch.arange(float(torch.Size(shape).numel()))
    size, stride = [n for n, _ in dims], [s for _, s in dims]
    for found in (shape, shape_of(x.numel(), size, stride)):
        part = None if found is None else part_of(found, size, stride, offset)
        if part is not None:
            wanted = torch.as_strided(x, size, stride, offset)
            assert torch.equal(sliced(x.reshape(found), part, size), wanted)


def written(x, y):
    out = x.clone()
    out[:, 1:3] = y
    out[:, ::2] *= 2
    out[..., 0] += y[:, 0, :1] ** 2
    return out


@pytest.mark.parametrize("choice", ["follow", "cheapest"])
def test_the_derivative_of_a_write_to_a_slice_moves_nothing(choice):
    mesh = Mesh(dp=4)
    cut = mesh.layout("dp")

    def derivative(x, y):
        return torch.func.grad(lambda x, y: (written(x, y) ** 2).sum(), (0, 1))(x, y)

    types = [TensorType((8, n, 5), torch.float64, cut) for n in (4, 2)]
    assert trace(derivative, *types, choice=choice, out_layouts=(cut, cut)).received_bytes == 0
    x, y = torch.rand(8, 4, 5).double(), torch.rand(8, 2, 5).double()
    comm = SimulatedComm(mesh)
    got = call(derivative, *[distribute(t, cut, comm) for t in (x, y)])
    for ours, plain in zip(got, derivative(x, y), strict=True):
        torch.testing.assert_close(ours.full(), plain)
