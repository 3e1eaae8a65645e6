"""Masked, nested, quantized, sparse and meta tensors: refused in words, wherever they come up."""

import warnings

import pytest
import torch
from torch.masked import masked_tensor

from fdtensor import (
    CommError,
    LayoutError,
    SimulatedComm,
    TensorType,
    TraceError,
    connect,
    distribute,
    from_local,
    spmd,
)
from fdtensor.layouts.mesh import Mesh
from fdtensor.testing.pool import GlooPool

pytestmark = pytest.mark.filterwarnings("ignore")

MESH = Mesh(x=2)
COMM = SimulatedComm(MESH)


def masked():
    return masked_tensor(torch.randn(4), torch.tensor([True, False, True, True]))


def nested(layout=torch.strided):
    return torch.nested.nested_tensor([torch.randn(2), torch.randn(3)], layout=layout)


STRANGE = {
    "masked": (masked, "a MaskedTensor cannot be laid out"),
    "nested": (nested, "a nested tensor cannot be laid out"),
    "jagged": (lambda: nested(torch.jagged), "a nested tensor cannot be laid out"),
    "quantized": (
        lambda: torch.quantize_per_tensor(torch.randn(4), 0.1, 0, torch.qint8),
        "tensors of torch.qint8 cannot be laid out",
    ),
    "sparse": (lambda: torch.eye(4).to_sparse(), "has a torch.sparse_coo tensor, expected a stri"),
}


@pytest.mark.parametrize("name", STRANGE)
def test_a_tensor_of_another_kind_is_not_distributed(name):
    make, words = STRANGE[name]
    with pytest.raises((LayoutError, CommError)) as caught:
        distribute(make(), MESH.layout("x"), COMM)
    assert words in str(caught.value)


@pytest.mark.parametrize("make", [masked, nested, lambda: nested(torch.jagged)])
def test_a_block_of_another_kind_is_refused(make):
    type = TensorType((8,), torch.float32, MESH.layout("x"))
    with pytest.raises(CommError, match="expected a plain tensor"):
        from_local((make(), make()), type, COMM)


INSIDE = {
    "masked": (lambda x: masked_tensor(x, x > 0).sum(), "a MaskedTensor is made"),
    "nested": (lambda x: torch.nested.nested_tensor([x, x]), "makes nested tensors"),
    "jagged": (
        lambda x: torch.nested.as_nested_tensor([x, x], layout=torch.jagged),
        "makes nested tensors",
    ),
    "quantized": (
        lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8).dequantize(),
        "is of quantized tensors",
    ),
    "sparse": (lambda x: x.to_sparse(), "only dense ones are distributed"),
}


@pytest.mark.parametrize("name", INSIDE)
def test_a_function_that_makes_one_is_refused(name):
    f, words = INSIDE[name]
    with pytest.raises(TraceError, match=words):
        spmd(f)(distribute(torch.randn(4), MESH.layout("x"), COMM))
    masked()  # which can be made again outside


def test_fake_quantization_is_recorded():
    def f(x):
        return torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127)

    x = torch.randn(4, 4)
    for layout in (MESH.layout(), MESH.layout("x")):
        assert torch.equal(spmd(f)(distribute(x, layout, COMM)).full(), f(x))


def on_a_rank() -> str:
    warnings.simplefilter("ignore")
    comm = connect(Mesh(x=4))
    said = []
    for make in (lambda: torch.empty(4, device="meta"), masked):
        try:
            distribute(make(), comm.mesh.layout("x"), comm)
        except (LayoutError, CommError) as error:
            said.append(str(error))
    return " ".join(said)


@pytest.mark.mesh
def test_real_ranks_refuse_meta_tensors(pool4: GlooPool):
    for text in pool4.run(on_a_rank):
        assert "has device meta, expected cpu" in text
        assert "a MaskedTensor cannot be laid out" in text
