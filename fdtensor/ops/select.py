"""`select`: one of two tensors, as a predicate says; what the other one needs does not run."""

from __future__ import annotations

from typing import Any

import torch

from fdtensor.ops.own_ops import own_op

__all__ = ["SELECT", "select", "zeros_beside"]


def _run(which: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.where(which, a, b)


SELECT = own_op("select(Tensor which, Tensor a, Tensor b) -> Tensor", _run)
"""`a` where a 0-d predicate holds, else `b`: tensors of one shape and dtype."""


def select(which: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`a` where the predicate holds, else `b`; of a `vmap` of the predicate, entry by entry."""
    return _Select.apply(which, a, b)  # type: ignore[return-value]


def zeros_beside(x: torch.Tensor) -> torch.Tensor:
    """Zeros of the shape of a tensor, which do not read it: it may not be there."""
    return torch.zeros(x.shape, dtype=x.dtype, device=x.device)


class _Select(torch.autograd.Function):
    @staticmethod
    def forward(which: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return SELECT(which, a, b)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.save_for_forward(inputs[0])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        (which,) = ctx.saved_tensors
        zeros = zeros_beside(grad)
        return None, select(which, grad, zeros), select(which, zeros, grad)

    @staticmethod
    def jvp(ctx: Any, _: None, a: torch.Tensor, b: torch.Tensor) -> Any:  # type: ignore[override]
        (which,) = ctx.saved_tensors
        return select(which, a, b)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        which, a, b = args
        own, *others = in_dims
        pair = [
            t.movedim(d, 0) if d is not None else t.expand(info.batch_size, *t.shape)
            for t, d in zip((a, b), others, strict=True)
        ]
        if own is None:
            return select(which, *pair), 0
        which = which.movedim(own, 0).reshape(-1, *[1] * (pair[0].ndim - 1))
        return torch.where(which, *pair), 0
