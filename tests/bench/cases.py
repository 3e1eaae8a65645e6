"""The redistributions that everyone is measured on: `CASES`, their types and their tensors."""

from __future__ import annotations

import functools

import attrs
import torch

from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import Partial, Placement, Replicate, Shard
from fdtensor.layouts.tensor_type import TensorType

__all__ = ["CASES", "LARGE", "NOTHING", "SMALL", "Case", "Shape", "block"]

Shape = tuple[int, int]

LARGE: Shape = (2048, 2048)
"""16 MB of float32."""

SMALL: Shape = (128, 128)
"""64 KB of float32."""


@attrs.frozen
class Case:
    """A redistribution on a mesh of 4 ranks: `src` and `dst` have a placement for each axis."""

    name: str
    src: tuple[Placement, ...]
    dst: tuple[Placement, ...]
    uneven: bool = False

    @property
    def mesh(self) -> Mesh:
        """The mesh: a line of 4, or 2 by 2."""
        return Mesh(x=4) if len(self.src) == 1 else Mesh(x=2, y=2)

    def shape(self, size: Shape) -> Shape:
        """The shape of the tensor: `size`, or a little less where blocks shall be uneven."""
        return (size[0] - 1, size[1] - 3) if self.uneven else size

    def types(self, size: Shape) -> tuple[TensorType, TensorType]:
        """The types before and after."""
        before, after = Layout(self.mesh, self.src), Layout(self.mesh, self.dst)
        start = TensorType(self.shape(size), torch.float32, before)
        return start, start.with_layout(after)

    def tensors(self, size: Shape, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What `rank` holds before and after. Values are small integers, so sums are exact."""
        start, end = self.types(size)
        base = (torch.arange(start.numel, dtype=torch.float32) * 7919) % 1009
        base = base.view(start.shape)
        axes = tuple(start.layout.partial)
        if not axes:
            return block(base, start, rank), block(base, end, rank)
        coord = start.mesh.coord(rank)
        assert coord is not None
        places = list(start.mesh.indices(axes))
        mine = places.index(tuple(coord[start.mesh.axis(axis)] for axis in axes))
        terms = [base.roll(i, 1) for i in range(len(places))]
        full = functools.reduce(torch.add, terms)
        return block(terms[mine], start, rank), block(full, end, rank)


def block(full: torch.Tensor, type: TensorType, rank: int) -> torch.Tensor:
    """A copy of what `rank` holds of `full`, for a type whose blocks are in one piece."""
    for dim, indices in enumerate(type.index(rank)):
        full = full.narrow(dim, indices[0] if indices else 0, len(indices))
    return full.clone(memory_format=torch.contiguous_format)


R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial("sum")

CASES = (
    Case("S0->R", (S0,), (R,)),
    Case("S0->S1", (S0,), (S1,)),
    Case("S1->S0", (S1,), (S0,)),
    Case("S0->S1 uneven", (S0,), (S1,), uneven=True),
    Case("P->R", (P,), (R,)),
    Case("P->S0", (P,), (S0,)),
    Case("R->S0", (R,), (S0,)),
    Case("(S0,S1)->(S1,S0)", (S0, S1), (S1, S0)),
    Case("(S0,S0)->(R,S0)", (S0, S0), (R, S0)),
    Case("(P,R)->(R,S0)", (P, R), (R, S0)),
    Case("(R,S0)->(S0,S0)", (R, S0), (S0, S0)),
)
"""The eleven cases of traffic."""

NOTHING = Case("S0->S0", (S0,), (S0,))
"""A redistribution to the layout that is there already."""
