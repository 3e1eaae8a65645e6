"""`decomposition_of`: an op as simpler ones, for layouts in which its kernel would need all blocks.

A decomposition takes the arguments of the op and full tensors, so that the numbers of elements in
it are full ones, and returns what the op returns. Means are subtracted before squaring and maxima
before `exp`; what has fewer than 32 bits is computed in 32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from math import inf, prod
from typing import Any

import torch

from fdtensor.rules.reduce import reduced_dims

__all__ = ["DECOMPOSITIONS", "decomposition", "decomposition_of", "summed", "wide"]

aten = torch.ops.aten

DECOMPOSITIONS: dict[torch._ops.OpOverload, Callable[..., Any]] = {}
"""By op."""


def decomposition(*ops: torch._ops.OpOverload) -> Callable[[Callable], Callable]:
    """Registers the decorated function as what the ops do."""

    def register(f: Callable) -> Callable:
        DECOMPOSITIONS.update(dict.fromkeys(ops, f))
        return f

    return register


def decomposition_of(op: Any) -> Callable[..., Any] | None:
    """What `op` does, in simpler ops: as written here, else as torch has it; None where nobody has.

    A function of the arguments of the op that returns what the op returns: a tuple for several.
    """
    found = DECOMPOSITIONS.get(op)
    return _torch_decompositions().get(op) if found is None else found


@functools.cache
def _torch_decompositions() -> dict[Any, Callable[..., Any]]:
    from torch._decomp import decomposition_table

    return decomposition_table


def wide(x: torch.Tensor) -> torch.Tensor:
    """`x` in the dtype that sums are computed in."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def summed(x: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    """The sum over `dims`, which stay as dims of size 1; `x` itself where there are none."""
    return x.sum(tuple(dims), keepdim=True) if dims else x


def _dropped(x: torch.Tensor, dims: Sequence[int], keepdim: bool) -> torch.Tensor:
    return x if keepdim or not dims else x.squeeze(tuple(dims))


def _moments(x: torch.Tensor, dim: Any, correction: float | None) -> tuple[Any, Any, list[int]]:
    dims = sorted(reduced_dims(x, dim))
    count = prod(x.shape[d] for d in dims)
    mean = summed(x, dims) / count
    apart = x - mean
    squared = (apart * apart.conj()).real if x.is_complex() else apart * apart
    freedom = max(0.0, count - (1 if correction is None else correction))
    return summed(squared, dims) / freedom, mean, dims


def _spread(x: torch.Tensor, dim: Any, correction: float | None, keepdim: bool, root: bool):
    var, mean, dims = _moments(wide(x), dim, correction)
    kind = x.dtype.to_real() if x.is_complex() else x.dtype
    out = _dropped(var.sqrt() if root else var, dims, keepdim).to(kind)
    return out, _dropped(mean, dims, keepdim).to(x.dtype)


@decomposition(aten.var.correction)
def var(x, dim=None, *, correction=None, keepdim=False):
    """`out[i] = sum_j (x[i, j] - mean[i])^2 / (n - correction)`"""
    return _spread(x, dim, correction, keepdim, False)[0]


@decomposition(aten.std.correction)
def std(x, dim=None, *, correction=None, keepdim=False):
    """`out[i] = sqrt(var[i])`"""
    return _spread(x, dim, correction, keepdim, True)[0]


@decomposition(aten.var_mean.correction)
def var_mean(x, dim=None, *, correction=None, keepdim=False):
    """`var[i], mean[i]`"""
    return _spread(x, dim, correction, keepdim, False)


@decomposition(aten.std_mean.correction)
def std_mean(x, dim=None, *, correction=None, keepdim=False):
    """`sqrt(var[i]), mean[i]`"""
    return _spread(x, dim, correction, keepdim, True)


@decomposition(aten.linalg_vector_norm.default)
def vector_norm(x, ord=2, dim=None, keepdim=False, *, dtype=None):
    """`out[i] = (sum_j |x[i, j]|^ord)^(1 / ord)`"""
    dims = sorted(reduced_dims(x, dim))
    x = x if dtype is None else x.to(dtype)
    size = wide(x) if ord == 2 and not x.is_complex() else wide(x.abs())
    if ord in (inf, -inf):
        over = size if not dims else size.amax(dims, True) if ord > 0 else size.amin(dims, True)
    elif ord == 0:
        over = summed((size != 0).to(size.dtype), dims)
    elif ord == 1:
        over = summed(size, dims)
    elif ord == 2:
        over = summed(size * size, dims).sqrt()
    else:
        over = summed(size.pow(ord), dims).pow(1 / ord)
    kind = x.dtype.to_real() if x.is_complex() else x.dtype
    return _dropped(over, dims, keepdim).to(kind)


@decomposition(aten.renorm.default)
def renorm(x, p, dim, maxnorm):
    """`out[:, i] = x[:, i] * maxnorm / (norm(x[:, i]) + 1e-7)` where the norm is greater"""
    dims = [d for d in range(x.ndim) if d != dim % x.ndim]
    norm = vector_norm(wide(x), p, dims, True) if dims else wide(x).abs()
    scale = torch.where(norm > maxnorm, maxnorm / (norm + 1e-7), 1.0)
    return (x * scale).to(x.dtype)


@decomposition(aten.logsumexp.default)
def logsumexp(x, dim, keepdim=False):
    """`out[i] = log sum_j exp(x[i, j] - most[i]) + most[i]`"""
    dims = sorted(reduced_dims(x, dim))
    kind = x.dtype if x.is_floating_point() else torch.get_default_dtype()
    x = wide(x.to(kind))
    most = x.amax(dims, True) if dims else x
    most = most.masked_fill(most.abs() == inf, 0)
    out = summed((x - most).exp(), dims).log() + most
    return _dropped(out, dims, keepdim).to(kind)


def _below_most(x: torch.Tensor, dim: int) -> torch.Tensor:
    x = wide(x)
    return x - (x.amax(dim, True) if x.ndim else x)


@decomposition(aten._softmax.default)
def softmax(x, dim, half_to_float):
    """`out[i, j] = exp(x[i, j] - most[i]) / sum_k exp(x[i, k] - most[i])`"""
    e = _below_most(x, dim).exp()
    return (e / summed(e, [dim] if x.ndim else [])).to(torch.float32 if half_to_float else x.dtype)


@decomposition(aten._safe_softmax.default)
def safe_softmax(x, dim, dtype=None):
    """`softmax`, 0 where all of `x[i]` is `-inf`"""
    x = x if dtype is None else x.to(dtype)
    none = x == -inf
    none = none.all(dim, True) if x.ndim else none
    return softmax(x, dim, False).masked_fill(none, 0)


@decomposition(aten._log_softmax.default)
def log_softmax(x, dim, half_to_float):
    """`out[i, j] = x[i, j] - most[i] - log sum_k exp(x[i, k] - most[i])`"""
    y = _below_most(x, dim)
    out = y - summed(y.exp(), [dim] if x.ndim else []).log()
    return out.to(torch.float32 if half_to_float else x.dtype)


@decomposition(aten._softmax_backward_data.default)
def softmax_backward(grad, out, dim, input_dtype):
    """`dx[i, j] = out[i, j] * grad[i, j] - out[i, j] * sum_k grad[i, k] * out[i, k]`"""
    weighted = wide(grad) * wide(out)
    return (weighted - wide(out) * summed(weighted, [dim] if out.ndim else [])).to(input_dtype)


@decomposition(aten._log_softmax_backward_data.default)
def log_softmax_backward(grad, out, dim, input_dtype):
    """`dx[i, j] = grad[i, j] - exp(out[i, j]) * sum_k grad[i, k]`"""
    total = summed(wide(grad), [dim] if out.ndim else [])
    return (wide(grad) - wide(out).exp() * total).to(input_dtype)


def _first(x: torch.Tensor, most: torch.Tensor, dim: int) -> torch.Tensor:
    """Where along `dim` the first element is that equals `most`, or the first nan."""
    hit = x == most
    if x.is_floating_point():
        hit = hit | (x != x)
    n = x.shape[dim]
    place = torch.arange(n, device=x.device).reshape(*[n if d == dim else 1 for d in range(x.ndim)])
    return torch.where(hit, place, n).amin(dim, True)


def _extreme(x: torch.Tensor, dim: int, keepdim: bool, reduce: Callable):
    if not x.ndim:
        return x.clone(), torch.zeros((), dtype=torch.int64, device=x.device)
    dim %= x.ndim
    most = reduce(x, [dim], True)
    where = _first(x, most, dim)
    return _dropped(most, [dim], keepdim), _dropped(where, [dim], keepdim)


@decomposition(aten.max.dim)
def max_dim(x, dim, keepdim=False):
    """`values[i] = max_j x[i, j]`, and the first `j` that has it"""
    return _extreme(x, dim, keepdim, torch.amax)


@decomposition(aten.min.dim)
def min_dim(x, dim, keepdim=False):
    """`values[i] = min_j x[i, j]`, and the first `j` that has it"""
    return _extreme(x, dim, keepdim, torch.amin)


def _argument(x: torch.Tensor, dim: int | None, keepdim: bool, reduce: Callable):
    if dim is None:
        found = _extreme(x.reshape(-1), 0, False, reduce)[1]
        return found.reshape([1] * x.ndim) if keepdim else found
    return _extreme(x, dim, keepdim, reduce)[1]


@decomposition(aten.argmax.default)
def argmax(x, dim=None, keepdim=False):
    """The first `j` with the greatest `x[i, j]`"""
    return _argument(x, dim, keepdim, torch.amax)


@decomposition(aten.argmin.default)
def argmin(x, dim=None, keepdim=False):
    """The first `j` with the least `x[i, j]`"""
    return _argument(x, dim, keepdim, torch.amin)
