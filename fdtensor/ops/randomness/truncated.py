"""`without_rejection`: truncated normals of `torch.nn.init` as one draw for each element.

Torch draws again for elements that fall outside, until none does: no program has such a loop.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager

import torch

from fdtensor.layouts.torch_private import truncated_normal_by

__all__ = ["without_rejection"]


def without_rejection() -> AbstractContextManager[None]:
    """A context in which `torch.nn.init.trunc_normal_` inverts the cumulative distribution."""
    return truncated_normal_by(_truncated)


def _truncated(
    tensor: torch.Tensor,
    mean: float,
    std: float,
    a: float,
    b: float,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    low, high = (math.erf((end - mean) / (std * math.sqrt(2))) for end in (a, b))
    with torch.no_grad():
        tensor.uniform_(low, high, generator=generator)
        return tensor.erfinv_().mul_(std * math.sqrt(2)).add_(mean).clamp_(a, b)
