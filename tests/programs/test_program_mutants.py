"""Programs that come from outside: a text is a program that is right, or it is refused."""

import collections
import functools
import json
import random
from typing import Any

import pytest
import torch

from fdtensor import (
    Layout,
    Mesh,
    Partial,
    Program,
    Replicate,
    Shard,
    SimulatedComm,
    TensorType,
    TraceError,
    run,
    saved_as,
    trace,
)
from fdtensor.ops.graph import substituted, tensors_of
from fdtensor.plans.collectives import Step
from fdtensor.programs.eqn import Together
from fdtensor.programs.json import _argument, _encoded
from fdtensor.random import key
from fdtensor.runtime.operand_memory import RESHAPES
from fdtensor.testing.values import gather_full, scatter
from tests.support.audit import nothing_runs
from tests.support.depth import times
from tests.support.mutants import mutants
from tests.support.programs import CASES
from tests.support.programs import tensors_of as tensors_for

NAMES = (
    "mlp", "gradients", "views", "split dims", "control flow", "closed over", "cat and split",
    "where", "gather and scatter", "index_add", "cross_entropy", "embedding", "layer_norm",
    "attention", "convolution", "cumsum", "slices", "adam", "casts", "one_hot", "sort", "no rule",
)  # fmt: skip

SMALL = 4096
"""Programs of larger tensors, or for more ranks than 16, are not run."""

MESHES = (Mesh(dp=2, tp=2), Mesh(x=3), Mesh.from_ranks([[2, 0], [1, 3]], ("a", "b")))


def noisy(x):
    """Three draws from one key."""
    return torch.nn.functional.dropout(x, 0.5) + torch.rand_like(x) + torch.randn_like(x)


def kept(x, w):
    """A gradient with a value that waits in shards."""
    wait = MESHES[0].layout("dp", "tp")
    return torch.func.grad(lambda w: saved_as((x @ w).tanh(), wait).square().sum())(w)


def experts(x, gate, up, down):
    """Two experts for each row, and the gradients of their weights."""

    def loss(gate, up, down):
        top, which = torch.softmax(x @ gate, -1).topk(2, -1)
        chosen = torch.nn.functional.one_hot(which, gate.shape[1]).to(x.dtype)
        mixed = (top.unsqueeze(-1) * chosen).sum(1)
        inner = torch.relu(torch.einsum("ti,eih->teh", x, up))
        return torch.einsum("te,teh,eho->to", mixed, inner, down).square().sum()

    return torch.func.grad(loss, argnums=(0, 1, 2))(gate, up, down)


def pooled(x):
    """The gradient of a pooling, which reads its indices."""
    return torch.func.grad(lambda x: torch.nn.functional.max_pool2d(x, 2).square().sum())(x)


def on_square(*shape, cut=(), dtype=torch.float64):
    return TensorType(shape, dtype, MESHES[0].layout(*cut))


OTHERS = [
    (noisy, [on_square(4, 6, cut=["dp", "tp"])], {"key": key(0)}),
    (noisy, [on_square(5, 3, cut=[("tp", "dp")])], {"key": key(0)}),
    (kept, [on_square(4, 4, cut=["dp"]), on_square(4, 4, cut=[None, "tp"])], {}),
    (
        experts,
        [
            on_square(4, 4, cut=["dp"]),
            on_square(4, 4),
            on_square(4, 4, 3, cut=["tp"]),
            on_square(4, 3, 4, cut=["tp"]),
        ],
        {},
    ),
    (pooled, [on_square(2, 2, 4, 4, cut=["dp", "tp"])], {}),
    (torch.matmul, [on_square(4, 8, cut=[("dp", "tp")]), on_square(8, 4, cut=["tp", "dp"])], {}),
]


@functools.cache
def programs():
    """Small programs on several meshes, with layouts drawn from a fixed seed, and full tensors."""
    chance = random.Random(20)
    found = []
    for name in NAMES:
        case, mesh = CASES[name], chance.choice(MESHES)
        sizes = dict.fromkeys(case.names, 4)
        types = []
        for t in tensors_for(case, sizes):
            kinds = [Replicate(), *map(Shard, range(t.ndim))]
            kinds += [Partial()] if t.dtype.is_floating_point else []
            placed = [chance.choice(kinds) for _ in mesh.axes]
            types.append(TensorType(tuple(t.shape), t.dtype, Layout(mesh, placed)))
        found.append((trace(case.f, *types), tensors_for(case, sizes)))
    for f, types, options in OTHERS:
        program = trace(f, *types, **options)
        found.append((program, [values_of(t, i) for i, t in enumerate(program.in_types)]))
    return found


@functools.cache
def texts():
    return [program.to_json() for program, _ in programs()]


