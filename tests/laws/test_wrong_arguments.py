"""Arguments of a kind that a public function does not take: the error names each, and its value.

A row is a call, the kind of its error, the argument and its value. Some of these calls came to an
end after a minute or never, and were refused by what they had come to inside.
"""

import functools

import pytest
import torch

import fdtensor as fd
from tests.laws.test_mistakes import COMM, MESH, NAMES, TYPE, T, check

HALVES = [fd.Mesh.from_ranks([0, 1], "dp"), fd.Mesh.from_ranks([2, 3], "dp")]
FOUR = fd.SimulatedComm(fd.Mesh(all=4))
STAGES = [lambda w, x: torch.relu(x @ w), lambda w, x: x @ w]
MSE = torch.nn.functional.mse_loss
BATCH, TARGET = (fd.distribute(torch.ones(8, 4), m.layout("dp"), FOUR) for m in HALVES)
UNEVEN = fd.Layout(HALVES[0], [fd.Ragged(0, (5, 3))])
PROGRAM = fd.trace(torch.relu, TYPE)


@functools.cache
def exported():
    return torch.export.export(torch.nn.Linear(6, 3), (torch.ones(4, 6),))


NAMES = {
    **NAMES,
    "many": torch.ones(3),
    "exported": exported,
    "pull": fd.func.vjp(torch.relu, NAMES["x"])[1],
    "loss": MSE,
    "halves": HALVES,
    "stages": STAGES,
    "train": fd.parallel.pipeline(STAGES, MSE, meshes=HALVES, microbatches=4),
    "weights": [fd.distribute(torch.ones(4, 4), m.layout(), FOUR) for m in HALVES],
    "batch": BATCH,
    "target": TARGET,
    "uneven": fd.distribute(torch.ones(8, 4), UNEVEN, FOUR),
    "program": PROGRAM,
    "path": fd.plan(TYPE, MESH.layout()),
    "times": fd.cost.timeline(PROGRAM),
    "batches": fd.io.shard_batches([T], MESH.layout(), COMM),
}

MANY = "tensor([1., 1., 1.])"
DISTRIBUTED = "DTensor(f32[4@dp,6@tp]"

