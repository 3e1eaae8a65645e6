"""Mistakes that users make, as a table: the kind of the error, the value, what to do about it.

A row is a line of a script, the kind of its error and pieces of its text. All of them are errors
of this library: one sentence, and a hint. Inside of a traced function the line is named as well.
"""

import linecache
import re
import tempfile

import numpy as np
import optree
import pytest
import torch
from torch._higher_order_ops import map as map_of_torch
from torch._higher_order_ops import while_loop

import fdtensor as fd
from fdtensor import cluster, collectives, cost, errors, io, optim, parallel, random, testing
from fdtensor.plans import Plan
from fdtensor.testing.fixtures import gloo_ranks  # noqa: F401  (a fixture)

MESH, LINE = fd.Mesh(dp=2, tp=4), fd.Mesh(x=2)
COMM, OTHER = fd.SimulatedComm(MESH), fd.SimulatedComm(LINE)
T = torch.arange(24.0).reshape(4, 6)
TYPE = fd.TensorType((4, 6), torch.float32, MESH.layout("dp"))
MODULE = torch.nn.Linear(6, 3)
PARAMS = {n: fd.distribute(p.detach(), MESH.layout(), COMM) for n, p in MODULE.named_parameters()}
OPT = optim.AdamW(lr=1e-3)
FOLDER = tempfile.mkdtemp()
io.save_checkpoint(PARAMS, FOLDER + "/saved", COMM)


