"""`SIGNS`: those that the triangle of a QR by reflectors has, from the rows above of any other."""

from __future__ import annotations

import torch

from fdtensor.ops.own_ops import own_op

__all__ = ["SIGNS"]


def _signs(top: torch.Tensor, diagonal: torch.Tensor) -> torch.Tensor:
    """The elimination of Ballard et al., "Reconstructing Householder Vectors from TSQR" (2014).

    Column k of what is left, of norm 1, is reflected to the other side of the hyperplane from its
    entry k, as kernels do that lose no digits: to the negative one from 0, and not where it lies on
    the axis. There are more rows than columns.
    """
    left, signs = top.clone(), []
    for k in range(top.shape[-1]):
        pivot = left[..., k, k]
        is_below = torch.where(pivot == 0, diagonal[..., k] < 0, pivot < 0)
        stays = pivot.abs() >= 1
        sign = torch.where(is_below != stays, 1.0, -1.0).to(top.dtype)
        signs.append(sign)
        scale = (sign / (1 + pivot.abs()))[..., None, None]
        below, beside = left[..., k + 1 :, k, None], left[..., k, None, k + 1 :]
        left[..., k + 1 :, k + 1 :] += scale * below * beside
    return torch.stack(signs, -1) if signs else top.new_zeros(top.shape[:-1])


SIGNS = own_op(
    "householder_signs(Tensor top, Tensor diagonal) -> Tensor",
    _signs,
    lambda top, _diagonal: top.new_empty(top.shape[:-1]),
)
"""From the first rows of orthonormal columns, and the diagonal beside: 1 or -1 for each column."""
