"""`reusing`: lines that write their result into the memory of an operand which nobody reads again.

An elementwise op then touches one tensor less, and allocates none. Only memory is taken that an op
of these lines has allocated, or that was given with it, of which nothing else is a view, and which
no collective has sent.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch

from fdtensor.layouts.torch_private import has_schema, only_one_holds
from fdtensor.ops.graph import Var
from fdtensor.runtime.lines import LOOPING, Line, LocalProgram, roots, values_in

__all__ = ["IN_PLACE", "reusing", "taken_over"]

aten = torch.ops.aten

IN_PLACE = {
    getattr(getattr(aten, name), overload): getattr(getattr(aten, f"{name}_"), overload)
    for name, overloads in {
        **dict.fromkeys(("add", "sub", "mul", "div"), ("Tensor", "Scalar")),
        **dict.fromkeys(("exp", "log", "sqrt", "rsqrt", "reciprocal", "neg", "abs"), ("default",)),
        **dict.fromkeys(("tanh", "sigmoid", "relu", "square"), ("default",)),
        **dict.fromkeys(("addcmul", "addcdiv"), ("default",)),
        "lerp": ("Scalar",),
        "pow": ("Tensor_Scalar",),
        "masked_fill": ("Scalar",),
    }.items()
    for overload in overloads
    if hasattr(getattr(aten, f"{name}_"), overload)
}
"""Elementwise ops, whose results are tensors of their own, with the same in place."""

_ALLOCATING = {*IN_PLACE, aten.mm.default, aten.bmm.default, aten.addmm.default}
"""Ops whose result is never in the memory of an operand, nor shared by its own elements."""


def taken_over(values: list[Any], numbers: frozenset[int]) -> bool:
    """Whether nobody but a list holds these of its tensors, nor their memory."""
    return all(_taken_over(values, i) for i in numbers)


def _taken_over(values: list[Any], i: int) -> bool:
    if sys.getrefcount(values[i]) > 2:  # by the list, and by what asks
        return False
    tensor = values[i]
    whole = tensor.untyped_storage().nbytes() == tensor.nbytes and tensor.is_contiguous()
    plain = whole and not (tensor.requires_grad or tensor.is_inference())
    return plain and type(tensor) is torch.Tensor and only_one_holds(tensor)


def reusing(local: LocalProgram, given: frozenset[int] = frozenset()) -> Sequence[Line]:
    """The lines of a rank, some of them in place: each gives the bits that it gave before.

    The memory of inputs may be taken whose numbers are `given`.
    """
    root = roots(local.lines, local.inputs)
    owned = _own(local, root, {local.inputs[i] for i in given})
    last = _last_reads(local, root)
    lines = []
    for i, line in enumerate(local.lines):
        target = _target(line, local, root)
        if target in owned and last[target] == i and root[target] == target:
            line = attrs.evolve(line, op=IN_PLACE[line.op])
        lines.append(line)
    return lines


def _target(line: Line, local: LocalProgram, root: Mapping[Var, Var]) -> Var | None:
    """The operand whose memory the result of a line fits into; None where there is none.

    Nor where another operand is a view of it, whose elements would be written before they are read.
    """
    if line.op not in IN_PLACE or line.eqn in local.conditions:
        return None
    first, (out,) = line.args[0], line.outs
    others = values_in((line.args[1:], tuple(v for _, v in line.kwargs)))
    if not isinstance(first, Var) or out is None:
        return None
    if root.get(first, first) in {root.get(v, v) for v in others}:
        return None
    full, own = local.fulls.get(first), local.fulls.get(out)
    return first if full is not None and full == own else None


def _own(local: LocalProgram, root: dict[Var, Var], given: set[Var]) -> set[Var]:
    """The values in memory that is the program's own, and that nothing but an op of torch reads."""
    owned = {*given}
    if any(isinstance(line.op, LOOPING) for line in local.lines):  # whose lines run again
        return set()
    for line in local.lines:
        if line.op in _ALLOCATING and line.eqn not in local.conditions:
            owned.update(v for v in line.outs if v is not None)
    for line in local.lines:
        if not has_schema(line.op) or line.op.namespace != "aten":
            owned.difference_update(root[v] for v in values_in(line.args) if v in root)
    return owned


def _last_reads(local: LocalProgram, root: dict[Var, Var]) -> dict[Var, int]:
    """The last line that reads each memory, by its root: the end for what the program gives."""
    last: dict[Var, int] = {}
    for i, line in enumerate(local.lines):
        for v in _read(line):
            last[root[v]] = i
    last.update((root[v], len(local.lines)) for v in local.outs)
    return last


def _read(line: Line) -> Iterator[Var]:
    yield from values_in((*line.args, *(v for _, v in line.kwargs)))
