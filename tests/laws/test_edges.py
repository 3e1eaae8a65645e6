"""Functions at the edge of what ops take: empty means, whole numbers, one gradient of two."""

import pytest
import torch
import torch.nn.functional as F

from fdtensor import Layout, Mesh, Ragged, SimulatedComm, TraceError, call, distribute, spmd

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


MATRICES = torch.randn(3, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
MATRICES += 2 * torch.eye(3, dtype=torch.float64)

SOLVERS = {
    "det": torch.linalg.det,
    "slogdet": lambda a: torch.linalg.slogdet(a)[1],
    "solve": lambda a: torch.linalg.solve(a, a.mT @ a),
    "solve from the right": lambda a: torch.linalg.solve(a, a.mT @ a, left=False),
    "inv": torch.linalg.inv,
}

ORDERS = {
    "row-major": lambda x: x,
    "turned": lambda x: x.mT,
    "of an inverse": torch.linalg.inv,
    "complex": lambda x: torch.complex(x, x.mT),
    "complex, turned": lambda x: torch.complex(x, x.mT).mT,
}


@pytest.mark.few(30)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("op", SOLVERS)
@pytest.mark.parametrize("degree", [0, 1, 2])
def test_derivatives_of_factors_whatever_the_order_of_memory(op, order, degree):
    """Kernels factorize a matrix or its transpose by its strides, and derivatives must know."""

    def f(x):
        x = x.detach().requires_grad_()
        y = SOLVERS[op](ORDERS[order](x))
        y = (y * y.conj()).real.sum()
        if degree == 0:
            return y
        (g,) = torch.autograd.grad(y, x, create_graph=degree == 2)
        return g if degree == 1 else torch.autograd.grad((g * g).sum(), x)[0]

    if (op, order[:7], degree) == ("det", "complex", 2):
        pytest.skip("torch compares values there")
    mesh = Mesh(a=2)
    for layout in (mesh.layout(), mesh.layout("a")):
        got = spmd(f)(distribute(MATRICES, layout, SimulatedComm(mesh))).full()
        torch.testing.assert_close(got, f(MATRICES))


@pytest.mark.parametrize("dim", [0, 1, (0, 1)])
def test_logsumexp_of_complex_numbers(dim):
    mesh = Mesh(a=2)
    x = torch.randn(4, 3, dtype=torch.complex128)
    got = call(torch.logsumexp, distribute(x, mesh.layout("a"), SimulatedComm(mesh)), dim)
    torch.testing.assert_close(got.full(), torch.logsumexp(x, dim))


@pytest.mark.parametrize(
    "f",
    [
        lambda x: torch.nansum(x, dim=()),
        lambda x: torch.nansum(x, dim=[], keepdim=True),
        lambda x: torch.nanmean(x, dim=()),
        lambda x: torch.linalg.vector_norm(x, -1, dim=-1),
        lambda x: torch.linalg.vector_norm(x, -0.5, dim=1),
        lambda x: x[0, 0].flip(0),
        lambda x: torch.cat([x[0, :0], x[1, :0]], 1),
    ],
)
@pytest.mark.parametrize("sizes", [(5, 0), (3, 2)])
def test_what_the_fakes_and_kernels_of_torch_take_for_something_else(f, sizes):
    mesh = Mesh(a=2)
    x = torch.randn(5, 3, dtype=torch.float64)
    given = distribute(x, Layout(mesh, (Ragged(0, sizes),)), SimulatedComm(mesh))
    torch.testing.assert_close(spmd(f)(given).full(), f(x))


def test_softmax_of_integers_is_refused_on_every_layout():
    mesh = Mesh(a=2, b=2)
    x = torch.arange(15).reshape(5, 3)
    for layout in (mesh.layout("a"), mesh.layout(None, "a", partial={"b": "sum"})):
        given = distribute(x, layout, SimulatedComm(mesh))
        with pytest.raises((RuntimeError, TraceError), match="not implemented"):
            call(torch.softmax, given, 1)


def test_a_sparse_tensor_in_a_closure_is_refused():
    mesh, sparse = Mesh(a=2), torch.ones(3).to_sparse()
    x = distribute(torch.ones(3), mesh.layout("a"), SimulatedComm(mesh))
    with pytest.raises(TraceError, match="only dense ones are distributed"):
        spmd(lambda x: x * sparse)(x)
