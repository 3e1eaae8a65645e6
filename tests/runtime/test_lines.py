"""The lines of a rank: what they copy, and what they do not."""

import torch

from fdtensor import Mesh, TensorType, trace
from fdtensor.runtime.local_program import Spelling, local_program
from fdtensor.tensors.calls.halves import halves

SPELLING = Spelling("gloo", "cpu", exchanges=False)

aten = torch.ops.aten


def ops(program):
    return [line.op for line in local_program(program, 0, SPELLING).lines]


def gradients(a, b):
    return (a @ b, *torch.func.grad(lambda a, b: (a @ b).sum(), argnums=(0, 1))(a, b))


def test_a_step_along_an_axis_of_one_rank_copies_nothing():
    mesh = Mesh(x=1)
    rows = TensorType((4, 4), torch.float32, mesh.layout("x"))
    program = trace(gradients, rows, rows, choice="follow")
    assert "slice[]" in str(program)
    assert aten.clone.default not in ops(program)


def test_nor_is_its_result_kept_for_the_backward():
    mesh = Mesh(x=1)
    rows = TensorType((4, 4), torch.float32, mesh.layout("x"))

    def pulled(a, b, cotangent):
        out, back = torch.func.vjp(torch.mm, a, b)
        return (out, *back(cotangent))

    whole = trace(pulled, rows, rows, rows, choice="follow")
    forward, backward, kept = halves(whole, 2, 1)
    assert len(forward.outs) == 1
    assert kept == (0, 1)
    assert aten.clone.default not in [*ops(forward), *ops(backward)]