def verdict(text: str) -> str:
    """What becomes of a text: `refused`, `right`, `large`, `undefined` or what is wrong."""
    try:
        found = Program.from_json(text)
    except TraceError:
        return "refused"
    except Exception as error:  # whatever else comes out is what this looks for
        return f"raises {type(error).__name__}"
    return judged(found)


def judged(program: Program) -> str:
    """Whether a program gives what its lines give on full tensors.

    `undefined` where a line fails on them, for an index out of range.
    """
    if max((t.numel for t in program.types), default=0) > SMALL or program.mesh.size > 16:
        return "large"
    full = [values_of(type, i) for i, type in enumerate(program.in_types)]
    try:
        due = on_full_tensors(program, full)
    except (RuntimeError, IndexError, ValueError, NotImplementedError):
        return "undefined"
    try:
        values = [scatter(t, type, i) for i, (t, type) in enumerate(zip(full, program.in_types))]
        outs = run(program, values, SimulatedComm(program.mesh))
        outs = [tuple(map(numbered, blocks)) for blocks in outs]  # nan is no replica of nan
        made = [gather_full(blocks, t) for blocks, t in zip(outs, program.out_types, strict=True)]
    except Exception as error:
        return f"wrong: running it raises {type(error).__name__}"
    if not all(map(close, made, map(numbered, due))):
        return "wrong: other values"
    return "right"


def values_of(type: TensorType, seed: int) -> torch.Tensor:
    """Small integers, 0 to 3 where they may be indices."""
    generator = torch.Generator().manual_seed(seed)
    least = -4 if type.dtype.is_floating_point or type.dtype.is_complex else 0
    return torch.randint(least, 4, type.shape, generator=generator).to(type.dtype)


def on_full_tensors(program: Program, values: list[torch.Tensor]) -> list[torch.Tensor]:
    """What the lines of a program mean."""
    env: dict[Any, Any] = dict(zip(program.inputs, values, strict=True)) | dict(program.constants)
    for eqn in program.eqns:
        if isinstance(eqn.op, (Step, Together)):
            env.update(zip(eqn.outs, [env[v] for v in eqn.ins]))
            continue
        args, kwargs = substituted((eqn.args, eqn.kwargs), env.__getitem__)
        op = torch.ops.aten.reshape.default if eqn.op in RESHAPES else eqn.op
        made = tensors_of(op(*map(listed, args), **{k: listed(v) for k, v in kwargs}))
        env.update((v, t) for v, t in zip(eqn.outs, made) if v is not None)
    return [env[v] for v in program.outs]


def listed(tree):
    return [listed(entry) for entry in tree] if isinstance(tree, tuple) else tree


def numbered(t: torch.Tensor) -> torch.Tensor:
    """The tensor with a number in place of nan."""
    return torch.nan_to_num(t, 4321.0, 1e9, -1e9) if t.is_floating_point() else t


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    wide = torch.complex128 if a.dtype.is_complex else torch.float64
    loose = 1e-9 if a.dtype.itemsize > 4 else 1e-2
    return torch.allclose(a.to(wide), b.to(wide), loose, loose, equal_nan=True)


ALL = (*NAMES, "draws", "draws in order", "saved_as", "experts", "pooling", "two axes")


@pytest.mark.parametrize("i", range(len(ALL)), ids=ALL)
def test_a_program_that_is_read_back_gives_the_same(i):
    (program, full), text = programs()[i], texts()[i]
    found = Program.from_json(text)
    assert found.digest == program.digest
    assert str(found) == str(program)
    assert found.to_json() == text
    values = [scatter(t, type, i) for i, (t, type) in enumerate(zip(full, program.in_types))]
    once, again = (run(p, values, SimulatedComm(p.mesh)) for p in (program, found))
    for a, b in zip(once, again, strict=True):
        assert all(map(torch.equal, a, b))
    assert verdict(text) == "right"


COUNT = times(300, 10_000)
ALLOWED = ("refused", "right", "large", "undefined")


def test_a_mutant_of_a_program_is_right_or_refused():
    verdicts = collections.defaultdict(list)
    with nothing_runs():
        for text in mutants(texts(), COUNT, seed=20):
            verdicts[verdict(text)].append(text)
    wrong = {said: texts[0][:2000] for said, texts in verdicts.items() if said not in ALLOWED}
    assert not wrong, {said: len(texts) for said, texts in verdicts.items()}
    assert verdicts["right"]
    assert len(verdicts["refused"]) > COUNT / 2


# --- texts of an attacker ----------------------------------------------------------------------

MESH = Mesh(x=2)
FLAT = TensorType((4, 4), torch.float32, MESH.layout())


