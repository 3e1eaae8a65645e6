"""Small tensors take the program of large ones, also where blocks have halos of a fixed size."""

import pytest
import torch
import torch.nn.functional as F

from fdtensor import Mesh, SimulatedComm, TensorType, distribute, spmd, trace
from fdtensor.errors import TraceError

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
