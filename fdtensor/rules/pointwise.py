"""Elementwise ops: every output element depends on the elements at its own place.

Ops with `torch.Tag.pointwise` and no rule of their own have the generic one; rules/linear.py and
rules/bilinear.py let pending sums pass, rules/monotone.py pending maxima and minima.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from fdtensor.graph import Full
from fdtensor.notation.core import rule
from fdtensor.notation.formula import formula

aten = torch.ops.aten


def overloads(names: str) -> list[torch._ops.OpOverload]:
    """The overloads of aten with these names, such as `exp` for `exp.default`, or `add.Tensor`."""
    full = [name if "." in name else f"{name}.default" for name in names.split()]
    return [operator.attrgetter(name)(aten) for name in full]


def tensors(args: tuple[Any, ...]) -> list[Full]:
    """The tensors among the arguments of an op, those of lists too, in order."""
    found = []
    for arg in args:
        if isinstance(arg, Full):
            found.append(arg)
        elif isinstance(arg, tuple):
            found += tensors(arg)
    return found


def broadcast(ins: Sequence[Full], outs: int = 1) -> Iterator[tuple[Any, Any]]:
    """`out[i, j] = f(a[i, j], b[0, j], c[j])`: a cut of a dim of the output cuts it in each."""
    if ins:
        left, right = (", ".join("*" * count) for count in (len(ins), outs))
        yield from formula(f"{left} -> {right}", *ins, linear=[])


@rule(
    "pointwise",
    *overloads("__and__.Tensor __or__.Tensor _prelu_kernel _standard_gamma_grad floor_divide"),
    *overloads("floor_divide.Scalar hardswish isin.Tensor_Scalar polar"),
)
def pointwise(*args, **kwargs):
    """`out[i] = f(a[i], b[i], ...)`"""
    yield from broadcast(tensors((*args, *kwargs.values())))


@rule(*overloads("frexp.Tensor log_sigmoid_forward"))
def pair(x):
    """`out[i], other[i] = f(x[i])`"""
    yield from broadcast([x], outs=2)
