"""A sort along a dim that is cut: four sorts of each block, and three fixed deals between them."""

from __future__ import annotations

import torch

from fdtensor.ops.decompositions.core import decomposition
from fdtensor.ops.decompositions.scan import in_blocks, joined_blocks
from fdtensor.ops.notation.core import S, rule
from fdtensor.ops.notation.dtypes import highest, lowest
from fdtensor.ops.own_ops import own_op

aten = torch.ops.aten

Tensor = torch.Tensor

SMALL = 1 << 31
"""How many places an int32 tells apart."""


def _in_blocks(x: Tensor, blocks: int, fill: float) -> Tensor:
    """The last dim of `x` as blocks that can be halved and dealt to all, ended by `fill`."""
    parts = in_blocks(x, x.ndim - 1, blocks, fill)
    lack = -parts.shape[-1] % (blocks if blocks % 2 == 0 else 2 * blocks)
    return aten.constant_pad_nd(parts, [0, lack], fill) if lack else parts


def _dealt(x: Tensor) -> Tensor:
    """The elements of each block, of which every block gets one in turn."""
    blocks, size = x.shape[-2:]
    return x.unflatten(-1, (size // blocks, blocks)).movedim(-1, -3).flatten(-2)


def _collected(x: Tensor) -> Tensor:
    """The elements where they were before they were dealt."""
    blocks, size = x.shape[-2:]
    return x.unflatten(-1, (blocks, size // blocks)).movedim(-3, -1).flatten(-2)


def _across(first: Tensor, second: Tensor) -> Tensor:
    """The second half of each block but the last, with the first half of the next."""
    return torch.cat([second[..., :-1, :], first[..., 1:, :]], -1)


def _whole(first: Tensor, second: Tensor, across: Tensor) -> Tensor:
    """The blocks of these halves, with what came of those on both sides of each border."""
    before, after = across.chunk(2, -1)
    first = torch.cat([first[..., :1, :], after], -2)
    second = torch.cat([before, second[..., -1:, :]], -2)
    return torch.cat([first, second], -1)


def _places(order: Tensor, size: int, none: int) -> Tensor:
    """Where the elements of sorted blocks were, and `none` for those after a block of `size`."""
    blocks = order.shape[-2]
    starts = torch.arange(0, blocks * size, size, device=order.device)
    places = order + starts[:, None]
    if order.shape[-1] != size:
        places = torch.where(order < size, places, none)
    return places.to(torch.int32) if none < SMALL else places


def _by_place(values: Tensor, places: Tensor) -> Tensor:
    if not values.numel():
        return places.clone()
    a, b = values[..., 1:], values[..., :-1]
    differ = a != b
    if values.is_floating_point():
        differ &= ~(a.isnan() & b.isnan())
    run = torch.nn.functional.pad(differ.cumsum(-1), (1, 0))
    least, greatest = places.aminmax()
    span = greatest.long() - least + 1
    ordered = torch.sort(run * span + (places - least), -1).values % span
    return (ordered + least).to(places.dtype)


BY_PLACE = own_op(
    "by_place(Tensor values, Tensor places) -> Tensor",
    _by_place,
    lambda _, places: torch.empty_like(places),
)
"""The places beside values that are sorted along the last dim, in order where these are equal."""


@rule(BY_PLACE)
def by_place(values, places):
    """`out[i, :]`: `places[i, :]`, sorted within each run of equal `values[i, :]`"""
    for d in range(values.ndim - 1):
        yield (S(d), S(d)), S(d)


@decomposition(aten.sort.default, aten.sort.stable, blocked=True)
def sort(blocks, x, dim=-1, descending=False, *, stable=False):
    """`values` of all blocks in order, and where they were; equal ones stay in their order.

    Leighton, "Tight Bounds on the Complexity of Parallel Sorting" (1985), columnsort: which
    elements move does not depend on their values, if a block has `2 * (blocks - 1)**2` of them.
    """
    if not x.ndim:
        raise NotImplementedError("a scalar has no blocks")
    fill = lowest(x.dtype) if descending else highest(x.dtype)
    if not descending and x.is_floating_point():
        fill = torch.nan
    last = dim in (-1, x.ndim - 1)
    count, along = x.shape[dim], x if last else x.movedim(dim, -1)
    parts = _in_blocks(along, blocks, fill)
    if parts.shape[-1] < 2 * (blocks - 1) ** 2:
        raise NotImplementedError("blocks of a few elements are not in order after four sorts")

    def ordered(t: Tensor) -> tuple[Tensor, Tensor]:
        return torch.sort(t, stable=True, dim=-1, descending=descending)

    size, none = -(-count // blocks), parts.shape[-1] * blocks
    values, order = ordered(parts)
    places = _places(order, size, none)
    values, order = ordered(_dealt(values))
    places = _dealt(places).gather(-1, order)
    if parts.shape[-1] != size:  # what fills a block comes after all elements, not after its own
        places = BY_PLACE(values, places)
    values, order = ordered(_collected(values))
    places = BY_PLACE(values, _collected(places).gather(-1, order))
    first, second = values.chunk(2, -1)
    across, order = ordered(_across(first, second))
    values = _whole(first, second, across)
    first, second = places.chunk(2, -1)
    places = BY_PLACE(across, _across(first, second).gather(-1, order))
    places = _whole(first, second, places)
    values, places = (joined_blocks(t, x.ndim - 1, count) for t in (values, places.long()))
    return (values, places) if last else (values.movedim(-1, dim), places.movedim(-1, dim))