@torch.library.custom_op("tests_mistakes::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    """An op whose derivative torch.func does not take."""
    return 2 * x


twice.register_fake(torch.empty_like)
twice.register_autograd(lambda _, cotangent: 2 * cotangent)


class Old(torch.autograd.Function):
    """One of the form that torch.func does not take."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, cotangent):
        return 2 * cotangent


NAMES = {
    **{name: getattr(fd, name) for name in fd.__all__},
    **{name: getattr(collectives, name) for name in collectives.__all__},
    **vars(cost),
    "collectives": collectives,
    "cost": cost,
    "fd": fd,
    "io": io,
    "optim": optim,
    "parallel": parallel,
    "random": random,
    "testing": testing,
    "np": np,
    "torch": torch,
    "mesh": MESH,
    "line": LINE,
    "comm": COMM,
    "other": OTHER,
    "t": T,
    "type_": TYPE,
    "module": MODULE,
    "params": PARAMS,
    "opt": OPT,
    "state": OPT.init(PARAMS),
    "Plan": Plan,
    "x": fd.distribute(T, MESH.layout("dp", "tp"), COMM),
    "y": fd.distribute(T, MESH.layout(), COMM),
    "z": fd.distribute(T, LINE.layout("x"), OTHER),
    "i": fd.distribute(torch.arange(4), MESH.layout(), COMM),
    "i_": torch.arange(3),
    "Old": Old,
    "twice": twice,
    "while_loop": while_loop,
    "each": map_of_torch,
    "key": random.key(0),
    "blocks": tuple(torch.ones(2, 6) for _ in range(8)),
    "folder": FOLDER,
    "rows": MESH.layout("dp"),
}

MISTAKES = {
    "meshes": [
        ("Mesh(2, 4)", "MeshError", "Mesh(2, 4)", "Write Mesh(dp=2, tp=4)"),
        ('Mesh(dp="2")', "MeshError", "'2'", "an int, 1 or more"),
        ("Mesh(dp=0)", "MeshError", "size 0", "1 or more"),
        ("Mesh.from_ranks([[0, 1], [2]], 'dp')", "MeshError", "[[0, 1], [2]]", "same length"),
        ("Mesh.from_ranks([0, 0], 'dp')", "MeshError", "rank 0 is in the mesh twice", "one place"),
        ("Mesh.from_device_mesh(mesh)", "LayoutError", "not a DeviceMesh", "init_device_mesh"),
        ("Mesh(dp=2, links={'dp': 'nvlnk'})", "MeshError", "'nvlnk'", "'nvlink', 'infiniband'"),
        ("mesh.layout('dpp')", "MeshError", "no axis 'dpp'", "'dp', 'tp'"),
        ("mesh.layout('dp', 'dp')", "LayoutError", "'dp' is used twice", "one thing"),
        ("mesh.layout(0)", "LayoutError", "0 names no mesh axes", "Write an axis"),
        ("mesh.layout(Shard(0))", "LayoutError", "Shard(0) names no", "Layout(mesh, [Shard(0)])"),
        ("mesh.layout(partial='dp')", "LayoutError", "partial='dp'", "{axis: 'sum'}"),
        ("mesh.layout(partial={'dp': 'mean'})", "LayoutError", "'mean'", "sum, avg, product"),
        ("mesh.coord('0')", "MeshError", "'0' is not a rank", "ints"),
        ("mesh.axis_size('pp')", "MeshError", "'pp'", "'dp', 'tp'"),
    ],
    "layouts and types": [
        ("Layout(mesh, [Shard(0)])", "LayoutError", "1 placements", "for each axis"),
        ("Layout(mesh, [Shard(0), 'tp'])", "LayoutError", "'tp' is not a placement", "Shard(dim)"),
        ("Layout([Shard(0), Shard(1)])", "ArgumentError", "lacks 'placements'", "Write Layout("),
        ("Layout([Shard(0)], mesh)", "LayoutError", "[Shard(0)] is not a Mesh", "Write Mesh("),
        ("Layout(x, [Shard(0)])", "LayoutError", "is not a Mesh", "Write its .mesh"),
        ("x.layout['pp']", "MeshError", "no axis 'pp'", "'dp', 'tp'"),
        ("x.layout.placed('dp', 'R')", "LayoutError", "'R' is not a placement", "Replicate()"),
        ("Shard(-1)", "LayoutError", "-1 is not a tensor dim", "from the front"),
        ("Shard()", "ArgumentError", "Shard lacks 'dim'", "Write Shard(dim)"),
        ("Partial('mean')", "LayoutError", "'mean' is not a reduce op", "sum, avg"),
        ("Ragged(0, [1, -1])", "LayoutError", "[1, -1]", "0 or more"),
        ("TensorType((4, 6), 'float32', rows)", "LayoutError", "'float32'", "torch.float32"),
        ("TensorType((4, 6), torch.float32)", "ArgumentError", "lacks 'layout'", "dtype, layout"),
        ("TensorType(4, torch.float32, rows)", "LayoutError", "4 is not a shape", "tuple of ints"),
        ("TensorType((), torch.float32, mesh)", "LayoutError", "Mesh(dp=2", "mesh.layout('dp'"),
        ("TensorType((4,), torch.float32, 'dp')", "LayoutError", "'dp'", "mesh.layout('dp')"),
        (
            "TensorType((4,), torch.float32, ('dp', None))",
            "LayoutError",
            "('dp', None) is not a Layout",
            "mesh.layout('dp', None)",
        ),
        (
            "TensorType((4, 6), torch.float32, mesh.layout(None, None, 'dp'))",
            "LayoutError",
            "'dp' shards dim 2 of a tensor that has 2 dims",
            "one of dims 0 to 1",
        ),
        ("type_.local_shape(9)", "LayoutError", "rank 9", "a rank of the mesh"),
        ("type_.local_shape('0')", "MeshError", "'0' is not a rank", "ints"),
    ],
    "plans": [
        ("plan(x.layout, y.layout)", "PlanError", "Layout(Mesh", "TensorType(shape, dtype"),
        ("plan(type_, [Shard(1)])", "LayoutError", "[Shard(1)] is not a Layout", "Layout(mesh, ["),
        ("plan(type_, y)", "LayoutError", "DTensor(f32[4,6]", "x.layout"),
        ("plan(type_, rows, max_bytes='1GB')", "PlanError", "max_bytes='1GB'", "10**9"),
        ("plan(type_, mesh.layout(), max_bytes=1)", "PlanError", "1 bytes", "max_bytes=144"),
        ("plan(type_, mesh.layout(), cost='nccl')", "PlanError", "'nccl'", "fd.cost.NCCL"),
        ("Plan.from_json('{')", "PlanError", "'{'", "Plan.to_json"),
        ("Plan.from_json({})", "PlanError", "an object, not a str", "Plan.to_json"),
        ("Program.from_json('[]')", "TraceError", "a list, not an object", "Program.to_json"),
        ("explain(x)", "TraceError", "DTensor", "explain(src, dst)"),
        ("show(module)", "FdtensorError", "Linear", "Show a TensorType"),
        ("run(type_, x, comm)", "CommError", "neither a plan nor a program", "call(f, x)"),
        ("run(plan(type_, rows), x, comm)", "CommError", "not a DTensor", "type.local_shape(rank)"),
        ("run(plan(type_, rows), t, mesh)", "CommError", "not a Comm", "connect(mesh)"),
        ("run(trace(torch.relu, x), x, comm)", "CommError", "not a DTensor", "[x.local]"),
        ("run(trace(torch.relu, x), [], comm)", "CommError", "1 values, not 0", "program.inputs"),
        ("H100.with_links(dp='infiniband')", "PlanError", "'infiniband'", "fd.cost.INFINIBAND"),
        ("Link('a', 2)", "PlanError", "'a' is no price", "finite"),
        ("estimate(type_, NCCL)", "PlanError", "TensorType", "estimate(plan(src, dst), NCCL)"),
        ("timeline(plan(type_, rows))", "TraceError", "is no program", "plan.seconds"),
        ("calibrate(comm, rounds=0)", "ArgumentError", "rounds=0", "Write 1 or more"),
        ("calibrate(mesh)", "CommError", "is not a Comm", "connect(mesh)"),
    ],
    "distribute and from_local": [
        ("distribute(t, [Shard(0)], comm)", "LayoutError", "[Shard(0)]", "Layout(mesh, [Shard("),
        ("distribute(t, rows)", "ArgumentError", "lacks 'comm'", "distribute(tensor, layout, comm"),
        ("distribute(t, rows, mesh)", "CommError", "Mesh(dp=2, tp=4) is not a Comm", "connect("),
        ("distribute(t, type_, comm)", "LayoutError", "TensorType(", "type.layout"),
        ("distribute([1, 2], rows, comm)", "LayoutError", "a list", "torch.tensor(value)"),
        ("distribute(np.array(['a']), rows, comm)", "LayoutError", "<U1", "a dtype that torch has"),
        ("distribute(None, rows, comm)", "LayoutError", "None is not a tensor", "src_rank=..."),
        ("distribute(x, rows, comm)", "LayoutError", "a DTensor", "x.redistribute(layout)"),
        ("distribute({'w': 3}, rows, comm)", "LayoutError", "a dict", "torch.tensor(value)"),
        ("distribute({'w': t}, {'v': rows}, comm)", "ValueTreeError", "keys", "a prefix"),
        ("distribute({'w': t}, {'w': 'dp'}, comm)", "LayoutError", "tree['w'] is 'dp'", "Write"),
        ("distribute([t, x], rows, comm)", "LayoutError", "tree[1]: a DTensor", "x.redistribute"),
        ("distribute([t, t[0, 0]], [rows, rows], comm)", "LayoutError", "tree[1]: ", "0 dims"),
        ("distribute(module, rows, comm)", "LayoutError", "a Linear", "named_parameters()"),
        ("distribute(t, rows, other)", "CommError", "rank 2", "contains all ranks"),
        ("distribute(t, rows, comm, src_rank='0')", "MeshError", "'0'", "ints"),
        ("distribute(t, rows, comm, src=0)", "ArgumentError", "'src'", "src_rank=..."),
        ("from_local(t, type_, comm)", "CommError", "8 tensors, one a rank, not a Tensor", "Give"),
        ("from_local(blocks[1:], type_, comm)", "CommError", "not a tuple of 7", "local_shape"),
        ("from_local((t,) * 8, type_, comm)", "CommError", "(4, 6), expected (2, 6)", "local"),
        (
            "from_local(tuple(b.double() for b in blocks), type_, comm)",
            "CommError",
            "torch.float64, expected torch.float32",
            "type.dtype",
        ),
        ("from_local(blocks, rows, comm)", "LayoutError", "not a TensorType", "TensorType(shape"),
        ("from_local(blocks, x, comm)", "LayoutError", "not a TensorType", "x.type"),
        ("shards(t, mesh)", "LayoutError", "Mesh(dp=2, tp=4) is not a Layout", "mesh.layout("),
        ("SimulatedComm(4)", "LayoutError", "4 is not a Mesh", "Mesh(dp=2, tp=4)"),
        ("connect(x.layout)", "LayoutError", "is not a Mesh", "its .mesh"),
        ("connect(mesh, check='alwys')", "CommError", "'alwys'", "Did you mean 'always'?"),
        ("connect(mesh, cost=1)", "PlanError", "1 is not a cost model", "NCCL"),
        ("FuncolComm(mesh)", "CommError", "no process group", "SimulatedComm(mesh)"),
    ],
    "redistribute": [
        ("x.redistribute([Shard(1)])", "LayoutError", "[Shard(1)]", "Layout(mesh, [Shard(1)])"),
        ("x.redistribute(Shard(0))", "LayoutError", "Shard(0) is not", "Layout(mesh, [Shard(0)])"),
        ("x.redistribute(placements=[])", "ArgumentError", "'placements'", "redistribute(to,"),
        ("x.redistribute(Shard(0), Shard(1))", "ArgumentError", "not 3", "redistribute(to,"),
        ("x.redistribute('dp')", "LayoutError", "'dp' is not a Layout", "mesh.layout('dp')"),
        ("x.redistribute(mesh)", "LayoutError", "Mesh(dp=2, tp=4)", "mesh.layout('dp', None)"),
        ("x.redistribute(y)", "LayoutError", "DTensor(", "x.layout"),
        ("x.redistribute(rows, max_bytes='1GB')", "PlanError", "max_bytes='1GB'", "10**9"),
        ("x.redistribute(line.layout('x', 'y'))", "MeshError", "no axis 'y'", "'x'"),
        ("x.redistribute(Mesh(a=16).layout())", "CommError", "rank 8", "Make the Comm"),
        ("redistribute({'a': x}, {'b': rows})", "ValueTreeError", "keys", "a prefix"),
        ("redistribute({'a': x}, mesh)", "ValueTreeError", "tree['a']: Mesh(", "one layout"),
        ("redistribute({'a': x}, {'a': [Shard(0)]})", "LayoutError", "layouts['a'] is [", "Write"),
        ("redistribute(x)", "ArgumentError", "lacks 'layouts'", "redistribute(tree, layouts"),
    ],
    "a DTensor as a tensor": [
        ("module(x)", "ValueTreeError", "argument 1", "fd.bind(module, params)(x)"),
        ("torch.stack([x, t])", "ValueTreeError", "argument 0[1]", "plain tensor", "distribute("),
        ("t @ x", "ValueTreeError", "argument 0", "distribute(tensor, layout, comm)"),
        ("torch.nn.Parameter(x)", "NotTorchError", "is no torch.nn.Parameter", "fd.bind(module"),
        ("torch.nn.functional.dropout(x)", "TraceError", "no key", "key=random.key(0)"),
        ("torch.add(x, 1, out=x)", "NotTorchError", "torch.add writes", "Without out="),
        ("torch.nn.functional.relu(x, inplace=True)", "NotTorchError", "relu", "inplace=True"),
        ("torch.relu_(x)", "NotTorchError", "relu_ writes", "relu(...), which gives a new one"),
        ("t.add_(x)", "NotTorchError", "argument 1: f32[4@dp,6@tp]", "torch.Tensor.add(...)"),
        ("torch.nn.init.zeros_(x)", "NotTorchError", "'zero_'", "never changes"),
        ("x[0] = 1", "NotTorchError", "'x[...] = y'", "never changes", "torch.where"),
        ("t[0] = x", "NotTorchError", "__setitem__", "index_put"),
        ("float(x)", "NotTorchError", "24 elements", "x.full()"),
        ("bool(x)", "NotTorchError", "24 elements", "(x == y).all()"),
        ("x.item()", "NotTorchError", "no single number", "x.full()"),
        ("len(x.sum())", "NotTorchError", "without dims", "x.item()"),
        ("f'{x:.2f}'", "NotTorchError", "24 elements", "x.full()"),
        ("x.backward()", "NotTorchError", "24 elements", "x.full()"),
        ("x.grad = None", "NotTorchError", "'grad' cannot be set", "x.detach().requires_grad_()"),
        ("x.data = x", "NotTorchError", "'data' cannot be set", "y.detach()"),
        ("x.requires_grad = True", "NotTorchError", "'requires_grad'", "x.requires_grad_()"),
        ("x.local = x", "NotTorchError", "'local' cannot be set", "attrs.evolve"),
        ("torch.nn.utils.clip_grad_norm_([x], 1)", "NotTorchError", "DTensor", "(params"),
        ("torch.nn.utils.clip_grad_value_(x, 1)", "NotTorchError", "DTensor", "g.clamp(-1, 1)"),
        ("torch.tensor([x[0, 0], x[1, 1]])", "NotTorchError", "no length", "torch.stack([...])"),
        ("x.to('cuda')", "NotTorchError", "'cuda'", "connect(mesh, device)"),
        ("x.cuda()", "NotTorchError", "'cuda'", "connect(mesh, device)"),
        ("x.add_(1)", "NotTorchError", "'add_'", "x = x.add(...)", "a new one"),
        ("x.zero_()", "NotTorchError", "'zero_'", "call(torch.Tensor.zero_, x, ...)"),
        ("x.stride()", "NotTorchError", "'stride'", "x.local"),
        ("x.full_tensor()", "NotTorchError", "'full_tensor'", "x.full()"),
        ("x.placements", "NotTorchError", "'placements'", "x.layout"),
    ],
    "call and spmd": [
        ("call(torch.relu, t)", "TraceError", "a Tensor", "distribute(tensor, layout, comm)"),
        ("call(torch.add, x, t)", "ValueTreeError", "argument 1", "(4, 6)", 'plain="replicate"'),
        ("x * t", "ValueTreeError", "call('mul')", 'fd.call(torch.mul, ..., plain="replicate")'),
        ("x.add(t)", "ValueTreeError", "call('add')", "fd.call(torch.Tensor.add, ..., "),
        ("spmd(torch.add)(x, t)", "ValueTreeError", "spmd('add')", 'or pass plain="replicate"'),
        ("call(torch.add, x, z)", "CommError", "another Comm", "connect(mesh) once"),
        ("call('relu', x)", "TraceError", "'relu' is no function", "call(f, x)"),
        ("call(torch.nn.ReLU, x)", "TraceError", "ReLU is a class", "call(ReLU(...), x)"),
        ("call(torch.relu, x, plain='replicat')", "TraceError", "'replicat'", "Did you mean"),
        ("call(torch.relu, x, out_layouts='dp')", "LayoutError", "'dp'", "mesh.layout('dp')"),
        ("call(torch.relu, x, out_layouts=mesh)", "LayoutError", "Mesh(", "mesh.layout('dp', None"),
        (
            "call(torch.relu, x, out_layouts=[Shard(0), Shard(1)])",
            "LayoutError",
            "[Shard(0), Shard(1)]",
            "Layout(mesh, [Shard(0), Shard(1)])",
        ),
        ("call(torch.relu, x, out_layouts=[rows])", "ValueTreeError", "no prefix", "one Layout"),
        ("call(torch.relu, x, out_layouts=line.layout())", "TraceError", "other mesh", "one mesh"),
        ("call(torch.relu, x, out_layouts=like('w'))", "TraceError", "'w'", "the name of an arg"),
        ("spmd(torch.relu, out_layout=rows)", "ArgumentError", "'out_layout'", "'out_layouts'?"),
        ("spmd(torch.relu, mesh)", "ArgumentError", "not 2", "Write spmd(f, out_layouts=...,"),
        ("spmd(x)", "TraceError", "DTensor(f32", "spmd(f)(x)"),
        ("spmd(torch.relu, max_bytes='1GB')", "TraceError", "max_bytes='1GB'", "number of bytes"),
        ("spmd(torch.relu, regather='yes')", "TraceError", "regather='yes'", "regather=True"),
        ("spmd(torch.relu, reduce_dtype='f32')", "TraceError", "'f32'", "torch.float32"),
        ("spmd(torch.relu)(3)", "TraceError", "arguments: an int", "Make one with distribute"),
        ("trace(torch.relu, t)", "TraceError", "no mesh to run on", "TensorType(shape, dtype"),
        ("trace(torch.relu, type_, mesh='dp')", "LayoutError", "'dp' is not a Mesh", "Mesh(dp=2"),
        ("trace(torch.relu, type_, cost='h100')", "PlanError", "'h100'", "H100"),
        ("trace(torch.relu, type_).to_fx('0')", "MeshError", "'0' is not a rank", "ints"),
        ("trace(torch.relu, type_).layouts_of('w')", "TraceError", "'w'", "the name of an arg"),
        ("trace(torch.relu, type_).explain('zz')", "TraceError", "'zz'", "a to b"),
    ],
    "shard_map": [
        ("shard_map(lambda x: x)", "ArgumentError", "lacks 'mesh'", "shard_map(f, mesh,"),
        ("shard_map(3, mesh)", "TraceError", "3 is no function", "function first"),
        ("shard_map(torch.relu, 'dp')", "LayoutError", "'dp' is not a Mesh", "Mesh(dp=2, tp=4)"),
        ("shard_map(torch.relu, mesh, in_specs=rows)", "ArgumentError", "'in_specs'", "in_layouts"),
        ("shard_map(torch.relu, mesh, 'dp')", "LayoutError", "in_layouts is 'dp'", "mesh.layout"),
        ("shard_map(torch.relu, mesh, rows)(t)", "ValueTreeError", "no DTensor", "Distribute one"),
        (
            "shard_map(lambda x: psum(x, 'pp'), mesh, rows)(x)",
            "MeshError",
            "no axis 'pp'",
            "'dp', 'tp'",
        ),
        ("shard_map(lambda x: psum(x, 0), mesh, rows)(x)", "MeshError", "no axis 0", "'dp', 'tp'"),
        (
            "shard_map(lambda x: all_gather(x, 'dp', '0'), mesh, rows)(x)",
            "LayoutError",
            "dim '0'",
            "from 0 to 1",
        ),
        ("shard_map(lambda x: x, mesh, rows)(x)", "LayoutError", "replicated over 'dp'", "psum it"),
        ("shard_map(lambda x: x + y, mesh, rows)(x)", "ValueTreeError", "plain", "distribute("),
        ("shard_map(lambda x: 3, mesh, rows)(x)", "ValueTreeError", "result is 3", "of tensors"),
        ("psum(t, 'dp')", "CommError", "outside of shard_map", "shard_map(f, mesh, ...)"),
        ("axis_index('dp')", "CommError", "axis_index is called outside", "shard_map(f, mesh"),
        ("groups('dp')", "LayoutError", "'dp' is not a Mesh", "Mesh(dp=2, tp=4)"),
        ("groups(mesh)", "CommError", "no process group", "torchrun"),
    ],
    "optim": [
        ("optim.AdamW(params)", "ArgumentError", "no parameters", "opt.init(params)"),
        ("optim.AdamW(learning_rate=1)", "FdtensorError", "'learning_rate'", "opt.init(params)"),
        ("optim.AdamW(weight_deca=1)", "FdtensorError", "'weight_deca'", "mean 'weight_decay'?"),
        ("optim.AdamW(lr=-1)", "FdtensorError", "lr=-1", "torch.optim.AdamW"),
        ("optim.Optimizer(3, {})", "FdtensorError", "3 is no optimizer", "torch.optim.AdamW"),
        ("opt.step(params, params)", "ArgumentError", "lacks 'state'", "step(params, grads, state"),
        ("opt.step(params, params, None)", "ValueTreeError", "state does not have", "parameters"),
        ("opt.step(params, [], state)", "ValueTreeError", "grads does not have", "parameters"),
        ("opt.step(params, params, state, lrr=1)", "FdtensorError", "lrr", "AdamW(...)"),
        ("opt.step(params, params, state, lr='1')", "FdtensorError", "'1' is no number", "lr=1e-3"),
        ("opt.init(module)", "ValueTreeError", "Linear", "Parameters are DTensors"),
        ("opt.zero_grad()", "NotTorchError", "'zero_grad'", "Leave it out"),
        ("opt.state_dict()", "NotTorchError", "'state_dict'", "save_checkpoint"),
        ("optim.clip_grad_norm(params, '1')", "FdtensorError", "max_norm='1'", "max_norm=1.0"),
        ("optim.clip_grad_norm(params, 1, 'l2')", "FdtensorError", "'l2'", "a number above 0"),
        ("optim.clip_grad_norm({'w': t}, 1)", "ValueTreeError", "['w']", "Distribute it"),
        ("optim.GradScaler(mesh)", "CommError", "is not a Comm", "connect(mesh)"),
        ("optim.LossScale('a')", "FdtensorError", "'a'", "above 0"),
    ],
    "random": [
        ("random.key('a')", "FdtensorError", "'a' is not a seed", "random.key(0)"),
        ("random.normal((4, 6))", "ArgumentError", "lacks 'shape'", "normal(key, shape"),
        ("random.normal(3, (4, 6))", "FdtensorError", "3 is not a key", "random.key(seed)"),
        ("random.normal(random.split(key), (4,))", "FdtensorError", "is not a key", "random.key"),
        ("random.normal(key, type_)", "FdtensorError", "f32[4@dp,6]", "connect(mesh)"),
        ("random.normal(key, type_, mesh)", "CommError", "is not a Comm", "connect(mesh)"),
        ("random.normal(key, (4, -1))", "FdtensorError", "(4, -1)", "0 or more"),
        ("random.split(key, '2')", "FdtensorError", "'2'", "an int"),
        ("random.dropout(key, x, 2)", "FdtensorError", "2 is not a probability", "0 to 1"),
        ("initialize(module, rows, 3, comm)", "FdtensorError", "3 is not a key", "random.key"),
        ("initialize(module, rows, key, mesh)", "CommError", "is not a Comm", "connect(mesh)"),
        ("initialize(module, {'w': rows}, key, comm)", "ValueTreeError", "'w'", "named_parameters"),
    ],
    "files": [
        ("io.checkpoint_contents('/nowhere')", "CheckpointError", "'/nowhere'", ".metadata"),
        ("io.checkpoint_contents(None)", "CheckpointError", "None is no path", "pathlib.Path"),
        ("io.load_checkpoint('/nowhere', rows, comm)", "CheckpointError", "'/nowhere'", "a direct"),
        ("io.load_checkpoint(folder, rows)", "ArgumentError", "lacks 'comm'", "path, like, comm"),
        (
            "io.load_checkpoint(folder + '/saved', {'wieght': rows}, comm)",
            "CheckpointError",
            "wieght (there is weight)",
            "checkpoint_contents(path)",
        ),
        ("io.load_checkpoint(folder, rows, mesh)", "CommError", "is not a Comm", "connect(mesh)"),
        ("io.save_checkpoint(params, folder + '/saved', comm)", "CheckpointError", "saved", "over"),
        ("io.save_checkpoint(module, folder, comm)", "ValueTreeError", "has no name", "A leaf is"),
        ("io.save_checkpoint(params, None, comm)", "CheckpointError", "None is no path", "Pass"),
        ("io.save_checkpoint({'f': print}, '/dev/null/x', comm)", "CheckpointError", "nul", "Mend"),
        ("io.load_safetensors('/nowhere', rows, comm)", "CheckpointError", "'/nowhere'", "Pass a"),
        ("io.to_torch(x)", "CommError", "SimulatedComm", "FuncolComm"),
        ("io.from_torch(3)", "LayoutError", "an int", "distribute and from_local"),
    ],
    "transforms and control flow": [
        (
            "fd.vjp(torch.relu, x)[1](i * 1.0)",
            "FdtensorError",
            "1 of 1 cotangents have another shape",
            "torch.ones_like(y)",
        ),
        (
            "torch.autograd.grad(fd.spmd(torch.sum)(x.detach().requires_grad_()), x, x)",
            "FdtensorError",
            "1 of 1 cotangents",
            "like the results",
        ),
        ("fd.vmap(torch.add)(x, i_)", "ValueTreeError", "plain tensor", "Distribute it first"),
        ("fd.vmap(torch.add)(x, x[1:])", "TraceError", "sizes [4, 3]", "in_dims=(0, None)"),
        ("fd.vmap(torch.add, in_dims=(0, 2))(x, i)", "TraceError", "in_dim=2", "None for an arg"),
        ("torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))", "NotTorchError", "cond", "fd.spmd"),
        (
            "fd.spmd(lambda x: x.register_hook(lambda g: g))(x)",
            *("TraceError", "requires no gradient", "if y.requires_grad"),
        ),
        (
            "torch.func.functional_call(torch.nn.Linear(6, 4), {'weight': x}, (x,))",
            *("NotTorchError", "functional_call takes", "fd.bind(module, params)"),
        ),
        ("while_loop(torch.any, torch.relu, (x,))", "NotTorchError", "while_loop", "fd.spmd("),
        ("each(torch.relu, x)", "NotTorchError", "and not a DTensor", "fd.spmd("),
        ("spmd(torch.add, donate=(0, 1))(x, x)", "TraceError", "one DTensor as two", "once"),
        ("spmd(torch.add, donate=1)(x, x)", "TraceError", "one DTensor as two", "donate="),
        (
            "redistribute(params, {'weight': rows, 'bais': rows})",
            "ValueTreeError",
            "lacks 'bias', has 'bais' beside",
            "like the tree",
        ),
    ],
    "rules, tests and styles": [
        ("rule(torch.relu)(print)", "RuleError", "relu is no op", "torch.ops.aten.mm.default"),
        ("rule()", "RuleError", "no op", "@rule(torch.ops.mylib"),
        ("rule(torch.ops.aten.relu)(3)", "RuleError", "3 is no function", "yield"),
        ("testing.verify(torch.relu, [(t,)])", "RuleError", "plain function", "custom_op"),
        ("testing.verify(torch.ops.aten.relu.default, [t])", "RuleError", "tensor(", "(x,)"),
        ("testing.verify(torch.ops.aten.relu.default, [(t, t)])", "RuleError", "not take"),
        ("testing.discover(torch.ops.aten.relu.default)", "RuleError", "no sample", "discover(op,"),
        ("testing.assert_same_on_every_layout(torch.relu)", "TraceError", "no tensor", "Pass"),
        (
            "testing.assert_same_on_every_layout(torch.relu, t, mesh='dp')",
            "LayoutError",
            "'dp' is not a Mesh",
            "Mesh(dp=2, tp=4)",
        ),
        (
            "testing.assert_same_on_layouts(torch.relu, t, layouts=rows)",
            "LayoutError",
            "layouts=Layout(",
            "one layout for each tensor",
        ),
        ("parallel.layouts_for(module, mesh, None)", "TraceError", "None", "Colwise()"),
        ("parallel.layouts_for(params, mesh, {})", "TraceError", "is no module", "torch.nn.Module"),
        ("parallel.layouts_for(module, 'dp', {})", "LayoutError", "'dp' is not a Mesh", "Mesh("),
        ("parallel.layouts_for(module, mesh, {'': 'x'})", "TraceError", "'x'", "Use Colwise()"),
        ("parallel.layouts_for(module, mesh, {'wei': 0})", "TraceError", "0 is not a", "Colwise()"),
        ("parallel.Colwise(parts=0)", "LayoutError", "parts=0", "parts=3"),
        ("parallel.input_reshard(module, comm)", "ArgumentError", "'axis', 'dim'", "axis=..., dim"),
        ("parallel.input_reshard(module, mesh, axis='tp', dim=0)", "CommError", "Comm", "connect("),
        ("local_cluster('2')", "CommError", "'2'", "Pass their number"),
        ("local_cluster(2, treads=3)", "ArgumentError", "'treads'", "Did you mean 'threads'?"),
    ],
}  # fmt: skip

INSIDE = [
    ("lambda x: x.redistribute(rows)", "TraceError", "'redistribute'", "constrain(x, layout)"),
    ("lambda x: x.full()", "TraceError", "'full', which only a DTensor has", "come outside"),
    ("lambda x: x @ x", "TraceError", "[4, 6] X [4, 6]", "full tensors of these shapes"),
    ("lambda x: x.view(7)", "TraceError", "shape '[7]' is invalid", "full tensors"),
    ("lambda x: torch.sum(x, dm=0)", "TraceError", "dm=int", "full tensors"),
    ("lambda x: x if x.sum() > 0 else -x", "DataDependentError", "bool[]", "torch.where"),
    ("lambda x: print(float(x.sum()))", "DataDependentError", "f32[]", "return the tensor"),
    ("lambda x: x.numpy()", "DataDependentError", "numpy reads the values", "outside"),
    ("lambda x: x[x > 0]", "DataDependentError", "the shape of what index gives", "torch.where"),
    ("lambda x: torch.nn.functional.dropout(x)", "TraceError", "no key", "key=random.key(0)"),
    ("lambda x: constrain(x, 'dp')", "LayoutError", "'dp' is not a Layout", "mesh.layout('dp')"),
    ("lambda x: constrain(3, rows)", "LayoutError", "3 is not a tensor", "Give a tensor"),
    ("lambda x: saved_as(x, [Shard(0)])", "LayoutError", "[Shard(0)]", "Layout(mesh, [Shard(0)])"),
    ("lambda x: psum(x, 'dp')", "CommError", "outside of shard_map", "shard_map(f, mesh"),
    ("lambda x: mesh.layout('pp')", "MeshError", "no axis 'pp'", "'dp', 'tp'"),
    ("torch.func.grad(lambda x: x)", "TraceError", "scalar", "full tensors"),
    ("torch.func.grad(lambda x: Old.apply(x).sum())", "TraceError", "setup_context(ctx, inputs"),
    ("torch.func.grad(lambda x: twice(x).sum())", "TraceError", "custom_op: take it by backward"),
    (
        "torch.func.grad(lambda x: torch.nn.functional.embedding(i_, x, sparse=True).sum())",
        "TraceError",
        "gives a sparse tensor",
        "Pass sparse=False to an embedding",
    ),
    ("lambda x: torch.tensor([x[0, 0], x[1, 1]])", "DataDependentError", "torch.stack([...])"),
]

ROWS = [(name, *row) for name, rows in MISTAKES.items() for row in rows]


def error_of(source: str) -> Exception:
    """What a script of one line raises."""
    linecache.cache["script.py"] = (len(source), None, [source + "\n"], "script.py")
    with pytest.raises(Exception) as raised:  # noqa: PT011  (which kind it is, is what is asked)
        exec(compile(source, "script.py", "exec"), dict(NAMES))
    return raised.value


def check(error: Exception, kind: str, pieces: tuple[str, ...]) -> None:
    """A mistake is told in one sentence with the value, and what to do about it follows."""
    assert isinstance(error, errors.FdtensorError), repr(error)
    assert type(error).__name__ == kind, repr(error)
    for piece in pieces:
        assert piece in str(error), str(error)
    for text in (error.sentence, error.hint):
        assert re.search(r"[\w)'\"\]}>]\.$|, \.\.\.$", text), text
        assert "\n" not in text
    assert not re.search(r"[.?!] [A-Z]", error.sentence), error.sentence
    assert len(str(error)) < 1500
    assert "object has no attribute" not in str(error)


def test_there_are_many_mistakes():
    assert len({row[1] for row in ROWS}) == len(ROWS) > 200


@pytest.mark.parametrize("row", ROWS, ids=[f"{name}: {row[0]}" for name, *row in ROWS])
def test_a_mistake_is_told(row):
    _, source, kind, *pieces = row
    check(error_of(source), kind, tuple(pieces))


@pytest.mark.parametrize("how", ["spmd({})(x)", "trace({}, x)"])
@pytest.mark.parametrize("row", INSIDE, ids=[row[0] for row in INSIDE])
def test_a_mistake_inside_of_a_traced_function_is_told_with_its_line(row, how):
    written, kind, *pieces = row
    source = how.format(written)
    error = error_of(source)
    check(error, kind, tuple(pieces))
    assert error.facts["line"] == f"script.py:1: {source}"


def test_kinds_of_python_catch_what_python_would_raise():
    x = NAMES["x"]
    for kind in (TypeError, AttributeError, ValueError):
        with pytest.raises(kind):
            torch.relu_(x)
    with pytest.raises(TypeError):
        fd.spmd(torch.relu, out_layout=None)
    assert not hasattr(x, "add_")
    assert getattr(x, "stride", 3) == 3
    assert not hasattr(OPT, "zero_grad")


def test_a_dtensor_is_still_no_tensor():
    x = NAMES["x"]
    assert not isinstance(x, torch.Tensor)
    assert not torch.is_tensor(x)
    (leaf,) = optree.tree_leaves({"a": [x]})
    assert leaf is x
    assert len(optree.tree_leaves(x, namespace="fdtensor")) == 8
    assert "sum_" not in dir(x)
    assert "stride" not in dir(x)
    assert {"full", "redistribute", "shape", "layout"} <= set(dir(x))
    assert f"{x}" == str(x)


def test_names_that_are_near_are_known_to_python():
    with pytest.raises(AttributeError) as raised:
        fd.redistrubute  # noqa: B018
    assert (raised.value.name, raised.value.obj) == ("redistrubute", fd)


def test_what_cannot_travel_to_a_rank_is_told(gloo_ranks):  # noqa: F811
    with pytest.raises(errors.CommError) as raised:
        gloo_ranks(2).run(lambda x: x, (n for n in [1]))
    check(raised.value, "CommError", ("generator", "Pass"))
    assert isinstance(gloo_ranks(2), cluster.LocalCluster)
