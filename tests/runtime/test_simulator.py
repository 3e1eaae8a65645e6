"""Simulated ranks compute and hold once what is the same on all of them, which nobody can tell."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import fdtensor as fd
from fdtensor import Mesh, SimulatedComm, call, distribute, plan, run, spmd
from fdtensor.plans.collectives import even
from fdtensor.plans.reductions import reduced
from fdtensor.runtime.alike import replicas
from fdtensor.runtime.all_ranks import run_lines
from fdtensor.runtime.local_program import local_program, local_programs
from fdtensor.testing.strategies import redistributions
from fdtensor.testing.values import full_tensor, scatter
from tests.support.programs import CASES, ran, settings_of, traced

TIMES = []
"""A call of `counted` each."""


@torch.library.custom_op("tests_simulator::counted", mutates_args=())
def counted(x: torch.Tensor) -> torch.Tensor:
    TIMES.append(1)
    return 2 * x


@counted.register_fake
def _(x):
    return torch.empty_like(x)


@fd.rule(torch.ops.tests_simulator.counted.default)
def _counted(x):
    for d in range(x.ndim):
        yield fd.Shard(d), fd.Shard(d)


any_setting = st.sampled_from(sorted(CASES)).flatmap(settings_of)


class Watching(TorchDispatchMode):
    """A mode that does nothing; while it is there, inputs that are equal stay apart."""

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        return op(*args, **(kwargs or {}))


def shared(value, type):
    """The value with one tensor for all replicas of a block."""
    value = list(value)
    for ranks in replicas(type):
        first, *others = [type.mesh.position(rank) for rank in ranks]
        for other in others:
            value[other] = value[first]
    return tuple(value)


def memories(value):
    return [t.untyped_storage()._cdata for t in value if t.numel()]


@given(redistributions(), st.integers(0, 99))
def test_a_plan_moves_shared_tensors_as_it_does_copies(case, seed):
    src, dst = case
    comm = SimulatedComm(Mesh.from_ranks(sorted({*src.mesh.order, *dst.mesh.order}), "all"))
    apart = scatter(full_tensor(src, seed), src, seed)
    out, other = (run(plan(src, dst), v, comm) for v in (apart, shared(apart, src)))
    for a, b in zip(out, other, strict=True):
        assert torch.equal(a, b)
    assert len({*memories(other)}) == len(memories(other)), "each rank has memory of its own"


@given(any_setting)
def test_a_program_computes_once_what_it_would_compute_on_each_rank(setting):
    program = traced(setting)
    once, _ = ran(setting, program)
    with Watching():
        each, _ = ran(setting, program)
    for a, b in zip(once, each, strict=True):
        assert all(torch.equal(x, y) or x.isnan().any() for x, y in zip(a, b, strict=True))
    every = [number for value in once for number in memories(value)]
    assert len({*every}) == len(every), "each output of each rank has memory of its own"


@given(any_setting)
def test_ranks_share_the_lines_that_each_would_run(setting):
    program = traced(setting)
    for rank, local in zip(program.mesh.order, local_programs(program), strict=True):
        assert texts(local) == texts(local_program(program, rank))


def texts(local):
    return [
        (str(line.op), line.outs, line.eqn, *map(str, (*line.args, *line.kwargs)))
        for line in local.lines
    ]


def test_what_is_replicated_is_computed_once():
    mesh = Mesh(dp=2, tp=3)
    comm = SimulatedComm(mesh)
    x = distribute(torch.arange(12.0).reshape(6, 2), mesh.layout("dp"), comm)
    TIMES.clear()
    y = call(counted, x, out_layouts=mesh.layout("dp"))
    assert len(TIMES) == 2
    assert torch.equal(y.full(), 2 * torch.arange(12.0).reshape(6, 2))


def test_replicas_that_differ_stay_different():
    mesh = Mesh(x=4)
    comm = SimulatedComm(mesh, check="never")
    type = fd.TensorType((3,), torch.float32, mesh.layout())
    program = fd.trace(lambda x: x * 2 + 1, type, out_layouts=mesh.layout())
    value = tuple(torch.full((3,), float(rank // 2)) for rank in range(4))
    (out,) = run_lines(program, [value], comm)
    assert [t[0].item() for t in out] == [1, 1, 3, 3]


@pytest.mark.parametrize("bits", [(0.0, -0.0), (-float("nan"), float("nan"))])
def test_replicas_are_the_same_by_their_bits(bits):
    mesh = Mesh(x=2)
    comm = SimulatedComm(mesh, check="never")
    type = fd.TensorType((1,), torch.float32, mesh.layout())
    sign = fd.trace(torch.signbit, type, out_layouts=mesh.layout())
    value = tuple(torch.tensor([bit]) for bit in bits)
    (out,) = run_lines(sign, [value], comm)
    assert [bool(t) for t in out] == [bool(torch.signbit(v)) for v in value]


def test_writing_to_a_result_of_one_rank_leaves_those_of_others():
    mesh = Mesh(x=4)
    x = distribute(torch.ones(4), mesh.layout(), SimulatedComm(mesh))
    y = spmd(lambda x: x + 1)(x)
    for i, local in enumerate(y.local):
        local.add_(i)
    assert [t[0].item() for t in y.local] == [2, 3, 4, 5]
    assert [t[0].item() for t in x.local] == [1, 1, 1, 1]
    z = x.redistribute(mesh.layout(partial={"x": "max"})).redistribute(mesh.layout())
    for i, local in enumerate(z.local):
        local.add_(i)
    assert [t[0].item() for t in z.local] == [1, 2, 3, 4]


def test_what_a_rank_overwrites_is_no_longer_shared():
    mesh = Mesh(x=2, y=2)
    steps = torch.arange(24.0).reshape(3, 8)
    x = distribute(steps, mesh.layout(None, "x"), SimulatedComm(mesh))

    def running(x):
        return fd.scan(lambda h, row: (h + row, h * row), torch.zeros(8), x)

    for ours, due in zip(spmd(running)(x), running(steps), strict=True):
        assert torch.equal(ours.full(), due)


@pytest.mark.parametrize("dims", [(), ("x",)])
def test_terms_are_reduced_once_for_all_ranks(dims, monkeypatch):
    calls = []
    monkeypatch.setattr(even, "reduced", lambda *args: calls.append(args) or reduced(*args))
    mesh = Mesh(x=16)
    whole = torch.arange(512 * 64.0).reshape(512, 64)
    comm = SimulatedComm(mesh)
    terms = distribute(whole, mesh.layout(partial={"x": "sum"}), comm)
    assert torch.equal(terms.redistribute(mesh.layout(*dims)).full(), whole)
    assert comm.calls["reduce_scatter" if dims else "all_reduce"] == 1
    assert len(calls) == 1


def test_a_thousand_ranks_compute_what_one_does():
    mesh = Mesh(x=32, y=32)
    comm = SimulatedComm(mesh)
    x = distribute(torch.arange(64 * 64.0).reshape(64, 64), mesh.layout(), comm)
    terms = x.redistribute(mesh.layout(partial={"x": "sum", "y": "sum"}))
    assert torch.equal(terms.redistribute(mesh.layout("x", "y")).full(), x.local[0])
    weight = distribute(torch.ones(64, 64), mesh.layout(None, "y"), comm)
    y = spmd(lambda x, w: torch.relu(x @ w).sum(0))(x.redistribute(mesh.layout("x")), weight)
    assert torch.equal(y.full(), torch.relu(x.local[0] @ torch.ones(64, 64)).sum(0))
