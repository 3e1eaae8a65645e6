"""Elementwise ops: every output element depends on the elements at its own index.

Ops with `torch.Tag.pointwise` and no rule of their own have the generic one; rules/linear.py and
rules/bilinear.py let pending sums pass, rules/monotone.py pending maxima and minima.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fdtensor.ops.graph import Full
from fdtensor.ops.notation.core import rule
from fdtensor.ops.notation.formula import formula
from fdtensor.ops.notation.ops import on, overloads, tensors

__all__ = ["broadcast"]


def broadcast(ins: Sequence[Full], outs: int = 1) -> Iterator[tuple[Any, Any]]:
    """`out[i, j] = f(a[i, j], b[0, j], c[j])`: a cut of a dim of the output cuts it in each."""
    if ins:
        left, right = (", ".join("*" * count) for count in (len(ins), outs))
        yield from formula(f"{left} -> {right}", *ins, linear=[])


OTHERS = """
__and__.Tensor __or__.Tensor _prelu_kernel _standard_gamma_grad floor_divide floor_divide.Scalar
hardswish isin.Tensor_Scalar
"""
"""Elementwise ops without the tag."""


@rule("pointwise", *overloads(OTHERS))
def pointwise(*args, **kwargs):
    """`out[i] = f(a[i], b[i], ...)`"""
    yield from broadcast(tensors((*args, *kwargs.values())))


@on("frexp.Tensor log_sigmoid_forward")
def pair(x):
    """`out[i], other[i] = f(x[i])`"""
    yield from broadcast([x], outs=2)
