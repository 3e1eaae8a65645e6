"""`orthogonalized`: what Muon does to the update of a matrix, as one op on whole matrices.

Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fdtensor.layouts.placement import Replicate
from fdtensor.layouts.torch_private import newton_schulz
from fdtensor.ops.own_ops import own_op
from fdtensor.ops.rules import rule

__all__ = ["orthogonalized"]


def orthogonalized(
    update: torch.Tensor, coefficients: Sequence[float], steps: int, eps: float
) -> torch.Tensor:
    """About the nearest matrix with orthonormal rows or columns, in bfloat16.

    Every rank does the same with the whole matrix. Sums of bfloat16 that ranks add up round
    otherwise than those of one process, and the iteration makes small differences large.
    """
    out, scaled = _OP(update.bfloat16(), [float(c) for c in coefficients], steps, eps)
    if update.dtype is torch.bfloat16:  # torch scales it in place, and with it a momentum buffer
        update.copy_(scaled)
    return out


def _run(
    update: torch.Tensor, coefficients: list[float], steps: int, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    a, b, c = coefficients
    scaled = update.clone(memory_format=torch.contiguous_format)
    out = newton_schulz(scaled, (a, b, c), steps, eps)  # which divides it in place by its norm
    return out.clone(memory_format=torch.contiguous_format), scaled


def _fake(
    update: torch.Tensor, coefficients: object, steps: int, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    one, other = [torch.empty_like(update, memory_format=torch.contiguous_format) for _ in "12"]
    return one, other


_OP = own_op(
    "orthogonalized(Tensor update, float[] coefficients, int steps, float eps) -> (Tensor, Tensor)",
    _run,
    _fake,
)


@rule(_OP)
def rows(update, coefficients, steps, eps):
    """`out = update (update' update)^(-1/2)`: each element depends on all others"""
    yield (Replicate(),), (Replicate(), Replicate())
