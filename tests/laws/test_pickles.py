"""Every public value crosses into another process, and is copied: new, and after it was used."""

import copy
import importlib
import inspect
import io
import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch

import fdtensor as fd
from fdtensor import random, testing
from fdtensor.inspect.pictures import Picture
from fdtensor.io.checkpoint import Contents, Stored
from fdtensor.layouts import errors
from fdtensor.layouts.free_type import FreeType
from fdtensor.layouts.placement import Spans
from fdtensor.layouts.text import Text
from fdtensor.ops.graph import Call, Full, Graph, Var
from fdtensor.ops.notation import At, Block, Row, Rule, Units, Window
from fdtensor.ops.notation.core import Halo
from fdtensor.parallel.roles import Role
from fdtensor.programs.ends import Tied
from fdtensor.programs.options import Like, Options
from fdtensor.programs.program import Together
from fdtensor.tensors.calls.entry import Entry
from fdtensor.tensors.calls.function import Spmd
from fdtensor.testing import Strides
from fdtensor.testing.discovery import SampleGroup
from fdtensor.testing.row_checks import Wrong
from fdtensor.train import GPT, AdamW, Job, Model, Part, Pretrained, Saves, Size

aten = torch.ops.aten
MODULES = (
    *("fdtensor", "fdtensor.testing", "fdtensor.testing.discovery", "fdtensor.testing.row_checks"),
    *("fdtensor.layouts.errors", "fdtensor.layouts.placement", "fdtensor.layouts.text"),
    *("fdtensor.ops.graph", "fdtensor.ops.rules", "fdtensor.programs.options"),
    *("fdtensor.programs.program", "fdtensor.tensors.random"),
    *("fdtensor.tensors.calls.entry", "fdtensor.tensors.calls.function"),
    *("fdtensor.parallel.roles", "fdtensor.parallel.styles", "fdtensor.io.checkpoint"),
    *("fdtensor.io.interop", "fdtensor.inspect.pictures", "fdtensor.train"),
)

MESH = fd.Mesh(dp=2, tp=2)
ROWS = MESH.layout("dp")
ONE_AXIS = fd.TensorType((4, 6), torch.float32, fd.Mesh(dp=4).layout("dp"))
TYPE = fd.TensorType((4, 6), torch.float32, ROWS)
PLAN = fd.plan(fd.TensorType((4, 6), torch.float32, MESH.layout("dp", partial={"tp": "sum"})), ROWS)
TABLE = torch.eye(6)


def layer(x, w):
    return torch.relu(x @ w), (x * 2).sum(0)


@fd.spmd
def decorated(x):
    return x.sum()


def doubled(x):
    return 2 * x


def explained(program: fd.Program) -> fd.Program:
    """The program, which now holds what it was chosen from."""
    fd.explain(program)
    return program


def program() -> fd.Program:
    weight = fd.TensorType((6, 6), torch.float32, MESH.layout(None, "tp"))
    return fd.trace(layer, TYPE, weight)


def closing() -> fd.Program:
    return fd.trace(lambda x: x @ TABLE, TYPE)


def tensor(requires_grad=False) -> fd.DTensor:
    x = fd.distribute(torch.arange(24.0).reshape(4, 6), ROWS, fd.SimulatedComm(MESH))
    return x.requires_grad_(requires_grad)


def used(x: fd.DTensor) -> fd.DTensor:
    """The tensor, after its Comm has run plans, programs and a backward."""
    x.redistribute(MESH.layout())
    fd.call(torch.add, x, 1)
    decorated(x)
    return x


