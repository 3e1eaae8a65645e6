"""Functions whose arguments and pins are on several meshes, on real ranks."""

import pytest
import torch

import fdtensor as fd
from fdtensor import Mesh, connect, distribute, spmd

pytestmark = pytest.mark.mesh

LAYOUTS = (
    Mesh(dp=2, tp=2).layout("dp", "tp"),
    Mesh(ep=4).layout("ep"),
    Mesh.from_ranks([[0, 2], [1, 3]], ("inner", "outer")).layout(None, ("inner", "outer")),
)


def layer(x, w):
    y = fd.constrain(x, LAYOUTS[1]) @ w
    return fd.constrain(y * 2, LAYOUTS[2]) + x


def each_order():
    """Whether numbers and gradients are those of one process, for each order of the meshes."""
    comm = connect(LAYOUTS[0].mesh)
    a = torch.arange(64.0).reshape(8, 8) % 7
    expected = layer(a, a.t())
    grads = torch.func.grad(lambda x, w: layer(x, w).sum(), argnums=(0, 1))(a, a.t())
    right = []
    for one in LAYOUTS:
        for other in LAYOUTS:
            x, w = distribute(a, one, comm), distribute(a.t().contiguous(), other, comm)
            for f in (spmd(layer), spmd(layer, out_layouts=other)):
                right.append(f(x, w).full().equal(expected))
            own = fd.grad(spmd(lambda x, w: layer(x, w).sum()), argnums=(0, 1))(x, w)
            right += [g.full().equal(e) for g, e in zip(own, grads, strict=True)]
    return right


def test_numbers_and_gradients_are_those_of_one_process(pool4):
    for right in pool4.run(each_order):
        assert right == [True] * 36
