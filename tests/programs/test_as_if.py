"""Small tensors take the program of large ones, also where blocks have halos of a fixed size."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from fdtensor import (
    Layout,
    Mesh,
    Ragged,
    Replicate,
    Shard,
    SimulatedComm,
    TensorType,
    distribute,
    spmd,
    trace,
)
from fdtensor.errors import TraceError
from fdtensor.random import key

MESH = Mesh(x=4)
COMM = SimulatedComm(MESH)


def between_walls(u):
    p = F.pad(u, (1, 1, 1, 1))
    return p[2:, 1:-1] + p[:-2, 1:-1] + p[1:-1, 2:] + p[1:-1, :-2] - 4 * u


def in_a_ring(u):
    return u.roll(1, 0) + u.roll(-1, 0) + u.roll(2, 0) - 3 * u


def smoothed(u):
    kernel = torch.ones(1, 1, 3, 3, dtype=u.dtype)
    return F.conv2d(F.conv2d(u[None, None], kernel, padding=1), kernel, padding=1)[0, 0]


def taken_apart(u):
    return u.unflatten(1, (4, -1)).permute(1, 0, 2).flatten(0, 1).cumsum(1)


@pytest.mark.parametrize("f", [between_walls, in_a_ring, smoothed, taken_apart])
@pytest.mark.parametrize("rows", [8, 16, 20])
def test_what_depends_on_sizes_is_chosen_as_it_is_at_others(f, rows):
    rows_cut = MESH.layout("x")
    u = torch.randint(-4, 5, (rows, 12)).double()
    large = TensorType((1 << 14, 1 << 12), torch.float64, rows_cut)
    real = trace(f, large, out_layouts=rows_cut)
    held = distribute(u, rows_cut, COMM)
    assert torch.equal(spmd(f, as_if=real, out_layouts=rows_cut)(held).full(), f(u))
    program = trace(f, held, as_if=real, out_layouts=rows_cut)
    assert ops_of(program) == ops_of(real)
    assert len(program.collectives) == len(real.collectives)


def ops_of(program):
    """The calls, in no order: that of lines depends on sizes."""
    return sorted(str(e.op) for e in program.eqns if not e.steps)


def doubled(x):
    return torch.relu(x) * 2


def typed(shape, mesh=MESH):
    return TensorType(shape, torch.float32, mesh.layout("x"))


LARGE = trace(doubled, typed((4096, 1024)))


@pytest.mark.parametrize(
    ("x", "options", "words"),
    [
        (typed((8, 4)), {"like": 3}, "like=3 is no option"),
        (typed((8, 4)), {"like": lambda s: s}, "as_if= takes a function of shapes"),
        (typed((8, 4)), {"like": LARGE, "as_if": LARGE}, "are given together"),
        (typed((8, 4, 2)), {"like": LARGE}, "argument 0 has other dims than"),
        (typed((8, 4), Mesh(x=2)), {"as_if": LARGE}, "argument 0 is on another mesh than"),
    ],
)
def test_what_cannot_be_repeated_is_refused(x, options, words):
    with pytest.raises(TraceError, match=words):
        trace(doubled, x, **options)


def test_layouts_chosen_for_free_arguments_are_repeated_on_their_mesh():
    free = trace(doubled, TensorType((8, 4), torch.float32, layout="free"), like=LARGE, mesh=MESH)
    assert free.layouts_of(0) == MESH.layout("x")


def between(x):
    return torch.cat([x[:1], x[2:], x[1:2]])


def written(x):
    y = x.clone()
    y[1:] = 5 * x[:-1]
    return y


CUT = {
    "rest": lambda x: x[1:],
    "difference": lambda x: x[1:] - x[:-1],
    "chunk": lambda x: x.chunk(2)[0],
    "tensor_split": lambda x: x.tensor_split(3)[1],
    "split": lambda x: torch.cat(x.split([1, x.shape[0] - 1])[::-1]),
    "pad": lambda x: F.pad(x, (0, 0, 1, 1)),
    "diagonal": lambda x: (x @ x.T[:, :4]).diagonal(),
    "repeat_interleave": lambda x: x.repeat_interleave(3, 0),
    "half": lambda x: x[: x.shape[0] // 2],
    "flat": lambda x: x.T.reshape(-1),
    "between": between,
    "written": written,
    "twice": lambda x: (2 * x[1:])[:-1] + 1,
    "every_other": lambda x: x[1::2] * 2 + x[::2],
    "sum": lambda x: (x[1:] * x[:-1]).sum(),
}
"""Functions of which blocks have other relative sizes in small tensors than in large ones."""

COMMS = [SimulatedComm(mesh) for mesh in (Mesh(x=2), Mesh(x=3), Mesh(a=2, b=2))]


@given(st.data())
def test_blocks_of_any_size_stand_for_those_of_large_tensors(data):
    name, comm = data.draw(st.sampled_from(sorted(CUT))), data.draw(st.sampled_from(COMMS))
    places = st.sampled_from([Replicate(), Shard(0), Shard(1)])
    layout = Layout(comm.mesh, [data.draw(places) for _ in comm.mesh.axes])
    rows, f = data.draw(st.sampled_from([8, 12])), CUT[name]
    full, asked = torch.arange(rows * 4.0).reshape(rows, 4) % 11 - 4, data.draw(st.booleans())
    x = distribute(full, layout, comm)

    def loss(x):
        y = f(x)
        return (y * (torch.arange(y.numel()).reshape(y.shape) % 5)).sum()

    g = data.draw(st.sampled_from([f, torch.func.grad(loss)]))
    large = trace(g, TensorType((64 * rows, 4), x.dtype, layout))
    real = large if asked else lambda shape: (64 * shape[0], *shape[1:])
    step = spmd(g, as_if=real)
    assert torch.equal(step(x).full(), g(full))
    step.trace(x).verify()


@pytest.mark.parametrize("name", ["rest", "difference", "chunk", "pad"])
def test_and_so_do_those_of_a_backward(name):
    full = torch.arange(32.0).reshape(8, 4).requires_grad_()
    x = distribute(full.detach(), MESH.layout("x"), COMM).requires_grad_()
    CUT[name](full).square().sum().backward()
    spmd(CUT[name], as_if=lambda shape: (64 * shape[0], *shape[1:]))(x).square().sum().backward()
    assert torch.equal(x.grad.full(), full.grad)


def test_rows_of_a_slice_are_cut_as_the_slice_cuts_them():
    large = trace(CUT["difference"], typed((512, 4), Mesh(x=2)))
    small = trace(CUT["difference"], typed((8, 4), large.mesh), like=large)
    assert str(large.out_types[0]) == "f32[511@x:255:256,4]"
    assert str(small.out_types[0]) == "f32[7@x:3:4,4]"
    assert len(small.collectives) == len(large.collectives)


def test_ragged_results_are_asked_at_the_sizes_at_hand():
    x = distribute(torch.arange(32.0).reshape(8, 4), MESH.layout("x"), COMM)
    own = Layout(MESH, [Ragged(0, (1, 1, 1, 4))])
    step = spmd(CUT["rest"], as_if=lambda shape: (64 * shape[0], 4), out_layouts=own)
    assert step(x).layout is own
    asked = Layout(MESH, [Ragged(0, (1, 1, 1, 508))])
    large = trace(CUT["rest"], typed((512, 4)), out_layouts=asked)
    with pytest.raises(TraceError, match="result 0 was asked as S"):
        trace(CUT["rest"], typed((8, 4)), like=large)
    assert trace(CUT["rest"], typed((8, 4)), like=large, out_layouts=own).out_types[0].layout is own


def test_a_random_key_keeps_its_size():
    x = distribute(torch.ones(4, 6), MESH.layout("x"), COMM)
    asked = []

    def real(shape):
        asked.append(tuple(shape))
        return tuple(64 * n for n in shape)

    def dropped(x):
        return F.dropout(x, 0.5)

    draws = [spmd(dropped, as_if=scale)(x, key=key(3)).full() for scale in (None, real)]
    assert torch.equal(*draws)
    assert asked == [(4, 6)]
    trace(dropped, x, as_if=real, key=key(3))
    assert asked == [(4, 6), (4, 6)]


@pytest.mark.parametrize(("shape", "dim"), [((0,), 0), ((0, 1), 1), ((0, 1, 6), 1)])
def test_dims_of_0_and_1_are_cut_as_they_were(shape, dim):
    for mesh in (Mesh(x=1), MESH):  # over one rank all cuts cost the same
        x = distribute(torch.ones(shape), mesh.layout(*[None] * dim, "x"), SimulatedComm(mesh))
        step = spmd(drawn, as_if=lambda sizes: [64 * n if n > 1 else n for n in sizes])
        assert step(x, key=key(1)).shape == shape


def drawn(x):
    return x.clone().geometric_(0.3)


def test_what_has_no_counterpart_at_small_sizes_is_told_with_its_line():
    mesh = Mesh(a=2, b=2)
    rows = Layout(mesh, [Shard(0), Shard(0)])
    large = trace(repeated, TensorType((480, 4), torch.float32, rows))
    with pytest.raises(TraceError) as refused:
        trace(repeated, TensorType((7, 4), torch.float32, rows), like=large)
    assert str(refused.value).splitlines()[0] == (
        "as_if= (or like=) repeats what was chosen at other sizes, and aten.view.default of "
        "(7, 3, 4) cannot do it."
    )
    assert "test_as_if.py" in str(refused.value.facts["line"])
    assert "such as multiples of 4" in str(refused.value)


def repeated(x):
    return x.repeat_interleave(3, 0)
