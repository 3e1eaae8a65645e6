"""`rewritten`: a graph with some runs of calls replaced by one op that is cheaper when it is cut.

Derivatives of scans flip a tensor, scan it and flip it back: as one op, a scan from the end, a rank
needs no elements of other ranks but the totals of their blocks. That of a cross entropy sums, over
the classes, what is not 0 for one of them: as one op it is known without a sum. That of a `silu` is
eight ops where it could be derived again, as always under `torch.func.grad`, and else one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fdtensor.layouts.torch_private import packet_name
from fdtensor.ops.graph import Call, Full, Graph, Var, pruned
from fdtensor.ops.own_ops import own_op
from fdtensor.ops.select import SELECT

__all__ = ["BACKWARD_SCANS", "CROSS_ENTROPY_BACKWARD", "rewritten"]

aten = torch.ops.aten


def _from_end_of(op: Any) -> Any:
    """The op that a scan is when it begins at the end of the dim."""
    return own_op(
        f"{packet_name(op)}_from_end(Tensor x, int dim) -> Tensor",
        lambda x, dim: op(x.flip(dim), dim).flip(dim) if x.ndim else op(x, dim),
    )


BACKWARD_SCANS: dict[Any, Any] = {
    op: _from_end_of(op) for op in (aten.cumsum.default, aten.logcumsumexp.default)
}
"""By the scan, the scan from the end of the dim: `out[i, j] = sum_(k >= j) x[i, k]`."""


def _cross_entropy_backward(grad: torch.Tensor, out: torch.Tensor, *rest: Any) -> torch.Tensor:
    """The gradient of what `log_softmax` was given, whose result is `out`, by the loss of that."""
    *args, dtype = rest
    op = aten.nll_loss_backward if out.ndim < 3 else aten.nll_loss2d_backward
    grad = op.default(grad, out, *args)
    # in place: each row is summed before it is written, and a program announces one tensor
    return aten._log_softmax_backward_data.out(grad, out, 1, dtype, out=grad)


CROSS_ENTROPY_BACKWARD = own_op(
    "cross_entropy_backward(Tensor grad_output, Tensor out, Tensor target, Tensor? weight, "
    "int reduction, int ignore_index, Tensor total_weight, ScalarType dtype) -> Tensor",
    _cross_entropy_backward,
)
"""The backward of `nll_loss` along dim 1, and of `log_softmax` before it."""


def rewritten(graph: Graph) -> Graph:
    """The graph with `flip(scan(flip(x)))` as a scan from the end, cast counts as float sums.

    And with both parts of the backward of a cross entropy as one, and so that of `silu`; and where
    a branch takes what a branch of the same predicate has taken, without the other one of that.
    """
    makers = {v: call for call in graph.calls for v in call.outs if v is not None}
    types = graph.types
    calls = [
        _from_end(call, makers)
        or _count(call, makers, types)
        or _cross_entropy(call, makers, types)
        or _silu(call, makers, types)
        or _selected(call, makers)
        or call
        for call in graph.calls
    ]
    if all(a is b for a, b in zip(calls, graph.calls, strict=True)):
        return graph
    return pruned(Graph(graph.inputs, graph.constants, tuple(calls), graph.outs, graph.types))


def _from_end(call: Call, makers: dict[Var, Call]) -> Call | None:
    """The scan from the end that a call completes, or None."""
    scan = _scan_of(call, makers)
    first = None if scan is None else makers.get(scan.ins[0])
    if scan is None or first is None or first.op is not aten.flip.default:
        return None
    if first.args[1:] != call.args[1:] or dict(scan.kwargs).get("dtype") is not None:
        return None
    (dim,) = call.args[1]
    return Call(BACKWARD_SCANS[scan.op], (first.args[0], dim), (), call.outs, call.mark)


def _count(call: Call, makers: dict[Var, Call], types: Sequence[Full]) -> Call | None:
    """The sum of bools as floats, in place of its cast, where floats count exactly; else None.

    The terms of an integer that may wrap around have to be reduced before the cast.
    """
    count = makers.get(call.args[0]) if call.op is aten._to_copy.default else None
    if count is None or count.op not in _SUMS or count.kwargs or len(call.kwargs) != 1:
        return None
    x, out = (types[v.index] for v in (count.ins[0], call.ins[0]))
    name, dtype = call.kwargs[0]
    exact = dtype is torch.float64 or (dtype is torch.float32 and x.numel <= EXACT * out.numel)
    if name != "dtype" or x.dtype is not torch.bool or not exact:
        return None
    return Call(count.op, count.args, (("dtype", dtype),), call.outs, call.mark)


def _cross_entropy(call: Call, makers: dict[Var, Call], types: Sequence[Full]) -> Call | None:
    """The backward of a cross entropy that a call completes, or None."""
    if call.op is not aten._log_softmax_backward_data.default:
        return None
    grad, out, dim, dtype = call.args
    first = makers.get(grad)
    if first is None or first.op not in _LIKELIHOODS or dim % types[out.index].ndim != 1:
        return None
    ct, x, target, weight, reduction, ignored, total = first.args
    if x != out or types[out.index].dtype is not dtype:
        return None
    args = ct, out, target, weight, reduction, ignored, total, dtype
    return Call(CROSS_ENTROPY_BACKWARD, args, (), call.outs, call.mark)


def _selected(call: Call, makers: dict[Var, Call]) -> Call | None:
    """The choice by a predicate among what no earlier choice by it can give otherwise, or None."""
    if call.op is not SELECT:
        return None
    which, *branches = call.args
    for i, v in enumerate(branches):
        while (maker := makers.get(v)) and maker.op is SELECT and maker.args[0] == which:
            v = branches[i] = maker.args[1 + i]
    args = which, *branches
    return None if args == call.args else Call(SELECT, args, (), call.outs, call.mark)


def _silu(call: Call, makers: dict[Var, Call], types: Sequence[Full]) -> Call | None:
    """The backward of `silu` that a call completes: `(g * s) * (x * (1 - s) + 1)`, or None."""

    def operands(v: Any, op: Any) -> tuple[Any, Any]:
        maker = makers.get(v) if isinstance(v, Var) else None
        fits = maker is not None and maker.op is op and not maker.kwargs and len(maker.args) == 2
        return maker.args if fits else (None, None)  # type: ignore[union-attr, return-value]

    if call.op is not aten.mul.Tensor:
        return None
    ct, s = operands(call.args[0], aten.mul.Tensor)
    product, one = operands(call.args[1], aten.add.Scalar)
    x, rest = operands(product, aten.mul.Tensor)
    ones, subtracted = operands(rest, aten.sub.Tensor)
    full, filled = operands(ones, aten.fill.Scalar)
    like, sigmoid = (makers.get(v) if isinstance(v, Var) else None for v in (full, s))
    if like is None or like.op is not aten.empty_like.default or not one == filled == 1:
        return None
    if sigmoid is None or sigmoid.op is not aten.sigmoid.default or sigmoid.args != (x,):
        return None
    if subtracted != s or not isinstance(ct, Var) or types[ct.index] != types[x.index]:
        return None
    return Call(aten.silu_backward.default, (ct, x), (), call.outs, call.mark)


_LIKELIHOODS = {aten.nll_loss_backward.default, aten.nll_loss2d_backward.default}

_SUMS = {aten.sum.default, aten.sum.dim_IntList}

EXACT = 1 << 24
"""The number of ones that float32 adds up without rounding."""


def _scan_of(call: Call, makers: dict[Var, Call]) -> Call | None:
    """The scan whose result a call flips along its dim."""
    if call.op is not aten.flip.default:
        return None
    scan = makers.get(call.args[0])
    known = scan is not None and scan.op in BACKWARD_SCANS
    return scan if known and call.args[1] == (scan.args[1],) else None  # type: ignore[union-attr]
