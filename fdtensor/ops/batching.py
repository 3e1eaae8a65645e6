"""`batching`: ops that `vmap` of torch has no rule for, in simpler ops that it has rules for."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fdtensor.layouts.torch_private import OpOverload, unbatched
from fdtensor.ops.decompositions import decomposition_of
from fdtensor.ops.value_checks import require

__all__ = ["batching"]

aten = torch.ops.aten

Tensor = torch.Tensor


@functools.cache
def batching() -> Mapping[OpOverload, Callable[..., Any]]:
    """What `vmap` calls for ops that it has no rule for: composites, decompositions, writes."""
    rules: dict[OpOverload, Callable[..., Any]] = {}
    for op, is_composite in unbatched().items():
        if torch.Tag.nondeterministic_seeded in op.tags:  # each entry draws its own
            continue
        known = decomposition_of(op)
        if op in _OURS:
            rules[op] = _OURS[op]
        elif is_composite:
            rules[op] = op.decompose
        elif _new(op) is not None:
            rules[op] = functools.partial(_written, _new(op))
        elif known is not None and not known.blocked:
            rules[op] = functools.partial(_decomposed, op, known.f)
    return rules


_INSIDE: list[OpOverload] = []
"""The ops that are in their decompositions now."""


def _decomposed(op: OpOverload, f: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    no_rule = NotImplementedError(f"{op.name()} hit the vmap fallback for these operands")
    if op in _INSIDE:  # for some operands it is made of itself
        raise no_rule
    _INSIDE.append(op)
    try:
        return f(*args, **kwargs)
    except NotImplementedError:  # as torch says it
        raise no_rule from None
    finally:
        _INSIDE.pop()


def _new(op: OpOverload) -> OpOverload | None:
    """The op that gives a new tensor, of one that writes to its first operand."""
    packet, _, overload = op.name().removeprefix("aten::").partition(".")
    if not packet.endswith("_") or packet.startswith("_") or torch.Tag.inplace_view in op.tags:
        return None
    return getattr(getattr(aten, packet[:-1], None), overload or "default", None)


def _written(new: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if kwargs.get("dtype") not in (None, x.dtype):
        raise RuntimeError(f"a tensor of {x.dtype} cannot take what is of {kwargs['dtype']}.")
    return x.copy_(new(x.clone(), *args, **kwargs))  # a derivative may read what was


def _histc(x: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    """`out[b] = sum_i (x[i] in bin b)`"""
    if not (bins > 0 and -math.inf < min <= max < math.inf):
        raise RuntimeError(f"histc takes bins above 0 of a finite range, not {bins} of {min, max}.")
    if not x.is_floating_point():
        raise NotImplementedError("aten::histc hit the vmap fallback for integers")
    if min == max:
        return decomposition_of(aten.histc.default).f(x, bins, min, max)  # type: ignore[union-attr]
    x = x.flatten()
    is_in = (x >= min) & (x <= max)
    low, high = x.new_full((), min), x.new_full((), max)  # rounded as kernels round them
    place = torch.where(is_in, (x - low) * bins / (high - low), 0).to(torch.int64)
    zeros = x.new_zeros(bins)
    return zeros.index_put((place.clamp(max=bins - 1),), is_in.to(x.dtype), accumulate=True)


def _masked_scatter(x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """`out[i] = source[order[i]] if mask[i] else x[i]`"""
    told = f"values of masked_scatter, no fewer than the mask takes: {source.numel()}"
    mask = mask.broadcast_to(torch.broadcast_shapes(x.shape, mask.shape))
    if source.numel() < mask.numel():
        require(mask.sum() <= source.numel(), told)
    return decomposition_of(aten.masked_scatter.default).f(x, mask, source)  # type: ignore[union-attr]


def _renorm(x: Tensor, p: Any, dim: int, maxnorm: Any) -> Tensor:
    """`out[i] = x[i] * min(1, maxnorm / norm(x[i], p))`"""
    if p <= 0 or maxnorm < 0:
        raise RuntimeError(f"renorm takes p above 0 and maxnorm from 0 on, not {p} and {maxnorm}.")
    return decomposition_of(aten.renorm.default).f(x, p, dim, maxnorm)  # type: ignore[union-attr]


_OURS: Mapping[OpOverload, Callable[..., Any]] = {
    aten.histc.default: _histc,
    aten.masked_scatter.default: _masked_scatter,
    aten.renorm.default: _renorm,
}
"""Ops whose decomposition is not for all operands."""
