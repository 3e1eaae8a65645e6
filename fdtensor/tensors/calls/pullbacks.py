"""`by_vjp` and `by_autograd`: the ways in which a recording takes a derivative."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fdtensor.ops.ambient import with_casts

__all__ = ["by_autograd", "by_vjp"]

_uncast = with_casts(())
"""A backward casts nothing by itself, as one outside of autocast."""


def by_vjp(
    smooth: Callable[..., Any], primals: Sequence[torch.Tensor], cotangents: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """The results of a function and the cotangents of its primals, by `torch.func`."""
    vjp: Any = torch.func.vjp
    _, pull, results = vjp(smooth, *primals, has_aux=True)
    return list(results), list(_uncast(pull)(list(cotangents)))


def by_autograd(
    smooth: Callable[..., Any], primals: Sequence[torch.Tensor], cotangents: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """The same by the graph of autograd."""
    sources = [t if t.requires_grad else t.detach().requires_grad_() for t in primals]
    outs, results = smooth(*sources)
    pairs = [(out, ct) for out, ct in zip(outs, cotangents, strict=True) if out.requires_grad]
    gradients: Sequence[Any] = [None] * len(sources)
    if pairs:
        ends, cts = zip(*pairs, strict=True)
        pull = functools.partial(torch.autograd.grad, allow_unused=True, create_graph=True)
        gradients = _uncast(pull)(ends, sources, cts)
    grads = [
        torch.zeros_like(t) if g is None else g for t, g in zip(sources, gradients, strict=True)
    ]
    return list(results), grads
