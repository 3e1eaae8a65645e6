"""Ops along one dim: a cut of any other dim leaves every slice along it whole.

_softmax                 `out[i, j] = exp(x[i, j]) / sum_k exp(x[i, k])`
_safe_softmax            the same, 0 where all of `x[i]` is `-inf`
_log_softmax             `out[i, j] = x[i, j] - log sum_k exp(x[i, k])`
_softmax_backward_data   `dx[i, j] = out[i, j] * (grad[i, j] - sum_k grad[i, k] * out[i, k])`
_log_softmax_backward..  `dx[i, j] = grad[i, j] - exp(out[i, j]) * sum_k grad[i, k]`
cumsum, cumprod          `out[i, j] = sum_(k <= j) x[i, k]`, or their product
logcumsumexp             `out[i, j] = log sum_(k <= j) exp(x[i, k])`
cummax, cummin           `values[i, j] = max_(k <= j) x[i, k]`, and where it is
sort                     `values[i, :] = sorted(x[i, :])`, and where they were
topk                     `values[i, :k] = sorted(x[i, :])[:k]`, and where they were
"""

from __future__ import annotations

import torch

from fdtensor.layouts.torch_private import schema_of
from fdtensor.ops.graph import Full
from fdtensor.ops.notation.core import P, R, S, rule
from fdtensor.ops.notation.dtypes import linear_in
from fdtensor.ops.notation.each import each
from fdtensor.ops.notation.ops import overloads

aten = torch.ops.aten

_LINEAR = {
    aten.cumsum.default: (P,),
    aten._softmax_backward_data.default: (P, R),
    aten._log_softmax_backward_data.default: (P, R),
}


ALONG = """
_softmax _safe_softmax _log_softmax _softmax_backward_data _log_softmax_backward_data cumsum cumprod
logcumsumexp cummax cummin sort sort.stable topk
"""


@each(*overloads(ALONG))
def along(op, named):
    """Any cut of another dim, the same for all tensors."""
    tensors = [t for t in named.values() if isinstance(t, Full)]
    x, outs = tensors[0], len(schema_of(op).returns)
    for d in range(x.ndim):
        if d != named["dim"] % x.ndim:
            yield (S(d),) * len(tensors), (S(d),) * outs
    if op in _LINEAR and linear_in(x, named.get("dtype")):
        yield _LINEAR[op], P


@rule(aten.renorm.default)
def renorm(x, p, dim, maxnorm):
    """`out[:, i] = x[:, i] * min(1, maxnorm / norm(x[:, i]))`"""
    if x.ndim:
        yield (S(dim % x.ndim),), S(dim % x.ndim)
