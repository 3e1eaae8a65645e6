"""Products of groups of rows, each with a matrix of its own: what layers of experts are made of.

Torch's `_grouped_mm` leaves rows without a group uninitialized, and has fakes for some dtypes
only. Here such rows are zero, and groups are given by where they start and end, so that they
may be cut: a rank that holds some of the groups, or of the rows, computes just those. Operands may
have a first dim more, of products that have nothing to do with each other: what `vmap` makes.
"""

from __future__ import annotations

from typing import Any

import torch

from fdtensor.layouts import torch_private
from fdtensor.ops.notation.core import P, R, S, rule
from fdtensor.ops.own_ops import own_op
from fdtensor.ops.transparent import recorded_as

Tensor = torch.Tensor


def _product(x: Tensor, w: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
    out = x.new_zeros(*x.shape[:-1], w.shape[-1])
    if x.ndim == 3:
        for of_one, *one in zip(out, x, w, starts, ends, strict=True):
            of_one.copy_(_product(*one))
        return out
    for matrix, start, end in zip(w, starts.tolist(), ends.tolist(), strict=True):
        if start < end:
            torch.mm(x[start:end], matrix, out=out[start:end])
    return out


def _outer(x: Tensor, y: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
    out = x.new_zeros(*starts.shape, x.shape[-1], y.shape[-1])
    if x.ndim == 3:
        for of_one, *one in zip(out, x, y, starts, ends, strict=True):
            of_one.copy_(_outer(*one))
        return out
    for matrix, start, end in zip(out, starts.tolist(), ends.tolist(), strict=True):
        if start < end:
            torch.mm(x[start:end].T, y[start:end], out=matrix)
    return out


_OPERANDS = "Tensor x, Tensor y, Tensor starts, Tensor ends"

GROUPED_MM = own_op(
    f"grouped_mm({_OPERANDS}) -> Tensor",
    _product,
    lambda x, w, *_: x.new_empty(*x.shape[:-1], w.shape[-1]),
    lambda *args: _batched(GROUPED_MM, *args),
)
"""`out[s, j] = sum_k x[s, k] * w[g, k, j]` for the rows `s` of group `g`, 0 for those of none."""

GROUPED_OUTER = own_op(
    f"grouped_outer({_OPERANDS}) -> Tensor",
    _outer,
    lambda x, y, starts, _: x.new_empty(*starts.shape, x.shape[-1], y.shape[-1]),
    lambda *args: _batched(GROUPED_OUTER, *args),
)
"""`out[g, k, j] = sum_s x[s, k] * y[s, j]` over the rows `s` of group `g`."""


def _batched(
    op: Any, info: Any, in_dims: tuple[int | None, ...], *operands: Tensor
) -> tuple[Tensor, int]:
    """The op on operands of which some have a batch: all have one then, the first of their dims."""
    batched = [
        t.expand(info.batch_size, *t.shape) if d is None else t.movedim(d, 0)
        for t, d in zip(operands, in_dims, strict=True)
    ]
    if batched[0].ndim == 3:
        return op(*batched), 0
    several = batched[0].shape[:2]
    return op(*[t.flatten(0, 1) for t in batched]).unflatten(0, several), 0


def _of_rows(op: Any) -> Any:
    """The op on a block of rows, in which groups start and end elsewhere."""

    def local(at: Any, x: Tensor, y: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
        first, count = at.ins[0].start[-2], at.ins[0].shape[-2]
        if count != at.ins[0].full[-2]:
            starts, ends = ((t - first).clamp(0, count) for t in (starts, ends))
        return op(x, y, starts, ends)

    return local


@rule(GROUPED_MM, local=_of_rows(GROUPED_MM), contiguous=True)
def grouped_mm_rows(x, w, starts, ends):
    """`out[s, j] = sum_k x[s, k] * w[g, k, j]` for the rows `s` of group `g`"""
    d = x.ndim - 2
    yield (S(d), R, R, R), S(d)  # s
    yield (R, S(d + 2), R, R), S(d + 1)  # j
    yield (S(d + 1), S(d + 1), R, R), P  # k
    yield (R, S(d), S(d), S(d)), P  # g: rows of other groups are zero
    yield (P, R, R, R), P
    yield (R, P, R, R), P
    if d:
        yield (S(0), S(0), S(0), S(0)), S(0)


@rule(GROUPED_OUTER, local=_of_rows(GROUPED_OUTER), contiguous=True)
def grouped_outer_rows(x, y, starts, ends):
    """`out[g, k, j] = sum_s x[s, k] * y[s, j]` over the rows `s` of group `g`"""
    d = x.ndim - 2
    yield (S(d), S(d), R, R), P  # s
    yield (S(d + 1), R, R, R), S(d + 1)  # k
    yield (R, S(d + 1), R, R), S(d + 2)  # j
    yield (R, R, S(d), S(d)), S(d)  # g
    yield (P, R, R, R), P
    yield (R, P, R, R), P
    if d:
        yield (S(0), S(0), S(0), S(0)), S(0)


class _Grouped(torch.autograd.Function):
    """One of the two ops, whose derivatives are made of both."""

    generate_vmap_rule = True

    @staticmethod
    def forward(op: Any, x: Tensor, y: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
        return op(x, y, starts, ends)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.op, *operands = inputs
        ctx.save_for_backward(*operands)
        ctx.save_for_forward(*operands)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        x, y, *groups = ctx.saved_tensors
        if ctx.op is GROUPED_MM:
            of_x = _Grouped.apply(GROUPED_MM, grad, y.mT, *groups)
            of_y = _Grouped.apply(GROUPED_OUTER, x, grad, *groups)
        else:
            of_x = _Grouped.apply(GROUPED_MM, y, grad.mT, *groups)
            of_y = _Grouped.apply(GROUPED_MM, x, grad, *groups)
        return None, of_x, of_y, None, None

    @staticmethod
    def jvp(ctx: Any, _op: None, dx: Any, dy: Any, *_: None) -> Any:  # type: ignore[override]
        x, y, *groups = ctx.saved_tensors
        return _Grouped.apply(ctx.op, dx, y, *groups) + _Grouped.apply(ctx.op, x, dy, *groups)


@recorded_as(
    torch_private.grouped_mm,
    torch.ops.aten._grouped_mm,
    torch.ops.aten._grouped_mm.default,
    "transformers::grouped_mm_fallback",
)
def grouped_mm(
    x: Tensor,
    w: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The products of groups that end at `offs`: of rows, of columns, or of the summed dim."""
    if offs is None:
        out = torch.bmm(x, w)
    else:
        groups = torch.cat([offs.new_zeros(1), offs[:-1]]), offs
        match x.ndim, w.ndim:
            case 2, 3:
                out = _Grouped.apply(GROUPED_MM, x, w, *groups)
            case 3, 2:
                out = _Grouped.apply(GROUPED_MM, w.mT, x.mT, *groups).mT  # type: ignore[union-attr]
            case _:
                out = _Grouped.apply(GROUPED_OUTER, x.mT, w, *groups)
    out = out if bias is None else out + bias
    return out if out_dtype is None else out.to(out_dtype)
