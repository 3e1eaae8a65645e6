"""`without_rejection`: truncated normals of `torch.nn.init` as one draw for each element.

Torch draws again for elements that fall outside, until none does: no program has such a loop.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import init

__all__ = ["without_rejection"]


@contextlib.contextmanager
def without_rejection() -> Iterator[None]:
    """A context in which `torch.nn.init.trunc_normal_` inverts the cumulative distribution."""
    module: Any = init
    before = module._no_grad_trunc_normal_
    module._no_grad_trunc_normal_ = _truncated
    try:
        yield
    finally:
        module._no_grad_trunc_normal_ = before


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
