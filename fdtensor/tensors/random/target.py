"""`drawn`: what a draw gives for a shape, or for the type of a DTensor, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from math import prod
from typing import Any, TypeAlias

import torch

from fdtensor.layouts.dtypes import dtype_name
from fdtensor.layouts.errors import FdtensorError, LayoutError
from fdtensor.layouts.record import integer
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.ops.random_bits import Places, filled
from fdtensor.ops.random_bits.fill import Convert
from fdtensor.ops.random_bits.floats import FLOATS, width_of
from fdtensor.ops.random_bits.keys import AnyKey, words_of
from fdtensor.plans.local_tensors import empty
from fdtensor.runtime.comm import Comm, contained, refuse_no_comm
from fdtensor.tensors.calls.arguments import compare_key
from fdtensor.tensors.dtensor import DTensor

__all__ = ["Device", "Where", "blockwise", "checked_dtype", "drawn", "floats"]

Where: TypeAlias = Sequence[int] | int | TensorType
"""The target of a draw: a shape, or the type of a DTensor, which says its dtype too."""

Device: TypeAlias = str | torch.device | None

Draw: TypeAlias = Callable[[Places, Device], torch.Tensor]
"""The numbers of some places, on a device."""


def drawn(
    key: AnyKey, shape: Where, comm: Comm[Any] | None, draw: Draw, device: Device = None
) -> Any:
    """The tensor of a shape, or a DTensor, of which each rank draws its own block."""
    words_of(key)
    if not isinstance(shape, TensorType):
        if comm is not None:
            raise FdtensorError(
                f"a Comm goes with the type of a DTensor, not with {shape!r}.",
                hint="Pass TensorType(shape, dtype, layout) and the Comm.",
            )
        return draw(Places.all(checked_shape(shape)), device)
    if comm is None:
        raise FdtensorError(
            f"{shape} is drawn on a Comm.", hint="Pass one: connect(mesh), or SimulatedComm(mesh)."
        )
    refuse_no_comm(comm)
    if shape.layout.partial:
        raise LayoutError(
            f"{shape} has pending terms, which cannot be drawn one by one.",
            hint="Draw type.cotangent(), and redistribute it.",
        )
    contained("a draw", [shape.mesh], comm.mesh)
    compare_key(key, comm, [shape.mesh], None, is_first=False)
    type, on = shape, torch.device(device or comm.device or "cpu")

    def block(rank: int) -> torch.Tensor:
        coord = type.mesh.coord(rank)
        if coord is None:
            return empty(type, rank, on)
        return draw(Places(type.shape, type.box(coord)), on)

    return DTensor(comm.each(type, block), type, comm)


def floats(
    about: str,
    law: Callable[[torch.dtype], Convert],
    key: AnyKey,
    shape: Where,
    comm: Comm[Any] | None,
    dtype: torch.dtype | None,
    device: Device,
    ends: tuple[float, ...] = (),
) -> Any:
    """Floats of a law: what it makes of the bits, for their dtype; as an op it has these ends."""
    dtype = checked_dtype(shape, dtype, torch.get_default_dtype(), FLOATS, about)
    convert = law(dtype)

    def draw(places: Places, device: Device) -> torch.Tensor:
        return filled(key, places, dtype, width_of(dtype), convert, device, (about, ends))

    return drawn(key, shape, comm, draw, device)


def blockwise(
    x: DTensor[Any], of_block: Callable[[Places, torch.Tensor], torch.Tensor], dtype: torch.dtype
) -> DTensor[Any]:
    """The DTensor of `made(block, places)` on each rank's block of `x`, in the layout of `x`."""
    type = TensorType(x.shape, dtype, x.layout)
    rank = x.comm.rank
    ranks = type.mesh.order if rank is None else (rank,)
    leaves = [
        empty(type, r, leaf) if (coord := type.mesh.coord(r)) is None
        else of_block(Places(type.shape, type.box(coord)), leaf)
        for r, leaf in zip(ranks, x.comm.leaves(x.local), strict=True)
    ]  # fmt: skip
    return DTensor(x.comm.value(leaves), type, x.comm)


def checked_shape(shape: Any) -> tuple[int, ...]:
    """The sizes; raises `FdtensorError` for what is no shape."""
    try:
        sizes = (integer(shape),) if isinstance(shape, int) else tuple(map(integer, shape))
    except (TypeError, AttributeError):
        sizes = (-1,)
    if any(size < 0 for size in sizes) or prod(sizes) >> 63:
        raise FdtensorError(
            f"{shape!r} is not a shape.",
            hint="Pass a tuple of ints, 0 or more, or a TensorType and a Comm.",
        )
    return sizes


def checked_dtype(
    shape: Any, dtype: Any, default: torch.dtype, among: Collection[torch.dtype], about: str
) -> torch.dtype:
    """The dtype that is drawn, one of these; raises `FdtensorError` for any other."""
    chosen = dtype or default
    if isinstance(shape, TensorType):
        if dtype is not None and dtype != shape.dtype:
            raise FdtensorError(
                f"{shape} is not of {_name(dtype)}.", hint="Leave dtype out: the type says it."
            )
        chosen = shape.dtype
    if chosen not in among:
        names = ", ".join(map(str, among))
        raise FdtensorError(f"{about} cannot draw {_name(chosen)}.", hint=f"Use one of: {names}.")
    return chosen


def _name(dtype: Any) -> str:
    return dtype_name(dtype) if isinstance(dtype, torch.dtype) else repr(dtype)
