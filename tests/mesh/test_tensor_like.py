"""Operators, `fd.func`, closed-over DTensors and functions inside of others, on real ranks."""

import functools

import pytest
import torch

from fdtensor import func
from fdtensor.layouts.errors import CommError, NotTorchError
from fdtensor.layouts.mesh import Mesh
from fdtensor.tensors.bind import bind
from fdtensor.tensors.call import call
from fdtensor.tensors.connect import connect
from fdtensor.tensors.distribution import distribute
from fdtensor.tensors.spmd import spmd
from tests.support.depth import is_deep, times
from tests.tensors.test_transforms import BODIES, CASES, WAYS, W, X

pytestmark = pytest.mark.mesh

SQUARE, SOME = Mesh(dp=2, tp=2), Mesh.from_ranks([3, 1], "x")
LAYOUTS = (SQUARE.layout("dp", "tp"), SQUARE.layout(None, "dp"), SOME.layout(None, "x"))


def fulls(tree):
    """A pytree of plain tensors."""
    if isinstance(tree, (tuple, list)):
        return [fulls(leaf) for leaf in tree]
    return tree.full().detach()


def spread(layout):
    comm = connect(Mesh(world=4))
    return distribute(X, layout, comm), distribute(W, layout, comm)


def transformed(name, body, way, layout):
    return fulls(CASES[name][0](WAYS[way](BODIES[body]))(*spread(layout)))


@pytest.mark.parametrize("name", CASES)
def test_transforms_give_what_torch_gives(pool4, name):
    some = range(len(LAYOUTS)) if is_deep() else [list(CASES).index(name) % len(LAYOUTS)]
    for k, layout in ((k, LAYOUTS[k]) for k in some):
        body, way = k % len(BODIES), (k + len(name)) % len(WAYS)
        wanted = CASES[name][1](BODIES[body])(X, W)
        for given in pool4.run(transformed, name, body, way, layout):
            torch.testing.assert_close(given, _as_lists(wanted), rtol=0, atol=0)


class Straight(torch.autograd.Function):
    """Rounds, and passes the cotangent through."""

    @staticmethod
    def forward(x):
        return x.round()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, g):
        return g


def without_gradient(x):
    with torch.no_grad():
        return x * x


@functools.wraps(torch.nn.functional.relu)
def named_as_torch(x):
    return x * x.detach()


CUT = (
    lambda x, y: x * x.detach(),
    lambda x, y: x * y.detach(),
    lambda x, y: x + without_gradient(y),
    lambda x, y: Straight.apply(3 * x) * y,
    lambda x, y: torch.nn.functional.relu(x) * y,
    lambda x, y: named_as_torch(x) * y,
    lambda x, y: x * x.new_tensor(2.0) + 0 * y,
)
"""Functions that move nothing, some of which have other derivatives than the ops in them."""


def gradients_of(k, by, layout):
    comm = connect(Mesh(world=4))
    x, y = (distribute(t, layout, comm).requires_grad_() for t in (X, X.flip(0)))
    (spmd(CUT[k]) if by == "spmd" else lambda *a: call(CUT[k], *a))(x, y).sum().backward()
    return [None if t.grad is None else t.grad.full() for t in (x, y)]


@pytest.mark.parametrize("k", range(len(CUT)))
def test_gradients_of_what_moves_nothing_are_those_of_the_function(pool4, k):
    x, y = (t.clone().requires_grad_() for t in (X, X.flip(0)))
    CUT[k](x, y).sum().backward()
    for by in ("spmd", "call"):
        for given in pool4.run(gradients_of, k, by, LAYOUTS[0]):
            for own, due in zip(given, (x.grad, y.grad), strict=True):
                assert (own is None) == (due is None)
                assert own is None or torch.equal(own, due)


def _as_lists(tree):
    return [_as_lists(leaf) for leaf in tree] if isinstance(tree, (tuple, list)) else tree


def manners(layout):
    x, w = spread(layout)
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    inner = spmd(lambda x: torch.relu(x) @ w)
    (inner(x) * 2 + call(torch.matmul, x, w)).sum().backward()
    read = [x.sum().item(), float((x @ w)[0, 0]), (x == x).all().item(), x.tolist()]
    bound = bind(torch.nn.Linear(4, 2, bias=False, dtype=torch.float64), {"weight": w.T.detach()})
    rows = func.vmap(lambda row: row * row.sum())(x)
    return fulls([x.grad, w.grad, bound(x), rows]), read


def test_manners_are_those_of_one_process(pool4):
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    (torch.relu(x) @ w * 2 + x @ w).sum().backward()
    plain = [x.grad, w.grad, X @ W, X * X.sum(1, keepdim=True)]
    read = [X.sum().item(), (X @ W)[0, 0].item(), True, X.tolist()]
    for layout in LAYOUTS[:: times(2, 1)]:
        for tensors, values in pool4.run(manners, layout):
            torch.testing.assert_close(tensors, plain, rtol=0, atol=0)
            assert values == read


def mistaken(layout):
    x, _ = spread(layout)
    told = []
    for mistake in (bool, lambda x: x.add_(1), lambda x: x @ x, lambda x: x.item()):
        with pytest.raises(Exception) as raised:  # noqa: PT011
            mistake(x)
        told.append(type(raised.value).__name__)
    return told, (x + 1).sum().item()


def test_mistakes_are_told_on_all_ranks_before_traffic(pool4):
    for told, total in pool4.run(mistaken, LAYOUTS[0]):
        assert told[:2] == [NotTorchError.__name__] * 2
        assert total == (X + 1).sum().item()


def unlike(layout):
    x, w = spread(layout)
    rank = connect(Mesh(world=4)).rank
    scale = w if rank else w.redistribute(SQUARE.layout())
    spmd(lambda x: x @ scale)(x)


def test_ranks_that_close_over_different_types_are_told(pool4):
    from fdtensor.testing.pool import WorkerError

    with pytest.raises(WorkerError, match=CommError.__name__):
        pool4.run(unlike, LAYOUTS[0])
