"""What a function raises while it is recorded is told with its types, or passed on."""

import pytest
import torch
import torch.nn.functional as F

from fdtensor import Mesh, TensorType, TraceError, trace

MESH = Mesh(dp=2)
LAYOUT = MESH.layout("dp")


def test_a_value_error_of_torch_names_the_types():
    x = TensorType((4, 6), torch.float32, LAYOUT)
    target = TensorType((6,), torch.int64, LAYOUT)
    with pytest.raises(TraceError, match=r"Expected input batch_size \(4\)") as told:
        trace(F.cross_entropy, x, target)
    assert told.value.facts["argument 1"] == str(target)
    assert "test_failures.py" in told.value.facts["line"]


@pytest.mark.parametrize("under", [lambda f: f, torch.vmap], ids=["plain", "vmap"])
def test_an_error_of_the_function_itself_stays(under):
    def refuses(x):
        raise ValueError("no such thing")

    with pytest.raises(ValueError, match="no such thing"):
        trace(under(refuses), TensorType((4, 6), torch.float32, LAYOUT))
