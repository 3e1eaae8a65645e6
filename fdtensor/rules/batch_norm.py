"""Batch norms: channels are independent; with given statistics every element is.

forward    `out[n, c] = (x[n, c] - mean[c]) * invstd[c] * weight[c] + bias[c]`
backward   `dbias[c] = sum_n grad[n, c], dweight[c] = sum_n grad[n, c] * xhat[n, c]`
"""

from __future__ import annotations

import torch

from fdtensor.graph import Full
from fdtensor.notation.core import P, R, S
from fdtensor.notation.each import each
from fdtensor.rules.norm import masked, never_empty

aten = torch.ops.aten

FORWARD = (
    aten.native_batch_norm.default,
    aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit.no_stats,
    aten._batch_norm_with_update_functional.default,
    aten._batch_norm_no_update.default,
    aten.cudnn_batch_norm.default,
)
BACKWARD = (
    aten.native_batch_norm_backward.default,
    aten.batch_norm_backward.default,
    aten.cudnn_batch_norm_backward.default,
)


def _trains(op, given) -> bool:
    """Whether the statistics are those of the batch."""
    if op is aten._batch_norm_no_update.default:
        return given["running_mean"] is None
    flags = [given[name] for name in ("training", "train", "update") if name in given]
    return all(flags)


def forward(op, given):
    """Cuts of channels; of other dims, with statistics that are on every rank."""
    x, *others = (t for t in given.values() if isinstance(t, Full))
    outs = len(op._schema.returns) - 1
    yield (S(1), *[S(0)] * len(others)), (S(1), *[S(0)] * outs)
    for d in range(0 if _trains(op, given) else x.ndim):
        if d != 1:
            yield (S(d), *[R] * len(others)), (S(d), *[R] * outs)


def backward(op, given):
    """The same, but that sums over the other dims are pending."""
    first, _, *others = (t for t in given.values() if isinstance(t, Full))
    mask = given.get("output_mask", (True,) * 3)
    yield (S(1), S(1), *[S(0)] * len(others)), masked(mask, (S(1), S(0), S(0)))
    for d in range(0 if _trains(op, given) else first.ndim):
        if d != 1:
            yield (S(d), S(d), *[R] * len(others)), masked(mask, (S(d), P, P))
    grad = (R, P) if next(iter(given)) == "input" else (P, R)
    yield (*grad, *[R] * len(others)), masked(mask, (P, P, P))


for _op in FORWARD:
    each(_op, local=never_empty(_op))(forward)
for _op in BACKWARD:
    each(_op, local=never_empty(_op))(backward)
