"""`orthogonalized`: what Muon does to the update of a matrix, as one op on whole matrices.

Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fdtensor.layouts.placement import Replicate
from fdtensor.layouts.torch_private import newton_schulz
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


@torch.library.custom_op("fdtensor::orthogonalized", mutates_args=())
def _op(
    update: torch.Tensor, coefficients: list[float], steps: int, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    a, b, c = coefficients
    scaled = update.clone(memory_format=torch.contiguous_format)
    out = newton_schulz(scaled, (a, b, c), steps, eps)  # which divides it in place by its norm
    return out.clone(memory_format=torch.contiguous_format), scaled


@_op.register_fake
def _(
    update: torch.Tensor, coefficients: object, steps: int, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    one, other = [torch.empty_like(update, memory_format=torch.contiguous_format) for _ in "12"]
    return one, other


_OP = torch.ops.fdtensor.orthogonalized.default


@rule(_OP)
def rows(update, coefficients, steps, eps):
    """`out = update (update' update)^(-1/2)`: each element depends on all others"""
    yield (Replicate(),), (Replicate(), Replicate())
