"""The lines of a rank: what they copy, and what they do not."""

import torch
from hypothesis import given

from fdtensor import Layout, Mesh, Shard, StridedShard, TensorType, plan, trace
from fdtensor.plans.collectives import Slice, Step
from fdtensor.programs.eqn import is_said
from fdtensor.runtime.local_program import Spelling, local_program
from fdtensor.tensors.calls.halves import halves
from fdtensor.testing.strategies import redistributions

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


def test_a_step_that_keeps_a_part_of_blocks_cut_in_another_order_is_written():
    mesh = Mesh(dp=2, tp=2)
    pieces = Layout(mesh, [Shard(0), StridedShard(0, 2)], {0: ["tp", "dp"]})
    rows, pieces = (TensorType((4,), torch.int64, a) for a in (mesh.layout("dp"), pieces))
    (step,) = plan(rows, pieces).steps
    assert not step.collective.axes
    assert not is_said(step)


@given(redistributions())
def test_a_step_that_only_says_so_leaves_the_block_of_every_rank(types):
    src, dst = types
    for step in (*plan(src, dst).steps, Step(Slice((), ()), src, dst)):
        if is_said(step):
            for coord in map(src.mesh.coord, src.mesh.order):
                assert step.src.box(coord) == step.dst.box(coord)
