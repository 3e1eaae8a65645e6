"""Functions at the edge of what ops take: empty means, whole numbers, one gradient of two."""

import pytest
import torch
import torch.nn.functional as F

from fdtensor import Mesh, SimulatedComm, call, distribute, spmd

MESH = Mesh(b=2)
COMM = SimulatedComm(MESH)
X = torch.arange(12.0).reshape(4, 3)


def of_the_image(n):
    grid = torch.linspace(-1, 1, 2 * 3 * 2 * n).reshape(2, 3, 2, *(1,) * (n - 2), n)
    return lambda im: F.grid_sample(im, grid, align_corners=False)


def empty_mean(loss):
    return torch.func.grad(lambda x: loss(x[:0], x[:0].detach() + 1))


def windows(x):
    whole = x * 1
    whole.unfold(0, 2, 2)[0] = 9.0
    return whole


def windows_by_index(x):
    whole = x * 1
    whole.unfold(0, 2, 2).index_put_((torch.tensor([0]),), torch.tensor(5.0))
    return whole


def whole_numbers(start, end, steps, dtype):
    return lambda x: torch.linspace(start, end, steps, dtype=dtype) + x.sum().to(dtype) * 0


CASES = {
    "the mean of no squares": empty_mean(F.mse_loss),
    "the mean of no smooth losses": empty_mean(F.smooth_l1_loss),
    "the mean of no huber losses": empty_mean(F.huber_loss),
    "the mean of no differences": empty_mean(F.l1_loss),
    "a write to windows apart": windows,
    "a write to windows by an index": windows_by_index,
    "linspace of ints": whole_numbers(2.5, 3.3, 5, torch.int32),
    "linspace of longs": whole_numbers(2.5, 7, 8, torch.int64),
    "linspace of bytes": whole_numbers(1, 251, 8, torch.uint8),
    "linspace of halves": whole_numbers(0, 1, 5, torch.float16),
}


@pytest.mark.parametrize("f", CASES.values(), ids=CASES)
@pytest.mark.parametrize("layout", [MESH.layout(), MESH.layout("b"), MESH.layout(None, "b")])
def test_an_edge_is_as_in_torch(f, layout):
    due = f(X.clone())
    for got in (spmd(f)(distribute(X, layout, COMM)), call(f, distribute(X, layout, COMM))):
        assert got.dtype == due.dtype
        assert torch.equal(got.full(), due)


@pytest.mark.parametrize("n", [2, 3])
def test_the_gradient_of_a_grid_sample_by_its_image_alone(n):
    image = torch.arange(2.0 * 2 * 4**n).reshape(2, 2, *(4,) * n)
    gradient = torch.func.grad(lambda im: of_the_image(n)(im).square().sum())
    for layout in (MESH.layout(), MESH.layout("b"), MESH.layout(None, "b")):
        got = spmd(gradient)(distribute(image, layout, COMM))
        torch.testing.assert_close(got.full(), gradient(image))