def changed(f, line, *types) -> str:
    """The text of the program of `f` with other values in its first line."""
    tree = json.loads(trace(f, *(types or (FLAT,))).to_json())
    tree["lines"][0] |= line
    return json.dumps(tree)


CODE = "__import__('os').system('true')"
V = {"v": 0}
HOSTILE = {
    "a layout that is code": {"op": "fdtensor::constrain", "args": [V, CODE]},
    "a kept layout that is code": {"op": "fdtensor::kept", "args": [V, CODE]},
    "a file that is read": {"op": "aten::from_file", "args": ["/etc/hostname"]},
    "a file that is written": {"op": "aten::from_file", "args": ["/tmp/x", True, 16]},
    "ranks that are told": {"op": "_c10d_functional::all_reduce", "args": [V, "sum", "0"]},
    "an op that writes": {"op": "aten::relu_", "args": [V]},
    "an op into another": {"op": "aten::exp.out", "args": [V], "kwargs": [["out", V]]},
    "an op that draws": {"op": "aten::rand_like", "args": [V]},
    "dropout": {"op": "aten::native_dropout", "args": [V, 0.5, True], "outs": [1, None]},
    "an op that gives a number": {"op": "aten::item", "args": [V]},
    "an op of another module": {"op": "os::system", "args": ["true"]},
    "an op by its path": {"op": "torch.ops.aten.relu", "args": [V]},
    "no op": {"op": "aten::__class__", "args": [V]},
    "an op of another shape": {"op": "aten::sum", "args": [V]},
    "an op of another dtype": {"op": "aten::isnan", "args": [V]},
    "a billion operands": {"op": "aten::stack", "args": [[V] * 100, 0]},
    "too few arguments": {"op": "aten::relu", "args": []},
    "too many arguments": {"op": "aten::relu", "args": [V, V]},
    "an argument that there is not": {"op": "aten::relu", "args": [V], "kwargs": [["x", 1]]},
    "an argument twice": {"op": "aten::relu", "args": [V], "kwargs": [["self", V]]},
    "a value that is not made yet": {"op": "aten::relu", "args": [{"v": 1}]},
    "a value that there is not": {"op": "aten::relu", "args": [{"v": 9}]},
    "deep arguments": {"op": "aten::relu", "args": [[[[[[[[[[V]]]]]]]]]]},
    "a value that is two things": {"op": "aten::relu", "args": [{"v": 0, "dtype": "f32"}]},
    "a device that is not": {"op": "aten::_to_copy", "kwargs": [["device", {"device": "x"}]]},
    "a note": {"note": "right"},
    "indices of no pooling": {
        "op": "aten::max_pool2d_with_indices_backward",
        "args": [V, V, [1, 1], [1, 1], [0, 0], [1, 1], False, V],
    },
    "an op of quantized tensors": {"op": "quantized::relu6", "args": [V, False]},
    "an internal op without a rule": {"op": "aten::_fused_dropout", "args": [V, 0.5]},
    "a segment of any length": {"op": "aten::segment_reduce", "args": [V, "sum"]},
}  # fmt: skip


@pytest.mark.parametrize("line", HOSTILE.values(), ids=list(HOSTILE))
def test_a_hostile_line_is_refused(line):
    assert verdict(changed(torch.relu, {})) == "right"
    assert verdict(changed(torch.relu, line)) == "refused"


@pytest.mark.parametrize("op", ["unbind.int", "split.Tensor", "unsafe_split.Tensor"])
def test_an_op_that_would_give_a_trillion_tensors_is_not_asked(op):
    flat = TensorType((2**40,), torch.int8, MESH.layout())
    args = [V] if op.startswith("unbind") else [V, 1]
    assert verdict(changed(torch.relu, {"op": f"aten::{op}", "args": args}, flat)) == "refused"


def test_an_op_of_a_trillion_ops_is_not_asked():
    flat = TensorType((2**40,), torch.int8, MESH.layout())
    assert verdict(changed(torch.relu, {"op": "aten::diff", "args": [V, 2**39]}, flat)) == "refused"


def test_an_image_of_a_trillion_pixels_is_not_made():
    flat = TensorType((1, 1, 2**40), torch.float32, MESH.layout(None, None, "x"))
    args = [V, [2**40], False]
    line = {"op": "aten::upsample_linear1d", "args": args}
    assert verdict(changed(torch.relu, line, flat)) in ("refused", "large")


def test_a_program_for_too_many_ranks_is_refused():
    text = trace(torch.relu, FLAT).to_json().replace('"sizes":[2]', f'"sizes":[{2**21}]')
    with pytest.raises(TraceError, match="more than 1048576 ranks"):
        Program.from_json(text)