ROWS = [
    # meshes, layouts and types
    ("Mesh.from_ranks([0, 1], None)", "MeshError", "axes", "None"),
    ("mesh.rank_at(0)", "MeshError", "coord", "0"),
    ("mesh.rank_at((0,))", "MeshError", "coord", "(0,)"),
    ("mesh.rank_at((0, 4))", "MeshError", "coord", "(0, 4)"),
    ("mesh.rank_at((0, -1))", "MeshError", "coord", "(0, -1)"),
    ("mesh.rank_at((0, 1.5))", "MeshError", "coord", "(0, 1.5)"),
    ("mesh.coset(0, (0, 0))", "MeshError", "axes", "0"),
    ("mesh.coset(['dp'], 0)", "MeshError", "coord", "0"),
    ("mesh.coset(['tp'], (0,))", "MeshError", "coord", "(0,)"),
    ("list(mesh.cosets(None))", "MeshError", "axes", "None"),
    ("mesh.part(0, (0, 0))", "MeshError", "axes", "0"),
    ("mesh.part(['dp'], (0, 9))", "MeshError", "coord", "(0, 9)"),
    ("mesh.coord(1.5)", "MeshError", "rank", "1.5"),
    ("mesh.coord(many)", "MeshError", "rank", MANY),
    ("mesh.coord(x)", "MeshError", "rank", DISTRIBUTED),
    ("type_.index(1.5)", "MeshError", "rank", "1.5"),
    ("type_.local_shape(many)", "MeshError", "rank", MANY),
    ("rows.cuts([])", "LayoutError", "dim", "[]"),
    ("rows.cuts(1.5)", "LayoutError", "dim", "1.5"),
    # plans
    ("plan(type_, rows, max_bytes=[])", "PlanError", "max_bytes", "[]"),
    ("x.redistribute(rows, max_bytes=[])", "PlanError", "max_bytes", "[]"),
    ("path.received_bytes_at(1.5)", "MeshError", "rank", "1.5"),
    ("fd.plans.fuse([None])", "ArgumentError", "plans", "[None]"),
    ("fd.plans.fuse('dp')", "ArgumentError", "plans", "'dp'"),
    ("fd.plans.fuse(1)", "ArgumentError", "plans", "1"),
    ("fd.show(path, cost=1)", "PlanError", "cost", "1"),
    ("fd.show(type_, cost=1)", "PlanError", "cost", "1"),
    # functions of DTensors
    ("call([], x)", "TraceError", "function", "[]"),
    ("call(torch.relu, x, out_layouts=1.5)", "LayoutError", "out_layouts", "1.5"),
    ("spmd(torch.relu, out_layouts=1.5)(x)", "LayoutError", "out_layouts", "1.5"),
    ("spmd(torch.relu, out_layouts=[slice(1)])(x)", "LayoutError", "out_layouts[0]", "slice("),
    ("like([])", "ArgumentError", "argument", "[]"),
    ("program.layouts_of([])", "TraceError", "argument", "[]"),
    ("spmd(torch.relu, check=many)", "TraceError", "check", MANY),
    ("connect(mesh, check=x)", "CommError", "check", DISTRIBUTED),
    ("distribute(t, rows, comm, src_rank=many)", "MeshError", "rank", MANY),
    ("bind(module, None)", "ArgumentError", "params", "None"),
    ("bind(None, params)", "ArgumentError", "module", "None"),
    ("x.backward(1)", "ArgumentError", "gradient", "1"),
    ("x.backward(t)", "ArgumentError", "gradient", "tensor(["),
    ("pull(1)", "ArgumentError", "cotangents", "1"),
    ("pull(many)", "ArgumentError", "cotangents", MANY),
    ("torch.autograd.grad(x, x, 1)", "ArgumentError", "grad_outputs", "1"),
    ("fd.vmap(torch.relu, chunk_size=x)", "ArgumentError", "chunk_size", DISTRIBUTED),
    ("fd.jacrev(torch.relu, chunk_size=many)", "ArgumentError", "chunk_size", MANY),
    ("spmd(torch.relu, as_if=lambda s: (16, 4))(uneven)", "TraceError", "as_if", "(16, 4)"),
    ("times.save(folder + '/a.json', 0)", "ArgumentError", "beside", "0"),
    ("times.save(None)", "ArgumentError", "path", "None"),
    ("times.save(folder + '/a.json', folder + '/b')", "TraceError", "b'", "No such file"),
    # optimizers
    ("optim.Adam(betas='')", "FdtensorError", "betas", "''"),
    ("optim.Adam(lr=many)", "ArgumentError", "lr", MANY),
    ("optim.Adam(weight_decay=many)", "ArgumentError", "weight_decay", MANY),
    ("optim.Optimizer(None, 0)", "ArgumentError", "options", "0"),
    ("opt.step(params, params, state, lr=slice(None))", "FdtensorError", "lr", "slice(None"),
    ("opt.step(params, params, state, lr=many)", "FdtensorError", "lr", MANY),
    ("opt.step(params, params, state, lr=x)", "FdtensorError", "lr", DISTRIBUTED),
    ("opt.step(params, params, state, weight_decay=np.ones(2))", "FdtensorError", "decay", "arr"),
    ("optim.clip_grad_norm(params, many)", "FdtensorError", "max_norm", MANY),
    ("optim.clip_grad_norm_(params, many)", "FdtensorError", "max_norm", MANY),
    # random numbers
    ("random.split(key, 10**30)", "FdtensorError", "num", f"{10**30}"),
    ("random.split(key, many)", "FdtensorError", "num", MANY),
    # parallelism
    ("parallel.tensor_parallel(None, line, {})", "ArgumentError", "exported_program", "None"),
    ("parallel.tensor_parallel(exported(), line, {}, rank=1.5)", "MeshError", "rank", "1.5"),
    ("parallel.tensor_parallel(exported(), line, {}, rank=many)", "MeshError", "rank", MANY),
    ("parallel.layouts_for(module, mesh, {}, axis=0)", "MeshError", "axis", "0"),
    ("parallel.remove_input_reshard(None)", "LayoutError", "module", "None"),
    ("parallel.pipeline(1, loss, meshes=halves, microbatches=4)", "ArgumentError", "stages", "1"),
    ("parallel.pipeline(stages, loss, meshes=1, microbatches=4)", "ArgumentError", "meshes", "1"),
    (
        "parallel.pipeline(stages, loss, meshes=halves, microbatches=10**30)",
        "TraceError",
        "microbatches",
        f"{10**30}",
    ),
    ("train(None, batch, target)", "ArgumentError", "params", "None"),
    ("train(weights, batch, None)", "ArgumentError", "target", "None"),
    ("train(weights, uneven, target)", "TraceError", "ragged", "f32[8@dp:5:3,4]"),
    # files
    ("io.dump_calls(None, folder)", "CommError", "Comm", "None"),
    ("io.dump_calls(comm, None)", "ArgumentError", "folder", "None"),
    (
        "io.load_checkpoint(folder + '/saved', rows, comm, objects='dp')",
        "ArgumentError",
        "objects",
        "'dp'",
    ),
    ("io.latest_checkpoint(None)", "CheckpointError", "folder", "None"),
    ("io.checkpoint_contents((1, 2, 3))", "CheckpointError", "path", "1"),
    ("io.save_safetensors(t, None, comm)", "CheckpointError", "path", "None"),
    ("io.shard_batches([t], rows, comm, seed=None)", "ArgumentError", "seed", "None"),
    ("io.shard_batches([t], rows, comm, prefetch=-1)", "ArgumentError", "prefetch", "-1"),
    ("batches.load_state_dict({})", "ArgumentError", "state", "{}"),
    ("batches.load_state_dict(None)", "ArgumentError", "state", "None"),
]


@pytest.mark.parametrize(("source", "kind", "argument", "value"), ROWS, ids=[r[0] for r in ROWS])
def test_an_argument_of_another_kind_is_named_with_its_value(source, kind, argument, value):
    with pytest.raises(Exception) as raised:  # noqa: PT011  (which kind it is, is what is asked)
        eval(source, dict(NAMES))
    check(raised.value, kind, (argument, value))


def test_a_rank_that_is_no_int_leaves_nothing_behind():
    """Its coordinates, equal to ints, were remembered as those of the rank beside it."""
    with pytest.raises(fd.errors.MeshError):
        TYPE.local_shape(1.0)
    assert repr(TYPE.local_shape(1)) == "(2, 6)"


def test_a_function_without_a_hash_can_be_called():
    class Twice(list):
        def __call__(self, x):
            return 2 * x

    x = NAMES["x"]
    assert torch.equal(fd.call(Twice(), x).full(), 2 * T)


def test_a_loss_may_leave_the_target_alone():
    step = fd.parallel.pipeline(STAGES, lambda y, _: y.mean(), meshes=HALVES, microbatches=4)
    _, value = step(NAMES["weights"], BATCH, None)
    assert value.item() == 16
