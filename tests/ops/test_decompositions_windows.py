"""Windows over two dims: the pieces give what the ops give, and send halos only."""

import pytest
import torch
import torch.nn.functional as F

from fdtensor import Layout, Mesh, Shard, TensorType, like, trace
from tests.support.decompositions import differences

aten = torch.ops.aten

SAMPLES = [
    (torch.randn(2, 3, 7, 8), (3, 2), (1, 2), (1, 0), (2, 1)),
    (torch.randn(3, 5, 6), (2, 2), (2, 1), (0, 1), (1, 2)),
    (torch.randn(1, 1, 4, 4), (1, 1), (1, 1), (0, 0), (1, 1)),
]


def test_pieces_give_what_the_ops_give():
    assert not differences(aten.im2col.default, SAMPLES)
    folded = [(aten.im2col.default(x, *how), tuple(x.shape[-2:]), *how) for x, *how in SAMPLES]
    assert not differences(aten.col2im.default, folded)


@pytest.mark.parametrize(("shape", "dim", "halo"), [((2, 3, 8, 8), 2, 1), ((2, 3, 9, 8), 2, 1)])
def test_unfold_of_a_cut_dim_sends_its_halo(shape, dim, halo):
    type = TensorType(shape, torch.float32, Layout(Mesh(x=4), [Shard(dim)]))
    program = trace(lambda x: F.unfold(x, 3, padding=1), type)
    row = 4 * 2 * 3 * (8 + 2)  # a padded row of all images and channels
    assert program.received_bytes <= 2 * halo * row
    assert not any("replicated" in eqn.note for eqn in program.eqns)
    gradient = torch.func.grad(lambda x: F.unfold(x, 3, padding=1).square().sum())
    back = trace(gradient, type, out_layouts=like(None))
    assert back.received_bytes < type.nbytes