def used_scaler() -> fd.GradScaler:
    comm = fd.SimulatedComm(MESH)
    scaler = fd.GradScaler(comm)
    p = torch.ones(3, requires_grad=True)
    optimizer = torch.optim.SGD([p], lr=0.1)
    scaler.scale(p.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    used(fd.distribute(torch.ones(4, 6), ROWS, comm))
    return scaler


def used_comm() -> Any:
    return used(tensor()).comm


EXAMPLES: dict[type, list[Any]] = {}
"""For each class values of it, new and used, or functions that make one where that takes long."""


def example(kind: type, *values: Any) -> None:
    EXAMPLES.setdefault(kind, []).extend(values)


for placement in (
    *(fd.Replicate(), fd.Shard(0), fd.StridedShard(0, 2), fd.Ragged(0, (1, 3)), fd.Partial("max")),
    Spans(0, (((0, 3),), ((1, 4),))),
):
    example(type(placement), placement)
for collective in (
    *(fd.Slice(("dp",), (0,)), fd.Mask(("dp",), "sum"), fd.Pad(("dp",), (0,), "sum")),
    *(fd.Scale(("dp",), "avg"), fd.AllGather(("dp",), (0,)), fd.AllToAll(("dp",), 0, 1)),
    fd.plans.ReduceExchange(("dp",), "sum"),
    *(fd.AllReduce(("dp",), "sum"), fd.ReduceScatter(("dp",), (0,), "sum"), fd.Broadcast(0)),
    fd.Exchange(("dp",)),
):
    example(type(collective), collective)
for style in (
    *(fd.Colwise(), fd.Rowwise(input=0), fd.VocabParallel(), fd.SequenceParallel()),
    Role("linear", 0, 1),
):
    example(type(style), style)
for name in errors.__all__:
    kind = getattr(errors, name)
    example(kind, kind("a is not b."))
for value in (random.key(7), random.fold_in(random.key(7), 3)):
    example(random.Key, value)
example(fd.Mesh, MESH, fd.Mesh.from_ranks([[0, 2], [1, 3]], ("a", "b")), fd.Mesh())
example(fd.Layout, ROWS, fd.Layout(MESH, [fd.Shard(0), fd.Shard(0)], {0: ("tp", "dp")}))
example(fd.TensorType, TYPE)
example(FreeType, fd.TensorType((4, 6), torch.float32, "free"))
example(Tied, Tied(1))
example(fd.CostModel, fd.NCCL, fd.GLOO)
example(fd.Plan, PLAN, lambda: (PLAN.received_bytes, PLAN.digest, PLAN)[-1])
example(fd.Fused, fd.fuse([PLAN, PLAN]))
example(fd.Step, PLAN.steps[0])
example(fd.Program, program, closing, lambda: fd.trace(torch.func.grad(lambda x: x.sum()), TYPE))
example(fd.Program, lambda: explained(fd.trace(doubled, ONE_AXIS)))
example(fd.Eqn, lambda: program().eqns[0], lambda: program().eqns[-1])
example(Together, Together((fd.Step(fd.AllReduce(("tp",), "sum"), PLAN.src, PLAN.dst),) * 2))
example(fd.SimulatedComm, fd.SimulatedComm(MESH), used_comm)
example(fd.DTensor, tensor, lambda: used(tensor()), lambda: used(tensor(True)))
example(Spmd, fd.spmd(layer), decorated, lambda: (used(tensor()), decorated)[1], lambda: options())
example(fd.LossScale, fd.LossScale(), fd.LossScale(4.0).after(True))
example(fd.GradScaler, lambda: fd.GradScaler(fd.SimulatedComm(MESH)), used_scaler)
example(fd.WorkerError, fd.WorkerError("rank 1 failed", {1: "a\nb"}, {1: ValueError("x")}, True))
example(fd.FallbackWarning, fd.FallbackWarning("it costs more."))
example(fd.Discovered, lambda: fd.discover(aten.relu.default, (torch.randn(4, 6),), isolated=False))
example(SampleGroup, lambda: fd.discover(doubled, (torch.randn(4, 6),), isolated=False).cases[0])
example(Picture, lambda: fd.show(PLAN), lambda: fd.show(program()), lambda: fd.show(tensor()))
example(Text, lambda: fd.explain(PLAN.src, PLAN.dst), lambda: program().explain())
example(Stored, Stored((4, 6), torch.float32))
example(Contents, Contents({"w": Stored((4, 6), torch.float32), "step": None}))
example(Like, fd.like("params"))
example(Options, Options(), Options(out_layouts=(ROWS, fd.like(0)), plain="replicate"))
example(Var, Var(3))
example(Full, Full((4, 6), torch.float32))
example(Graph, lambda: program().origin.graph)
example(Call, lambda: program().origin.graph.calls[0])
example(Row, Row((fd.Shard(0),), (fd.Shard(0),)))
example(Units, Units(0, 2))
example(Window, Window(0, 8, 1, 5))
example(Block, Block((4, 6), (((0, 2),), ((0, 6),))))
example(At, At((Block((4,), (((0, 2),),)),), ()))

example(Halo, Halo(0, 4, max))
example(Wrong, lambda: fd.verify(aten.cumsum.default, [(torch.arange(4.0), 0)], WRONG)[0])
example(Size, Size())
example(GPT, lambda: GPT(Size(layers=1, width=8, heads=2)))
example(AdamW, AdamW())
example(Job, Job())
example(Part, Part(("w",), torch.add))
example(Pretrained, Pretrained("a/folder"))
example(Saves, Saves("a/folder"))
example(Strides, Strides((1, 0)))

WRONG = [Row((fd.Shard(0),), (fd.Shard(0),))]


def options() -> Spmd[..., Any]:
    return fd.spmd(layer, out_layouts=(ROWS, None), regather=True, on_missing_rule="error")


NO_VALUES = {
    fd.Comm: "a protocol",
    Model: "a protocol",
    Entry: "what an spmd function keeps of a call, for itself",
    Rule: "functions in the registry",
    fd.io.Saving: "a thread of this process",
    fd.FuncolComm: "on real ranks, below",
    fd.LocalCluster: "the processes of a caller, below",
    testing.GlooPool: "the processes of a caller, below",
}


def public_classes() -> list[type]:
    found: dict[type, None] = {}
    for name in MODULES:
        module = importlib.import_module(name)
        for public in module.__all__:
            thing = getattr(module, public)
            if inspect.isclass(thing):
                found[thing] = None
    return list(found)


@pytest.mark.parametrize("kind", public_classes(), ids=lambda kind: kind.__name__)
def test_every_public_class_has_an_example(kind):
    assert (kind in EXAMPLES) != (kind in NO_VALUES), f"give {kind} an example in EXAMPLES."


WAYS = {
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "pickle 2": lambda x: pickle.loads(pickle.dumps(x, 2)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}
VALUES = [(kind, value) for kind, values in EXAMPLES.items() for value in values]


@pytest.mark.parametrize("way", WAYS.values(), ids=list(WAYS))
@pytest.mark.parametrize(("kind", "value"), VALUES, ids=[kind.__name__ for kind, _ in VALUES])
def test_a_value_comes_back(kind, value, way):
    value = value() if inspect.isfunction(value) else value
    back = way(value)
    assert type(back) is type(value) is kind
    assert told(back) == told(value)


def told(x: Any) -> Any:
    """All that a value says, in a form that can be compared."""
    match x:
        case fd.DTensor():
            locals_ = [(t.tolist(), t.requires_grad, t.dtype) for t in x.local]
            return locals_, x.type, told(x.comm)
        case fd.SimulatedComm():
            return x.mesh, x.cost, x.check
        case fd.Program():
            constants = [(v, t.tolist()) for v, t in x.constants]
            return x.digest, constants, x.explain(), x.to_json()
        case Spmd():
            return x.f, x.options, repr(x), x.__doc__
        case fd.FdtensorError():
            return vars(x), str(x)
        case fd.WorkerError():
            return str(x), x.failures, repr(x.errors), x.lost
        case fd.GradScaler():
            return x.state_dict(), told(x.comm)
        case GPT():
            return [(name, t.tolist()) for name, t in x.state_dict().items()]
        case fd.Discovered():
            return x.op, str(x), x.rows
        case (
            SampleGroup()
            | Call()
            | Graph()
            | Wrong()
            | Picture()
            | Rule()
            | Halo()
            | At()
            | Block()
        ):
            return repr(x) if not isinstance(x, (Call, Graph, Picture)) else str(x)
        case BaseException():
            return x.args, str(x)
        case _:
            return x, repr(x)


# --- what they are good for --------------------------------------------------------------------


def test_what_is_read_back_runs():
    x, w = used(tensor()), fd.distribute(torch.eye(6), MESH.layout(), fd.SimulatedComm(MESH))
    due = layer(x.full(), torch.eye(6))
    x, w = pickle.loads(pickle.dumps((x, fd.DTensor(w.local, w.type, x.comm))))
    assert x.comm is w.comm
    for function in (fd.spmd(layer), pickle.loads(pickle.dumps(fd.spmd(layer)))):
        assert all(torch.equal(a.full(), b) for a, b in zip(function(x, w), due))
    found = pickle.loads(pickle.dumps(program()))
    outs = fd.run(found, [x.local, w.redistribute(found.in_types[1]).local], x.comm)
    assert [len(blocks) for blocks in outs] == [4, 4]
    assert torch.equal(pickle.loads(pickle.dumps(x)).redistribute(MESH.layout()).full(), x.full())


def test_a_copy_stays_on_its_comm_and_a_pickle_gets_one_of_its_own():
    x = used(tensor())
    assert copy.copy(x).comm is copy.deepcopy(x).comm is x.comm
    assert fd.call(torch.add, x, copy.deepcopy(x)).full().sum() == 2 * x.full().sum()
    state = {"params": [x, x], "step": 3}
    back = pickle.loads(pickle.dumps(state))
    assert back["params"][0].comm is back["params"][1].comm
    assert back["params"][0].comm is not x.comm
    assert not back["params"][0].comm.calls


def test_torch_saves_and_loads_a_tensor():
    file = io.BytesIO()
    torch.save({"x": used(tensor())}, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)["x"].full(), tensor().full())


def test_a_program_is_read_by_another_process():
    code = (
        "import pickle, sys\n"
        "p = pickle.loads(sys.stdin.buffer.read())\n"
        "print(p.digest, p.explain(), sep='\\n')\n"
    )
    found = program()
    done = subprocess.run(
        [sys.executable, "-c", code], input=pickle.dumps(found), capture_output=True, check=True
    )
    assert done.stdout.decode() == f"{found.digest}\n{found.explain()}\n"


def test_a_cluster_is_pickled_for_its_ranks_alone():
    cluster = fd.local_cluster(2)
    assert copy.copy(cluster) is copy.deepcopy(cluster) is cluster
    with pytest.raises(fd.CommError, match="this process is no rank"):
        pickle.loads(pickle.dumps(cluster))


# --- real ranks --------------------------------------------------------------------------------


def on_a_rank(other: bytes | None) -> Any:
    mesh = fd.Mesh(x=4)
    comm = fd.connect(mesh)
    x = fd.distribute(torch.arange(8.0), mesh.layout("x"), comm)
    x.redistribute(mesh.layout())
    fd.call(torch.add, x, 1)
    if other is not None:
        try:
            return torch.equal(pickle.loads(other).local, x.local)
        except fd.CommError as error:
            return error.sentence
    back = pickle.loads(pickle.dumps(x))
    same = back.comm is comm and copy.deepcopy(x).comm is comm
    total = fd.call(torch.add, x, back).full().tolist()
    return same, total, pickle.dumps(x)


@pytest.mark.mesh
def test_a_real_rank_reads_back_what_it_has_pickled(pool4):
    answers = pool4.run(on_a_rank, None)
    for same, total, _ in answers:
        assert same
        assert total == [2.0 * i for i in range(8)]
    told = pool4.run(on_a_rank, answers[1][2])
    other = "this was pickled on rank 1 of a real mesh, and this is rank {}."
    assert told == [other.format(0), True, other.format(2), other.format(3)]
    with pytest.raises(fd.CommError, match="there is no process group"):
        pickle.loads(answers[0][2])
