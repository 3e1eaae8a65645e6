"""`sliced` and `put_back`: `as_strided` of a row-major tensor as slices of it, where it is that.

Autograd takes what a write to a slice has changed by `as_strided`, which counts elements in memory;
slices keep cuts of the other dims.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch

__all__ = ["Part", "part_of", "put_back", "shape_of", "sliced"]

aten = torch.ops.aten


@attrs.frozen
class Part:
    """The part of a tensor that slices of its dims give: for each the first, the number, the step.

    A number of 0 stands for one entry, without the dim.
    """

    along: tuple[tuple[int, int, int], ...]


def part_of(
    shape: Sequence[int], size: Sequence[int], stride: Sequence[int], offset: int
) -> Part | None:
    """The part of a row-major tensor that `as_strided` gives, but for dims of size 1.

    None where it is no such part.
    """
    numbers = (*shape, *size, *stride, offset)
    if not all(type(n) is int for n in numbers) or 0 in (*shape, *size):
        return None
    wanted = [(s, n) for s, n in zip(stride, size, strict=True) if n > 1]
    along: list[tuple[int, int, int]] = []
    step_in_memory = 1
    for n in shape:
        step_in_memory *= n
    for n in shape:
        step_in_memory //= n
        start, offset = divmod(offset, step_in_memory)
        count, step = 0, 1
        if wanted and n > 1 and wanted[0][0] >= step_in_memory:
            step, rest = divmod(wanted[0][0], step_in_memory)
            count = wanted.pop(0)[1]
            if rest:
                return None
        if start + (max(count, 1) - 1) * step >= n:
            return None
        along.append((start, count, step))
    return None if wanted or offset else Part(tuple(along))


def shape_of(count: int, size: Sequence[int], stride: Sequence[int]) -> list[int] | None:
    """The shape in which `count` elements in a row have these strides; None where there is none."""
    if not all(type(n) is int and n > 0 for n in (count, *size, *stride)):
        return None
    shape: list[int] = []
    for step, n in zip(stride, size, strict=True):
        if n > 1 and step > count:
            return None
        if n > 1 and not count % step:
            shape.append(count // step)
            count = step
    return [*shape, count]


def _views(x: torch.Tensor, part: Part) -> list[tuple[torch.Tensor, Any]]:
    """Each tensor on the way to a part of `x`, and the slice that is next; at last the part."""
    views: list[Any] = []
    for d, (start, count, step) in enumerate(part.along):
        if (start, max(count, 1), step) != (0, x.shape[d], 1):
            along = (d, start, start + (max(count, 1) - 1) * step + 1, step)
            views.append((x, along))
            x = aten.slice.Tensor(x, *along)
    return [*views, (x, ())]


def sliced(x: torch.Tensor, part: Part, size: Sequence[int]) -> torch.Tensor:
    """The part of a tensor, in this shape."""
    return _in_shape(_views(x, part)[-1][0], size)


def put_back(x: torch.Tensor, values: torch.Tensor, part: Part) -> torch.Tensor:
    """The tensor with other values in this part of it."""
    *views, (last, _) = _views(x, part)
    new = _in_shape(values, last.shape)
    for view, along in reversed(views):
        new = aten.slice_scatter.default(view, new, *along)
    return new


def _in_shape(x: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    return x if [*x.shape] == [*size] else aten.view.default(x, [*size])
