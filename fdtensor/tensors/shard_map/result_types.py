"""`result_types`: the types of what a function in `shard_map` returns."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fdtensor.layouts.errors import FdtensorError, LayoutError
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.tensors.shard_map.places import Place, Table
from fdtensor.tensors.shard_map.real import RealPlace

__all__ = ["result_types"]


def result_types(
    layouts: Sequence[Layout],
    table: Table,
    leaves: Sequence[torch.Tensor],
    where: Sequence[str],
    place: Place,
) -> list[TensorType]:
    """The types of the results, from the local shapes on all ranks; all of them raise together."""
    types = []
    for i, (layout, leaf, name) in enumerate(zip(layouts, leaves, where, strict=True)):
        shapes = dict(zip(layout.mesh.order, [call.shapes[i] for call in table], strict=True))
        try:
            types.append(_type(layout, shapes, leaf.dtype, name))
        except FdtensorError:
            if isinstance(place, RealPlace):
                place.over = True
            raise
    return types


def _type(
    layout: Layout, shapes: dict[int, tuple[int, ...]], dtype: torch.dtype, name: str
) -> TensorType:
    mesh, first = layout.mesh, next(iter(shapes.values()))
    full = []
    for dim in range(len(first)):
        ranks = mesh.coset(layout.cuts(dim), (0,) * mesh.ndim)
        full.append(sum([shapes[r][dim] if dim < len(shapes[r]) else 0 for r in ranks]))
    try:
        type = TensorType(tuple(full), dtype, layout)
    except LayoutError as error:
        raise LayoutError(
            f"{name} of shard_map cannot have its layout: {error.sentence}", **error.facts,
            hint=error.hint,
        ) from None  # fmt: skip
    for rank, shape in shapes.items():
        if shape != type.local_shape(rank):
            raise LayoutError(
                f"{name} of shard_map has shape {shape} on rank {rank}, but its layout cuts a "
                f"tensor of shape {type.shape} so that the rank holds {type.local_shape(rank)}.",
                layout=layout,
                hint="Return blocks as the layout cuts them, or say Ragged(dim, sizes) for blocks "
                "of other sizes.",
            )
    return type
