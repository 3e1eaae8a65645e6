"""`Program.to_fx`: a plain module for each rank, without anything of this library."""

import pytest
import torch
import torch.distributed as dist

from fdtensor.layouts.errors import TraceError
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import Partial, Replicate, Shard
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.plans.cost import GLOO, NCCL
from fdtensor.programs.tracer import trace
from fdtensor.runtime.control.process import groups
from fdtensor.runtime.interpreter import run
from fdtensor.tensors.connect import connect, distribute

MESH = Mesh(dp=2, tp=2)
CONSTANT = torch.arange(3.0)


def step(w1, w2, x):
    def loss(ws, x):
        hidden = torch.relu(x @ ws[0]) @ ws[1]
        return ((hidden + CONSTANT) ** 2).mean() + torch.softmax(hidden, 1).amax()

    return torch.func.grad_and_value(loss)((w1, w2), x)


def typed(shape, *placements):
    return TensorType(shape, torch.float32, Layout(MESH, placements))


EVEN = (
    typed((8, 12), Replicate(), Shard(1)),
    typed((12, 3), Replicate(), Shard(0)),
    typed((4, 8), Shard(0), Replicate()),
)
UNEVEN = (
    typed((5, 7), Shard(0), Shard(1)),
    typed((7, 3), Replicate(), Shard(0)),
    typed((3, 5), Shard(0), Partial()),
)


def programs():
    return [trace(step, *types, cost=cost) for types in (EVEN, UNEVEN) for cost in (NCCL, GLOO)]


@pytest.mark.parametrize("rank", range(4))
def test_a_module_holds_nothing_of_this_library(rank):
    for program in programs():
        module = program.to_fx(rank)
        assert isinstance(module, torch.fx.GraphModule)
        for node in module.graph.nodes:
            if node.op == "call_function":
                assert type(node.target).__module__.startswith(("torch", "builtins"))
        assert "fdtensor." not in module.code


def test_a_module_sends_what_the_program_says():
    for program in programs():
        module = program.to_fx(0)
        waits = [n for n in module.graph.nodes if "wait_tensor" in str(n.target)]
        sent = [n for n in module.graph.nodes if str(n.target).startswith("_c10d_functional.")]
        assert len(sent) == 2 * len(waits)
        assert len(waits) >= len(program.collectives)


def test_every_rank_takes_part_in_an_exchange():
    src = Layout(MESH, [Shard(0), Replicate()])
    dst = Layout(MESH, [Shard(0), Shard(0)], {0: ("tp", "dp")})
    type = TensorType((6, 8), torch.float32, src)
    program = trace(lambda x: x * 2, type, out_layouts=dst)
    sent = []
    for rank in MESH.ranks:
        nodes = program.to_fx(rank).graph.nodes
        sent.append([str(n.target) for n in nodes if str(n.target).startswith("_c10d_functional")])
    assert sent[0]
    assert all(names == sent[0] for names in sent)


def test_results_have_no_derivatives_of_one_rank_alone():
    for program in programs():
        outs = program.to_fx(0).graph.output_node().args[0]
        assert all(node.target is torch.ops.aten.detach.default for node in outs)


def test_closed_over_tensors_are_buffers():
    module = programs()[0].to_fx(1)
    assert any(torch.equal(b, CONSTANT) for b in module.buffers())


def test_a_rank_outside_has_no_module():
    with pytest.raises(TraceError) as error:
        programs()[0].to_fx(7)
    assert str(error.value) == OUTSIDE


def locally(types, cost):
    """What the module of this rank, its compiled form and the program give."""
    comm = connect(MESH)
    program = trace(step, *types, cost=cost)
    generator = torch.Generator().manual_seed(0)
    full = [torch.randn(t.shape, generator=generator) for t in types]
    blocks = [distribute(t, type.layout, comm).local for t, type in zip(full, types)]
    groups(MESH)
    module = program.to_fx(dist.get_rank())
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    return run(program, blocks, comm), module(*blocks), compiled(*blocks)


@pytest.mark.few(2)
@pytest.mark.mesh
@pytest.mark.parametrize("types", [EVEN, UNEVEN], ids=["even", "uneven"])
@pytest.mark.parametrize("cost", [NCCL, GLOO], ids=["nccl", "gloo"])
def test_a_module_runs_by_itself_and_compiled(pool4, types, cost):
    for wanted, plain, compiled in pool4.run(locally, types, cost):
        for a, b, c in zip(wanted, plain, compiled, strict=True):
            assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)
            assert torch.allclose(a, c, rtol=1e-5, atol=1e-6)


OUTSIDE = """\
rank 7 runs nothing of step: it is not in the mesh.

  mesh: Mesh(dp=2, tp=2)

Ask for a rank of the mesh."""
