"""`opaque`: an elementwise function of tensors that code compiled by torch calls as one op."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from fdtensor.ops.own_ops import own_op

__all__ = ["compiled", "opaque"]

F = TypeVar("F", bound=Callable[..., Any])


def compiled() -> bool:
    """Whether `torch.compile` reads this; not `torch.export`, which keeps torch's own ops."""
    return torch.compiler.is_dynamo_compiling() and not torch.compiler.is_exporting()


def opaque(name: str, count: int, outs: int = 1) -> Callable[[F], F]:
    """A decorator: an op of `count` tensors of one dtype, with `outs` results of their shape.

    So the compiler has less to do, and neither fuses the ops inside nor changes their rounding.
    """
    taken = ", ".join(f"Tensor x{i}" for i in range(count))
    returned = ", ".join(["Tensor"] * outs)

    def fake(*xs: torch.Tensor) -> Any:
        shape = torch.broadcast_shapes(*[x.shape for x in xs])
        results = [xs[0].new_empty(shape) for _ in range(outs)]
        return results[0] if outs == 1 else tuple(results)

    def wrap(run: Any) -> Any:
        def batched(_info: Any, dims: Any, *xs: torch.Tensor) -> Any:
            return op(*_aligned(dims, xs)), 0 if outs == 1 else (0,) * outs

        op = own_op(f"{name}({taken}) -> ({returned})", run, fake, batched)
        return lambda *xs: op(*xs) if compiled() else run(*xs)

    return wrap


def _aligned(dims: Sequence[int | None], xs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors with their entries along `dims` as the first dim, and the others broadcast."""
    most = max(x.dim() - (d is not None) for x, d in zip(xs, dims, strict=True))
    return [
        x if d is None else (y := x.movedim(d, 0)).reshape(
            y.shape[0], *[1] * (most + 1 - y.dim()), *y.shape[1:]
        )
        for x, d in zip(xs, dims, strict=True)
    ]  # fmt: skip