def test_values_that_a_function_closes_over_are_written():
    table = torch.tensor([[1.0, float("nan")], [-0.0, 3.0]])
    found = trace(lambda x: x @ table, TensorType((2, 2), torch.float32, MESH.layout("x")))
    again = Program.from_json(found.to_json())
    ((_, held),) = again.constants
    assert held.dtype == table.dtype
    assert held.numpy().tobytes() == table.numpy().tobytes()
    assert again.digest == found.digest
    large = torch.zeros(2**18 + 1)
    found = trace(lambda x: x + large, TensorType((), torch.float32, MESH.layout()))
    with pytest.raises(TraceError, match="closes over 1048580 bytes of tensors"):
        found.to_json()


ARGUMENTS = (
    *(None, True, 1, -1, 2**63, 2**64 - 1, 0.5, -0.0, float("inf"), float("-inf"), 1e308, "sum"),
    *(1 + 2j, complex("-inf"), torch.float32, torch.complex32, torch.float8_e5m2, torch.strided),
    *(torch.device("cpu"), torch.device("cuda", 1), torch.channels_last, ((1, 2), (), (None,))),
)


@pytest.mark.parametrize("value", ARGUMENTS, ids=repr)
def test_every_kind_of_argument_is_read_back(value):
    again = _argument(json.loads(json.dumps(_encoded(value))), 0, "here")
    assert repr(again) == repr(value)
    assert type(again) is type(value)


@pytest.mark.parametrize("value", [object(), {1}, [1], b"x", torch.ones(2), torch.sparse_coo])
def test_other_arguments_are_not_written(value):
    with pytest.raises(TraceError, match="cannot be written into a text"):
        _encoded(value)


# --- operands that kernels trust -----------------------------------------------------------------

aten = torch.ops.aten
X, ROWS = torch.ones(4, 8), torch.ones(4, 1)
IMAGE, CHANNELS = torch.ones(2, 4, 6, 6), torch.ones(4)
Q, LOGS = torch.ones(2, 2, 5, 8), torch.ones(2, 2, 5)
norm, batch_norm = aten.native_layer_norm_backward, aten.native_batch_norm
flash = aten._scaled_dot_product_flash_attention_for_cpu
flash_back = aten._scaled_dot_product_flash_attention_for_cpu_backward
TRUSTED = {
    "layer norm": (norm, [X, X, [8], ROWS, ROWS, None, None, [True, False, False]], 3, (1, 1)),
    "batch norm": (batch_norm, [IMAGE, CHANNELS, CHANNELS, None, None, True, 0.1, 1.0], 1, (1,)),
    "keys": (flash, [Q, Q, Q, 0.0, False], 1, (1, 1, 5, 8)),
    "values": (flash, [Q, Q, Q, 0.0, False], 2, (2, 2, 1, 8)),
    "results": (flash_back, [Q, Q, Q, Q, Q, LOGS, 0.0, False], 4, (2, 2, 5)),
    "logarithms": (flash_back, [Q, Q, Q, Q, Q, LOGS, 0.0, False], 5, (1, 1, 5)),
    "distances": (aten._cdist_backward, [torch.ones(4, 4), X, X, 2.0, torch.ones(4, 4)], 4, (1, 1)),
}


def text_of(op: Any, args: list[Any]) -> str:
    """A program of one op, which torch traces whatever shapes its kernel would trust."""
    tensors = [t for t in args if isinstance(t, torch.Tensor)]

    def f(*given):
        operands = iter(given)
        return op(*[next(operands) if isinstance(t, torch.Tensor) else t for t in args])

    return trace(f, *[TensorType(t.shape, t.dtype, MESH.layout()) for t in tensors]).to_json()


@pytest.mark.parametrize("name", TRUSTED)
def test_what_a_kernel_would_trust_is_looked_at(name):
    op, args, place, shape = TRUSTED[name]
    assert verdict(text_of(op, args)) in ("right", "undefined")
    assert verdict(text_of(op, [*args[:place], torch.ones(shape), *args[place + 1 :]])) == "refused"


def test_a_reduction_that_there_is_not_is_refused():
    args = [X, torch.zeros(4, dtype=torch.int64), None]
    assert verdict(text_of(aten.nll_loss_forward, [*args, 1, -100])) == "right"
    assert verdict(text_of(aten.nll_loss_forward, [*args, 5, -100])) == "refused"


def test_a_draw_by_another_key_is_refused():
    text = trace(noisy, FLAT, key=key(0)).to_json()
    assert verdict(text) == "right"
    for before, after in (('"uniform"', '"unifrm"'), ('"shape": [2]', '"shape": [3]')):
        changed_text = text.replace(before, after).replace(before.replace(" ", ""), after)
        assert changed_text != text
        assert verdict(changed_text) == "refused"
