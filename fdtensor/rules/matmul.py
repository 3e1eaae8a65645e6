"""Products of matrices: each index of the sum may be cut, and then a sum is pending."""

from __future__ import annotations

import torch

from fdtensor.graph import Full
from fdtensor.placement import Placement
from fdtensor.rules.core import P, R, S, rule

aten = torch.ops.aten


def beside(bias: Full, ndim: int) -> list[Placement]:
    """The cut of `bias` for a cut of each dim of an output of `ndim` dims that it is added to."""
    at = [d - (ndim - bias.ndim) for d in range(ndim)]
    return [S(i) if i >= 0 and bias.shape[i] != 1 else R for i in at]


@rule(aten.mm.default, aten._int_mm.default)
def mm(a, b):
    """`c[i, j] = sum_k a[i, k] * b[k, j]`"""
    yield (S(0), R), S(0)  # i: rows of a are independent
    yield (R, S(1)), S(1)  # j: columns of b are independent
    yield (S(1), S(0)), P  # k: each rank has its own k: a sum is pending
    yield (P, R), P  # linear in a
    yield (R, P), P  # linear in b


@rule(aten.bmm.default)
def bmm(a, b):
    """`c[n, i, j] = sum_k a[n, i, k] * b[n, k, j]`"""
    yield (S(0), S(0)), S(0)
    yield (S(1), R), S(1)
    yield (R, S(2)), S(2)
    yield (S(2), S(1)), P
    yield (P, R), P
    yield (R, P), P


@rule(aten.addmm.default)
def addmm(bias, a, b, *, beta=1, alpha=1):
    """`c[i, j] = beta * bias[i, j] + alpha * sum_k a[i, k] * b[k, j]`"""
    yield from addmm_activation(bias, a, b)
    yield (P, S(1), S(0)), P
    yield (P, P, R), P
    yield (P, R, P), P


@rule(aten._addmm_activation.default)
def addmm_activation(bias, a, b, *, beta=1, alpha=1, use_gelu=False):
    """`c[i, j] = f(beta * bias[i, j] + alpha * sum_k a[i, k] * b[k, j])`"""
    rows, columns = beside(bias, 2)
    yield (rows, S(0), R), S(0)
    yield (columns, R, S(1)), S(1)


@rule(aten.baddbmm.default)
def baddbmm(bias, a, b, *, beta=1, alpha=1):
    """`c[n, i, j] = beta * bias[n, i, j] + alpha * sum_k a[n, i, k] * b[n, k, j]`"""
    batch, rows, columns = beside(bias, 3)
    yield (batch, S(0), S(0)), S(0)
    yield (rows, S(1), R), S(1)
    yield (columns, R, S(2)), S(2)
    yield (P, S(2), S(1)), P
    yield (P, P, R), P
    yield (P, R, P), P


@rule(aten.addbmm.default)
def addbmm(bias, a, b, *, beta=1, alpha=1):
    """`c[i, j] = beta * bias[i, j] + alpha * sum_{n, k} a[n, i, k] * b[n, k, j]`"""
    rows, columns = beside(bias, 2)
    yield (rows, S(1), R), S(0)
    yield (columns, R, S(2)), S(1)
    yield (P, S(0), S(0)), P
    yield (P, S(2), S(1)), P
    yield (P, P, R), P
    yield (P, R, P), P


def _addmv(at, bias, a, b, *, beta=1, alpha=1):
    if 0 in a.shape:  # the kernel would give the shape of a bias of one element
        return (bias * beta).expand(at.outs[0].shape).clone()
    return aten.addmv.default(bias, a, b, beta=beta, alpha=alpha)


@rule(aten.addmv.default, local=_addmv)
def addmv(bias, a, b, *, beta=1, alpha=1):
    """`c[i] = beta * bias[i] + alpha * sum_k a[i, k] * b[k]`"""
    (rows,) = beside(bias, 1)
    yield (rows, S(0), R), S(0)
    yield (P, S(1), S(0)), P
    yield (P, P, R), P
    yield (P, R, P), P


@rule(aten.addr.default)
def addr(bias, a, b, *, beta=1, alpha=1):
    """`c[i, j] = beta * bias[i, j] + alpha * a[i] * b[j]`"""
    rows, columns = beside(bias, 2)
    yield (rows, S(0), R), S(0)
    yield (columns, R, S(0)), S(1)
    yield (P, P, R), P
    yield (P, R, P), P


@rule(aten.outer.default, aten.ger.default)
def outer(a, b):
    """`c[i, j] = a[i] * b[j]`"""
    yield (S(0), R), S(0)
    yield (R, S(0)), S(1)
    yield (P, R), P
    yield (R, P), P


@rule(aten.linear.default)
def linear(x, weight, bias=None):
    """`c[..., i, j] = bias[j] + sum_k x[..., i, k] * weight[j, k]`"""
    last = x.ndim - 1
    extra = [] if bias is None else [bias]
    for d in range(last):
        yield (S(d), R, *[R for _ in extra]), S(d)
    if weight.ndim == 2:
        yield (R, S(0), *[S(0) for _ in extra]), S(last)
    yield (S(last), S(weight.ndim - 1), *[P for _ in extra]), P
    yield (P, R, *[P for _ in extra]), P
    yield (R, P, *[P for _ in extra]), P


@rule(aten.matmul.default)
def matmul(a, b):
    """`c[..., i, j] = sum_k a[..., i, k] * b[..., k, j]`, without i or j where it is a vector"""
    ndim = max(a.ndim, b.ndim, 2)  # of the output if no argument were a vector
    to = [d for d in range(ndim) if not (d == ndim - 2 and a.ndim == 1)]
    to = [d for d in to if not (d == ndim - 1 and b.ndim == 1)]
    for d in range(ndim - 2):
        cuts = [S(d - ndim + t.ndim) if d >= ndim - t.ndim else None for t in (a, b)]
        sizes = [None if c is None else t.shape[c.dim] for c, t in zip(cuts, (a, b))]
        if any(n not in (None, 1) for n in sizes):
            yield tuple(R if n in (None, 1) else c for c, n in zip(cuts, sizes)), S(to.index(d))
    if a.ndim > 1:
        yield (S(a.ndim - 2), R), S(to.index(ndim - 2))
    if b.ndim > 1:
        yield (R, S(b.ndim - 1)), S(to.index(ndim - 1))
    yield (S(a.ndim - 1), S(max(b.ndim - 2, 0))), P
    yield (P, R), P
    yield (R, P), P


@rule(aten.mv.default)
def mv(a, b):
    """`c[i] = sum_k a[i, k] * b[k]`"""
    yield (S(0), R), S(0)
    yield (S(1), S(0)), P
    yield (P, R), P
    yield (R, P), P


@rule(aten.dot.default, aten.vdot.default)
def dot(a, b):
    """`c = sum_k a[k] * b[k]`"""
    yield (S(0), S(0)), P
    yield (P, R), P
    yield (R, P), P


@rule(aten._trilinear.default)
def trilinear(a, b, c, expand_a, expand_b, expand_c, summed, unroll_dim=1):
    """`out[i] = sum_k a[i, k] * b[i, k] * c[i, k]`, each without the dims where it is expanded"""
    absent = (expand_a, expand_b, expand_c)
    for d in range(a.ndim + len(expand_a)):
        cuts = [R if d in gone else S(d - sum(g < d for g in gone)) for gone in absent]
        if any(cut != R for cut in cuts):
            yield cuts, P if d in summed else S(d - sum(g < d for g in summed))
    for i in range(3):
        yield tuple(P if i == j else R for j in range(3)), P
