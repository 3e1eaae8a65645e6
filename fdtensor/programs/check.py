"""`check_program`: whether the types of a program follow from its ops and their rules.

The record checks that values are made before they are read, and that steps lie between values of
their types. Here each op is run once on tensors without elements in memory, for the shapes and
dtypes of its results, and on each axis the placements of a line must be a row of the op's rule.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from fdtensor.layouts.errors import FdtensorError, TraceError
from fdtensor.layouts.kinds import is_tuple
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import Placement, Replicate, Shard
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.layouts.torch_private import has_kernel, packet_name, schema_of
from fdtensor.layouts.words import first_sentence
from fdtensor.ops.graph import Call, Full, Var
from fdtensor.ops.lift import lifted
from fdtensor.ops.lowering import results_of
from fdtensor.ops.notation.core import Row, rule_of
from fdtensor.ops.precision import CAST, ROUNDED
from fdtensor.ops.randomness import DRAW
from fdtensor.ops.rows import CallKey, arguments, recut_rows, rows_of, variants
from fdtensor.ops.saved_values import ALIAS, CONSTRAIN, SAVED, SAVED_AS
from fdtensor.ops.value_checks import CHECK
from fdtensor.plans.check import check_step
from fdtensor.plans.cost import CostModel
from fdtensor.programs.eqn import Eqn
from fdtensor.programs.unchecked import refuse_unchecked

if TYPE_CHECKING:
    from fdtensor.programs.program import Program

__all__ = ["MOST_RANKS", "check_program"]

HINT = "Make programs with trace, or by Program.from_json of what to_json returned."

MOST_RANKS = 1 << 20
"""Programs for more ranks are not verified: rules compute the blocks of all ranks of an axis."""

NOTES = ("", "no rule: operands replicated", "kept")
"""The notes that a line may have."""

aten = torch.ops.aten


def check_program(program: Program) -> None:
    """Raises `TraceError` where the types of a line do not follow from its op."""
    _check_values(program)
    fulls = tuple([Full(t.shape, t.dtype) for t in program.types])
    full_of = {Var(i): full for i, full in enumerate(fulls)}
    makers: dict[Var, Eqn] = {}
    device = _device(program)
    for i, eqn in enumerate(program.eqns):
        try:
            _check_line(program, eqn, fulls, device)
            if not eqn.steps:
                refuse_unchecked(eqn.call, full_of, makers)
            makers.update((v, eqn) for v in eqn.outs if v is not None)
        except FdtensorError as error:
            raise TraceError(
                f"line {i} of {program.name}: {error.sentence}", **error.facts, hint=HINT
            ) from error
        except Exception as error:  # kernels and rules raise any exception for other arguments
            raise TraceError(
                f"line {i} of {program.name}: {eqn.op} does not take these arguments: "
                f"{first_sentence(error)}.",
                hint=HINT,
            ) from error


def _check_values(program: Program) -> None:
    """Raises `TraceError` for values on another mesh, or constants that are no replicas."""
    if not _is_cost(program.cost) or program.mesh.size > MOST_RANKS:
        raise TraceError(
            f"{program.name} has no cost model, or more than {MOST_RANKS} ranks.", hint=HINT
        )
    for i, type in enumerate(program.types):
        if type.mesh is not program.mesh:
            raise TraceError(
                f"{Var(i)} of {program.name} is on another mesh.",
                program=program.mesh,
                value=type.mesh,
                hint=HINT,
            )
    for v, tensor in program.constants:
        whole = TensorType(tuple(tensor.shape), tensor.dtype, program.mesh.layout())
        if program.type_of(v) is not whole:
            raise TraceError(
                f"{v} of {program.name} is closed over, and is no replica of its tensor.",
                type=program.type_of(v),
                tensor=whole,
                hint=HINT,
            )


def _is_cost(value: object) -> bool:
    return isinstance(value, CostModel)


def _check_line(program: Program, eqn: Eqn, fulls: Sequence[Full], device: str) -> None:
    if eqn.note not in NOTES or (eqn.note == "kept") > (eqn.op is ALIAS):
        raise TraceError(f"it says {eqn.note!r} of itself.")
    if eqn.steps:
        for step in eqn.steps:
            check_step(step, str(step.collective))
        if eqn.kwargs or eqn.note or any(not isinstance(v, Var) for v in eqn.args):
            raise TraceError("it has arguments that steps do not take.")
        return
    call = eqn.call
    _check_op(call, fulls)
    results = results_of(CallKey.of(call), tuple(fulls[v.index] for v in call.ins), device)
    types = [None if v is None else fulls[v.index] for v in call.outs]
    if len(results) != len(types) or any(
        type not in (None, result) for type, result in zip(types, results, strict=True)
    ):
        raise TraceError(
            f"{call.op} gives values of other shapes or dtypes.",
            gives=_listed(results),
            line=_listed(types),
        )
    if not _follows(program, call, fulls):
        raise TraceError(
            f"no rows of {call.op} give these types.",
            takes=", ".join(str(program.type_of(v)) for v in call.ins),
            gives=", ".join("_" if v is None else str(program.type_of(v)) for v in call.outs),
        )


def _listed(fulls: Sequence[Full | None]) -> str:
    return ", ".join("_" if f is None else f"{f.dtype}{list(f.shape)}" for f in fulls)


def _device(program: Program) -> str:
    """The kind of device that its lines name: one that is not a CPU, if any does."""
    leaves = [v for e in program.eqns for v in _flat((e.args, e.kwargs))]
    kinds = {v.type for v in leaves if isinstance(v, torch.device)}
    return next((kind for kind in sorted(kinds) if kind != "cpu"), "cpu")


def _flat(tree: object) -> Iterator[object]:
    if is_tuple(tree):
        for entry in tree:
            yield from _flat(entry)
    else:
        yield tree


# --- ops -------------------------------------------------------------------------------------

_COMPOSITE = "CompositeImplicitAutograd"

_APART = {
    "_c10d_functional", "_c10d_functional_autograd", "c10d", "c10d_functional", "symm_mem",
    "_dtensor", "fsdp", "streams", "profiler", "inductor", "inductor_prims", "_inductor_test",
    "rngprims", "debugprims", "debug_mode_ops", "export", "static_runtime", "_test", "quantized",
    "_quantized", "quantization", "onednn", "mkldnn", "mkldnn_prepacked", "mkl", "sparse",
    "_native", "prepacked", "xnnpack", "fbgemm",
}  # fmt: skip
"""Namespaces of torch whose ops are no functions of dense tensors, or trust what they get."""


def _check_op(call: Call, fulls: Sequence[Full]) -> None:
    """Refuses ops that no program has: they write, read files, or send to other processes."""
    op = call.op
    schema = schema_of(op)
    reads = not call.ins and any("str" in str(a.type) for a in schema.arguments)
    # a trace has the ops that a composite op calls; running it may never end
    composite = has_kernel(op.name(), _COMPOSITE)
    apart = rule_of(op) is None and (op.namespace in _APART or reads or composite)
    gives = schema.returns or op is CHECK
    if op in (CONSTRAIN, SAVED, SAVED_AS) or schema.is_mutable or not gives or apart:
        raise TraceError(f"{op} is no op of a program.")
    names = [a.name for a in schema.arguments]
    if len(call.args) > len(names) or any(name not in names for name, _ in call.kwargs):
        raise TraceError(f"{op} takes other arguments.", schema=schema)
    if op is DRAW and "box" in (*names[: len(call.args)][6:], *dict(call.kwargs)):
        raise TraceError(f"{op} draws a block, and lines draw the whole.")
    _check_count(call, fulls)


def _check_count(call: Call, fulls: Sequence[Full]) -> None:
    """Refuses an op that would give another number of tensors, before it makes millions."""
    lists = [r for r in schema_of(call.op).returns if str(r.type) == "List[Tensor]"]
    if not lists or len(call.ins) != 1 or not fulls[call.ins[0].index].ndim:
        return
    full = fulls[call.ins[0].index]
    values, _ = arguments(call, lambda _: None)
    names = [a.name for a in schema_of(call.op).arguments]
    sizes: dict[str, Any] = dict(zip(names[: len(values)], values, strict=True))
    dim = sizes.get("dim", 0)
    size = full.shape[dim] if isinstance(dim, int) and -full.ndim <= dim < full.ndim else 0
    match packet_name(call.op), sizes:
        case "unbind" | "unbind_copy", _:
            count = size
        case "split" | "split_copy" | "unsafe_split", {"split_size": int() as block} if block > 0:
            count = max(1, -(-size // block))
        case _:
            blocks = sizes.get("split_sizes", sizes.get("split_size"))
            if not is_tuple(blocks):
                return
            count = len(blocks)
    if count != len(call.outs):
        raise TraceError(f"{call.op} gives {count} tensors, not {len(call.outs)}.")


# --- types -----------------------------------------------------------------------------------


def _follows(program: Program, call: Call, fulls: Sequence[Full]) -> bool:
    """Whether the types of a line are those of a row on each axis."""
    mesh = program.mesh
    ins = tuple(program.type_of(v) for v in call.ins)
    outs = tuple(None if v is None else program.type_of(v) for v in call.outs)
    if call.op is ALIAS:  # it keeps the value in any layout
        return outs in (ins, (None,))
    first = _order(mesh, [t for t in (*ins, *outs) if t is not None])
    if first is None:
        return False
    along = [_rows(call, fulls, ins, outs, axis) for axis in mesh.axes]
    for rows in itertools.islice(itertools.product(*along), 256):
        types = lifted(call, mesh, dict(zip(mesh.axes, rows, strict=True)), fulls, first)
        if types is not None and types[0] == ins:
            pairs = zip(types[1], outs, strict=True)
            if all(out in (None, lifted_out) for lifted_out, out in pairs):
                return True
    return False


def _rows(
    call: Call,
    fulls: Sequence[Full],
    ins: Sequence[TensorType],
    outs: Sequence[TensorType | None],
    axis: str,
) -> list[Row]:
    """The rows of a call with the placements that its tensors have along an axis."""
    before = tuple(t.layout[axis] for t in ins)
    after = tuple(None if t is None else t.layout[axis] for t in outs)
    count = ins[0].mesh.axis_size(axis) if ins else next(t for t in outs if t).mesh.axis_size(axis)
    sides = [None if v is None else fulls[v.index] for v in (*call.ins, *call.outs)]
    kinds: dict[Placement, None] = dict.fromkeys(
        p for p in (*before, *after) if p is not None and not isinstance(p, (Replicate, Shard))
    )
    rows = list(rows_of(call, fulls, count))
    if call.op in (CAST, ROUNDED):  # a program casts a value where it lies, cut dims of size 1 too
        rows += [Row((p,), (p,)) for p in before if isinstance(p, Shard)]
    for row in list(rows):
        rows += variants(row, kinds, sides)
    rows += recut_rows(call, fulls, count, kinds)
    return [
        row
        for row in dict.fromkeys(rows)
        if row.ins == before and all(q in (None, p) for p, q in zip(row.outs, after, strict=True))
    ]


def _order(mesh: Mesh, types: Sequence[TensorType]) -> tuple[str, ...] | None:
    """An order of all axes in which they cut every dim; None where there is none."""
    cuts = [t.layout.cuts(d) for t in types for d in range(t.ndim)]
    before = {axis: set[str]() for axis in mesh.axes}
    for axes in cuts:
        for outer, inner in itertools.pairwise(axes):
            before[inner].add(outer)
    order: list[str] = []
    while len(order) < mesh.ndim:
        ready = [a for a in mesh.axes if a not in order and before[a] <= set(order)]
        if not ready:
            return None
        order.append(ready[0])
    return tuple(order)
