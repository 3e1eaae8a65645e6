"""Functions of torch in other ops, where theirs read values to check them, or hide what moves."""

from __future__ import annotations

import itertools

import numpy as np
import torch

from fdtensor.ops.decompositions.batched_index import index_add
from fdtensor.ops.transparent import recorded_as
from fdtensor.ops.value_checks import require

Tensor = torch.Tensor
_LEAST_SQUARES = getattr(torch.return_types, "linalg_lstsq")  # noqa: B009  (its stub lacks it)


@recorded_as(torch.nn.functional.one_hot)
def one_hot(x, num_classes=-1):
    """`out[i, c] = x[i] == c`"""
    if num_classes <= 0:  # as many as the values need
        return torch.nn.functional.one_hot(x, num_classes)
    require((x >= 0) & (x < num_classes), f"index of one_hot, 0 to {num_classes - 1}")
    return (x.unsqueeze(-1) == torch.arange(num_classes, device=x.device)).long()


@recorded_as(torch.bincount, torch.Tensor.bincount)
def bincount(input, weights=None, minlength=0):
    """`out[c] = sum_i w[i] * (x[i] == c)` for `c < minlength`; others are out of range."""
    whole = not (input.is_floating_point() or input.is_complex() or input.dtype == torch.bool)
    if minlength <= 0 or input.ndim != 1 or not whole:  # as many as the values need, or refused
        return torch.bincount(input, weights, minlength)
    if weights is None:
        weights = torch.ones_like(input, dtype=torch.int64)
    elif weights.dtype != torch.float32:
        weights = weights.double()
    return index_add(weights.new_zeros(minlength), 0, input.long(), weights)


@recorded_as(torch.combinations)
def combinations(input, r=2, with_replacement=False):
    """`out[i] = x[places[i]]`, all runs of `r` places: torch takes them by a mask."""
    if input.ndim != 1 or r < 1:
        return torch.combinations(input, r, with_replacement)
    count = int(input.shape[0])
    if r == 2:
        places = np.stack(np.triu_indices(count, 0 if with_replacement else 1), 1)
    else:
        kind = (
            itertools.combinations_with_replacement if with_replacement else itertools.combinations
        )
        places = np.array(list(kind(range(count), r)), np.int64).reshape(-1, r)
    return input[torch.tensor(places, device=input.device)]


@recorded_as(torch.linalg.lstsq)
def lstsq(A, B, rcond=None, *, driver=None):
    """`x = pinv(a) @ b`, the smallest one; residuals of some drivers have a shape by values."""
    if driver not in (None, "gels", "gelsy") or rcond is not None or B.ndim > A.ndim:
        return torch.linalg.lstsq(A, B, rcond, driver=driver)
    a, is_vector = A, B.ndim == 1 or (A.ndim - 1 == B.ndim and B.shape == A.shape[:-1])
    b = B.unsqueeze(-1) if is_vector else B
    rows, columns = a.shape[-2:]
    exact = driver == "gels" or (driver is None and a.is_cuda)
    x = torch.linalg.pinv(a) @ b
    none = a.new_empty([0]).real
    rank = none.long()
    residuals = none
    if not exact:
        rank = torch.linalg.matrix_rank(a)
    elif rows > columns:
        residuals = (a @ x - b).abs().square().sum(-2)
    x = x.squeeze(-1) if is_vector else x
    return _LEAST_SQUARES((x, residuals, rank, none))


@recorded_as(torch.nn.functional.pad)
def pad(input, pad, mode="constant", value=None):
    """`out[i] = x[(i - before) % n]` where it is circular: torch writes parts of a new one."""
    pairs = [*zip(pad[::2], pad[1::2], input.shape[::-1], strict=False)]
    is_right = 2 * len(pairs) == len(pad) and len(pairs) in (input.ndim - 1, input.ndim - 2)
    if mode != "circular" or not is_right or any(not 0 <= k <= n for *ks, n in pairs for k in ks):
        return torch.nn.functional.pad(input, pad, mode, value)
    for k, (before, after, size) in enumerate(pairs):
        d = input.ndim - 1 - k
        parts = input.narrow(d, size - before, before), input, input.narrow(d, 0, after)
        input = torch.cat([t for t in parts if t.shape[d]], d)
    return input


@recorded_as(torch.cov, torch.Tensor.cov)
def cov(x, *, correction=1, fweights=None, aweights=None):
    """`c[i, j] = sum_n w[n] * (x[i, n] - mean[i]) * conj(x[j, n] - mean[j]) / freedom`"""
    x = x.reshape(1, -1) if x.ndim < 2 else x
    total, freedom, w = x.shape[1], x.shape[1] - correction, None
    if fweights is not None or aweights is not None:
        weights = [t for t in (fweights, aweights) if t is not None]
        w = weights[0] if len(weights) == 1 else weights[0] * weights[1]
        total = w.sum()
        spread = total if aweights is None else (w * aweights).sum() / total
        freedom = total - correction * (1 if aweights is None else spread)
    mean = (x if w is None else x * w).sum(1, keepdim=True) / total
    centered = x - mean
    weighted = centered if w is None else centered * w
    freedom = freedom.clamp(min=0) if isinstance(freedom, Tensor) else max(0, freedom)
    return (centered @ weighted.mH / freedom).squeeze()


@recorded_as(torch.corrcoef, torch.Tensor.corrcoef)
def corrcoef(x):
    """`r[i, j] = c[i, j] / sqrt(c[i, i] * c[j, j])`"""
    c = cov(x)
    if not c.ndim:
        return c / c
    deviation = c.diagonal().real.sqrt() if c.is_complex() else c.diagonal().sqrt()
    r = c / deviation.unsqueeze(1) / deviation
    if r.is_complex():
        return torch.complex(r.real.clip(-1, 1), r.imag.clip(-1, 1))
    return r.clip(-1, 1)
