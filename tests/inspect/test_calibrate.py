"""A cost model measured on real processes, and prices by it."""

import attrs
import pytest
import torch

from fdtensor import (
    GLOO,
    H100,
    NCCL,
    CommError,
    Mesh,
    PlanError,
    SimulatedComm,
    TensorType,
    calibrate,
    estimate,
    fuse,
    plan,
    trace,
)
from fdtensor.programs.timeline import timeline

MESH = Mesh(dp=2, tp=2)


def test_an_estimate_is_what_a_plan_for_that_model_says():
    src = TensorType((4096, 64), torch.float32, MESH.layout("dp", "tp"))
    found = plan(src, MESH.layout("tp", "dp"), cost=NCCL)
    assert estimate(found, NCCL) == found.seconds
    assert estimate(found, GLOO) > found.seconds
    assert estimate(fuse([found, found]), GLOO) == 2 * estimate(fuse([found]), GLOO)
    program = trace(lambda x: x.sum(), found.src)
    assert estimate(program, program.cost) == timeline(program, program.cost).seconds
    assert estimate(program, program.cost) > program.seconds > 0
    with pytest.raises(PlanError) as error:
        estimate(found, "gloo")
    assert str(error.value) == NO_MODEL


def test_an_estimate_of_a_program_is_less_where_it_computes_while_it_communicates():
    mesh = Mesh(x=8)
    params = TensorType((4096, 4096), torch.bfloat16, mesh.layout())
    rows = TensorType((65536, 4096), torch.bfloat16, mesh.layout("x"))
    program = trace(torch.func.grad(lambda w, x: ((x @ w) @ w).square().mean()), params, rows)
    whole = timeline(program, H100)
    assert max(whole.computing, whole.sending) <= estimate(program, H100)
    assert estimate(program, H100) <= whole.computing + whole.sending
    calls = attrs.evolve(H100, launch=(*H100.launch, ("local", 1.0)))
    assert estimate(program, calls) > 1.0


def test_a_simulated_mesh_has_no_links_to_measure():
    with pytest.raises(CommError, match="there are no links to measure"):
        calibrate(SimulatedComm(MESH))


@pytest.mark.mesh
def test_every_rank_gets_the_same_model(pool4):
    def measured():
        from fdtensor import FuncolComm, Mesh, calibrate

        return calibrate(FuncolComm(Mesh(dp=2, tp=2)), rounds=1)

    models = pool4.run(measured)
    assert len(set(models)) == 1
    (model,) = set(models)
    assert model.bandwidth > 0
    assert {axis for axis, _, _ in model.axes} == {"dp", "tp"}
    assert [name for name, _ in model.flops] == ["", "bf16", "f64"]
    assert 0 < dict(model.launch)["local"] < 1
    src = TensorType((4096, 64), torch.float32, MESH.layout("dp"))
    assert plan(src, MESH.layout(), cost=model).seconds > 0


NO_MODEL = """\
estimate prices a plan or a program by a cost model.

  given: Plan
  cost:  'gloo'

Write estimate(plan(src, dst), NCCL), or with the model of calibrate(comm)."""
