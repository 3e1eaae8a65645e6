"""Operands of several dtypes are refused where torch refuses them, when a function is recorded."""

import pytest
import torch
import torch.nn.functional as F

from fdtensor import Mesh, TensorType, TraceError, trace

MESH = Mesh(dp=2)
F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16

AT = torch.tensor([0])

CASES = {
    "mm": (torch.mm, (4, 6), (6, 3)),
    "matmul": (torch.matmul, (2, 4, 6), (6, 3)),
    "mv": (torch.mv, (4, 6), (6,)),
    "dot": (torch.dot, (6,), (6,)),
    "bmm": (torch.bmm, (2, 4, 6), (2, 6, 3)),
    "addmm": (torch.addmm, (4, 3), (4, 6), (6, 3)),
    "addmv": (torch.addmv, (4,), (4, 6), (6,)),
    "addbmm": (torch.addbmm, (4, 3), (2, 4, 6), (2, 6, 3)),
    "baddbmm": (torch.baddbmm, (2, 4, 3), (2, 4, 6), (2, 6, 3)),
    "linear": (F.linear, (4, 6), (3, 6), (3,)),
    "conv1d": (F.conv1d, (1, 4, 6), (3, 4, 2)),
    "layer_norm": (lambda x, w: F.layer_norm(x, (6,), w), (4, 6), (6,)),
    "group_norm": (lambda x, w: F.group_norm(x, 2, w), (4, 6), (6,)),
    "batch_norm": (lambda x, w: F.batch_norm(x, None, None, w, w, True), (4, 6), (6,)),
    "cdist": (torch.cdist, (4, 6), (3, 6)),
    "bce": (F.binary_cross_entropy, (4,), (4,)),
    "nll_loss": (lambda x, w: F.nll_loss(x, torch.tensor([0, 1]), w), (2, 6), (6,)),
    "index_add": (lambda x, y: x.index_add(0, AT, y), (4, 6), (1, 6)),
    "index_copy": (lambda x, y: x.index_copy(0, AT, y), (4, 6), (1, 6)),
    "index_put": (lambda x, y: x.index_put((AT,), y), (4, 6), (6,)),
    "heaviside": (torch.heaviside, (4,), (4,)),
    "cross": (lambda x, y: torch.cross(x, y, dim=-1), (4, 3), (4, 3)),
    "where": (lambda x, y: torch.where(x > 0, x, y), (4,), (4,)),
    "add": (torch.add, (4,), (4,)),
    "cat": (lambda x, y: torch.cat([x, y]), (4,), (4,)),
}


@pytest.mark.parametrize("dtypes", [(F32, F64), (F32, BF16), (BF16, F32), (F64, F64)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_what_torch_refuses_is_refused_when_recorded(name, dtypes):
    f, *shapes = CASES[name]
    each = [dtypes[0], *[dtypes[1]] * (len(shapes) - 1)]
    types = [TensorType(s, d, MESH.layout()) for s, d in zip(shapes, each)]
    try:
        f(*[torch.ones(s, dtype=d) for s, d in zip(shapes, each)])
    except NotImplementedError:
        pytest.skip("this build of torch has no kernel")
    except RuntimeError:
        with pytest.raises(TraceError, match="fails on these types") as error:
            trace(f, *types)
        assert {"argument 0", "argument 1", "line"} <= error.value.facts.keys()
        return
    trace(f, *types)
