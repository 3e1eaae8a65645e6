"""`Fresh`: new memory for a tensor that is read piece by piece from files."""

from __future__ import annotations

from functools import partial
from typing import Any

import attrs
import torch

from fdtensor.io.checkpoint.boxes import bounding, held, rectangles, shared, view
from fdtensor.io.checkpoint.request import Asked
from fdtensor.layouts.blocks import Box, whole
from fdtensor.plans.local_tensors import empty
from fdtensor.tensors.dtensor import DTensor

__all__ = ["Fresh"]


@attrs.frozen
class Fresh:
    """A tensor whose elements are still to be read, and the blocks of it that this process has."""

    asked: Asked
    tensor: Any
    """A DTensor without pending terms, or a plain tensor."""
    blocks: list[tuple[Box, torch.Tensor]]

    @classmethod
    def of(cls, asked: Asked) -> Fresh:
        """Memory for an entry, with any values."""
        assert asked.stored is not None
        if asked.type is None:
            shape = asked.stored.shape
            tensor = torch.empty(shape, dtype=asked.stored.dtype, device=asked.device)
            return cls(asked, tensor, [(tuple(map(whole, shape)), tensor)])
        assert asked.comm is not None
        type, comm = asked.type.cotangent(), asked.comm
        device = comm.device or torch.device("cpu")
        local = comm.each(type, partial(empty, type, like=device))
        made = DTensor(local, type, comm)
        return cls(asked, made, held(made))

    def needed(self, source: Box) -> Box | None:
        """The least rectangle of a piece in a file that has all elements wanted of it, if any."""
        return bounding([shared(box, source) for box, _ in self.blocks])

    def target(self, needed: Box) -> torch.Tensor | None:
        """The memory of such a rectangle, where one block has it in one piece."""
        if len(self.blocks) != 1 or shared(self.blocks[0][0], needed) != needed:
            return None
        ((box, local),) = self.blocks
        return view(local, box, tuple(interval for (interval,) in needed))

    def fill(self, needed: Box, read: torch.Tensor) -> None:
        """Copies what was read to the blocks that want it."""
        read = _aligned(read)
        for box, local in self.blocks:
            for piece in rectangles(shared(box, needed)):
                view(local, box, piece).copy_(view(read, needed, piece))

    def value(self) -> Any:
        """The tensor, once all is read, with its terms pending as they were asked for."""
        wanted = self.asked.type
        return self.tensor.redistribute(wanted) if wanted and wanted.layout.partial else self.tensor


def _aligned(read: torch.Tensor) -> torch.Tensor:
    """A tensor in a file, elsewhere in memory where kernels would not take the place it is at.

    Those of 16 bytes an element, complex128, end the process at an odd one.
    """
    if read.element_size() < 16 or read.data_ptr() % 16 == 0 or not read.numel():
        return read
    parts = torch.view_as_real(read)  # kernels of these take any place, and any strides
    return torch.view_as_complex(parts.clone(memory_format=torch.contiguous_format))
