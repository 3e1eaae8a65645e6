"""A program as JSON: the tables of a plan, and its lines, which name ops and values by number.

    {"op": "aten::sum.dim_IntList", "args": [{"v": 0}, [1]], "kwargs": [], "outs": [2], "note": ""}
    {"steps": [...], "ins": [2], "outs": [3]}

Arguments are plain values, and objects of one key for what JSON lacks: `v` a value of the program,
`dtype`, `device`, `layout`, `memory_format`, `complex`, and `float` for nan and infinities.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Sequence
from math import isfinite
from typing import TYPE_CHECKING

import torch

from fdtensor.layouts.dtypes import dtype_name, parse_dtype
from fdtensor.layouts.errors import TraceError
from fdtensor.layouts.json_fields import Malformed, items, real, record, whole, word
from fdtensor.layouts.kinds import is_dict, is_list, is_tuple
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.ops.graph import Var, op_named
from fdtensor.plans.collectives import Step
from fdtensor.plans.cost import CostModel
from fdtensor.plans.json import (
    VERSION,
    Tables,
    cost_of,
    encoded_cost,
    encoded_step,
    entry,
    step_of,
    tables_of,
    versioned,
)
from fdtensor.programs.eqn import Eqn, Together

if TYPE_CHECKING:
    from fdtensor.programs.program import Program

__all__ = ["MOST_CONSTANT_BYTES", "decode", "encode"]

MOST_CONSTANT_BYTES = 1 << 20
"""The most bytes of closed-over tensors, together, that are written as values."""

DEEPEST = 8
"""How deep lists of arguments may be nested."""

Vars = tuple[Var, ...]
Constants = tuple[tuple[Var, torch.Tensor], ...]
Fields = tuple[str, Mesh, Vars, Constants, tuple[Eqn, ...], Vars, tuple[TensorType, ...], CostModel]
"""The fields of a program that a text has, in their order."""


def encode(program: Program) -> dict[str, object]:
    """A program as plain values; raises `TraceError` for arguments that cannot be written."""
    tables = Tables()
    values = [tables.index(type) for type in program.types]
    lines = [_encoded_line(eqn, tables) for eqn in program.eqns]
    size = sum(tensor.nbytes for _, tensor in program.constants)
    if size > MOST_CONSTANT_BYTES:
        raise TraceError(
            f"{program.name} closes over {size} bytes of tensors, too many to write into a text.",
            largest=max(tuple(t.shape) for _, t in program.constants),
            most=MOST_CONSTANT_BYTES,
            hint="Pass them as arguments, or pickle the program.",
        )
    return {
        "fdtensor": VERSION,
        "program": program.name,
        "mesh": tables.mesh_index(program.mesh),
        **tables.encoded(),
        "values": values,
        "inputs": [v.index for v in program.inputs],
        "constants": [_encoded_constant(v, tensor) for v, tensor in program.constants],
        "lines": lines,
        "outs": [v.index for v in program.outs],
        "cost": encoded_cost(program.cost),
    }


def decode(tree: object) -> Fields:
    """The fields of the program that `encode` wrote, in their order; raises `Malformed`."""
    fields = ("mesh", "meshes", "types", "values", "inputs", "constants", "lines", "outs", "cost")
    _, name, mesh, meshes, types, values, inputs, constants, lines, outs, cost = versioned(
        tree, "program", *fields
    )
    known, table = tables_of(meshes, types)
    typed = [entry(table, t, f"values[{i}]") for i, t in enumerate(items(values, "values"))]
    return (
        word(name, "program"),
        entry(known, mesh, "mesh"),
        _vars(inputs, len(typed), "inputs"),
        tuple(
            [
                _constant(c, typed, f"constants[{i}]")
                for i, c in enumerate(items(constants, "constants"))
            ]
        ),
        tuple(
            [
                _line(line, table, len(typed), f"lines[{i}]")
                for i, line in enumerate(items(lines, "lines"))
            ]
        ),
        _vars(outs, len(typed), "outs"),
        tuple(typed),
        cost_of(cost),
    )


# --- lines -----------------------------------------------------------------------------------


def _encoded_line(eqn: Eqn, tables: Tables) -> dict[str, object]:
    outs = [None if v is None else v.index for v in eqn.outs]
    if eqn.steps:
        steps = [encoded_step(step, tables) for step in eqn.steps]
        return {"steps": steps, "ins": [v.index for v in eqn.ins], "outs": outs}
    assert not isinstance(eqn.op, (Step, Together))
    return {
        "op": eqn.op.name(),
        "args": [_encoded(a) for a in eqn.args],
        "kwargs": [[name, _encoded(a)] for name, a in eqn.kwargs],
        "outs": outs,
        "note": eqn.note,
    }


def _line(tree: object, types: Sequence[TensorType], count: int, where: str) -> Eqn:
    if is_dict(tree) and "steps" in tree:
        listed, ins, outs = record(tree, where, "steps", "ins", "outs")
        steps = tuple(
            [
                step_of(s, types, f"{where}.steps[{i}]")
                for i, s in enumerate(items(listed, f"{where}.steps"))
            ]
        )
        if not steps:
            raise Malformed(f"{where} has no step")
        op = steps[0] if len(steps) == 1 else Together(steps)
        taken, results = _vars(ins, count, f"{where}.ins"), _vars(outs, count, f"{where}.outs")
        return Eqn(op, taken, (), results)
    op, args, kwargs, outs, note = record(tree, where, "op", "args", "kwargs", "outs", "note")
    named = [items(pair, f"{where}.kwargs") for pair in items(kwargs, f"{where}.kwargs")]
    if any(len(pair) != 2 for pair in named):
        raise Malformed(f"{where}.kwargs has an entry that is no pair")
    results = [
        None if v is None else _var(v, count, f"{where}.outs") for v in items(outs, f"{where}.outs")
    ]
    return Eqn(
        op_named(word(op, f"{where}.op")),
        tuple([_argument(a, count, f"{where}.args") for a in items(args, f"{where}.args")]),
        tuple(
            [(word(n, f"{where}.kwargs"), _argument(a, count, f"{where}.{n}")) for n, a in named]
        ),
        tuple(results),
        word(note, f"{where}.note"),
    )


def _vars(value: object, count: int, where: str) -> tuple[Var, ...]:
    return tuple([_var(v, count, where) for v in items(value, where)])


def _var(value: object, count: int, where: str) -> Var:
    index = whole(value, where)
    if not 0 <= index < count:
        raise Malformed(f"{where} names value {index}, of {count}")
    return Var(index)


# --- arguments -------------------------------------------------------------------------------

_FORMATS = {
    str(f).removeprefix("torch."): f
    for f in (
        torch.contiguous_format,
        torch.preserve_format,
        torch.channels_last,
        torch.channels_last_3d,
    )
}


def _encoded(value: object) -> object:
    """An argument of an op as JSON has it."""
    if is_tuple(value):
        return [_encoded(entry) for entry in value]
    match value:
        case None | bool() | str() | int():
            return value
        case float():
            return value if isfinite(value) else {"float": repr(value)}
        case Var():
            return {"v": value.index}
        case complex():
            return {"complex": [_encoded(value.real), _encoded(value.imag)]}
        case torch.dtype():
            return {"dtype": dtype_name(value)}
        case torch.device():
            return {"device": str(value)}
        case torch.memory_format():
            return {"memory_format": str(value).removeprefix("torch.")}
        case torch.layout() if value is torch.strided:
            return {"layout": "strided"}
        case _:
            raise TraceError(
                f"{value!r} cannot be written into a text.",
                kind=type(value).__name__,
                hint="Arguments of ops are numbers, texts, dtypes, devices and lists of them.",
            )


def _argument(value: object, count: int, where: str, depth: int = 0) -> object:
    """The argument that `_encoded` wrote."""
    if is_list(value) and depth < DEEPEST:
        return tuple([_argument(entry, count, where, depth + 1) for entry in value])
    if is_dict(value):
        return _marked(value, count, where)
    match value:
        case None | bool():
            return value
        case int() if abs(value) < 1 << 64:
            return value
        case float():
            return real(value, where)
        case str():
            return word(value, where)
        case _:
            raise Malformed(f"{where} has an argument of an unknown kind")


def _marked(value: dict[str, object], count: int, where: str) -> object:
    """The argument that an object of one key stands for."""
    match value:
        case {"v": index, **more} if not more:
            return _var(index, count, where)
        case {"float": str() as text, **more} if not more and text in ("inf", "-inf", "nan"):
            return float(text)
        case {"complex": parts, **more} if not more and is_list(parts) and len(parts) == 2:
            real_part, imag = [_argument(part, count, where, DEEPEST) for part in parts]
            if isinstance(real_part, float) and isinstance(imag, float):
                return complex(real_part, imag)
        case {"dtype": str() as text, **more} if not more:
            return parse_dtype(text)
        case {"device": str() as text, **more} if not more:
            return _device(text, where)
        case {"memory_format": str() as text, **more} if not more and text in _FORMATS:
            return _FORMATS[text]
        case {"layout": "strided", **more} if not more:
            return torch.strided
        case _:
            pass
    raise Malformed(f"{where} has an argument of an unknown kind")


def _device(text: str, where: str) -> torch.device:
    if not re.fullmatch(r"[a-z]{1,20}(:\d{1,3})?", text, re.ASCII):
        raise Malformed(f"{where} names no device")
    try:
        return torch.device(text)
    except RuntimeError as error:
        raise Malformed(f"{where} names no device that torch knows") from error


# --- constants -------------------------------------------------------------------------------


def _encoded_constant(v: Var, tensor: torch.Tensor) -> dict[str, object]:
    dense = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    data = dense.reshape(-1).view(torch.uint8).numpy().tobytes()
    return {"v": v.index, "device": str(tensor.device), "data": base64.b64encode(data).decode()}


def _constant(tree: object, types: Sequence[TensorType], where: str) -> tuple[Var, torch.Tensor]:
    index, device, text = record(tree, where, "v", "device", "data")
    v = _var(index, len(types), where)
    type = types[v.index]
    try:
        data = base64.b64decode(word(text, f"{where}.data"), validate=True)
    except (binascii.Error, ValueError) as error:
        raise Malformed(f"{where}.data is no base64") from error
    if len(data) != type.nbytes or type.nbytes > MOST_CONSTANT_BYTES:
        raise Malformed(f"{where} has {len(data)} bytes, and its type {type.nbytes}")
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0).byte()
    if type.dtype == torch.bool and (flat > 1).any():
        raise Malformed(f"{where} has bools that are neither")
    tensor = flat.clone().view(type.dtype).reshape(type.shape)
    try:
        return v, tensor.to(_device(word(device, f"{where}.device"), where))
    except (RuntimeError, AssertionError) as error:
        raise Malformed(f"{where} is on a device that is not here: {device}") from error
