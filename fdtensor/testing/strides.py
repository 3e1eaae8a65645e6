"""`Strides`: how a tensor lies in memory, which no result may depend on."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch

__all__ = ["CONTIGUOUS", "Strides", "laid_out", "strided"]


@attrs.frozen
class Strides:
    """The dims from the outermost in memory to the innermost, and the gap between elements.

    `Strides((0, 2, 3, 1))` is channels_last. Of a gap of 2, every other element is someone else's.

    >>> from hypothesis import find
    >>> find(fd.testing.memory_formats(4), lambda s: s is not None and s.order == (0, 2, 3, 1))
    Strides(order=(0, 2, 3, 1), gap=1)
    """

    order: tuple[int, ...] = attrs.field(converter=tuple)
    gap: int = 1


CONTIGUOUS = None
"""In place of strides: those that torch gives a new tensor."""


def laid_out(tensor: torch.Tensor, strides: Strides | None) -> torch.Tensor:
    """An equal tensor with these strides, in memory of its own."""
    if strides is None:
        return tensor.clone(memory_format=torch.contiguous_format)
    order = strides.order
    memory = tensor.new_zeros([*(tensor.shape[d] for d in order), strides.gap])
    back = [order.index(d) for d in range(tensor.ndim)]
    return memory[..., 0].permute(back).copy_(tensor)


def strided(blocks: Sequence[torch.Tensor], strides: Strides | None) -> tuple[torch.Tensor, ...]:
    """The blocks of all ranks, all with the same strides."""
    return tuple(laid_out(block, strides) for block in blocks)
