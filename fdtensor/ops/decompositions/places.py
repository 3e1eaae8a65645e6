"""Parts at places that tensors say, as `x[j]`: torch reads the number, a program takes an index."""

from __future__ import annotations

import numpy as np
import torch

from fdtensor.layouts.callsite import user_line
from fdtensor.layouts.errors import DataDependentError
from fdtensor.layouts.torch_private import is_batched
from fdtensor.ops.parts import note_part
from fdtensor.ops.transparent import recorded_as
from fdtensor.ops.writes import checked_write

__all__ = ["has_places", "part_at", "set_at"]

Tensor = torch.Tensor

_INTEGERS = {torch.int64, torch.int32, torch.int16, torch.int8}


def has_places(key):
    """Whether an index has places that tensors say; raises for slices between such places."""
    entries = key if isinstance(key, tuple) else (key,)
    for entry in entries:
        ends = (entry.start, entry.stop, entry.step) if isinstance(entry, slice) else ()
        if any(isinstance(end, Tensor) for end in ends):
            raise DataDependentError(
                "the ends of a slice are tensors, whose values a traced function does not know.",
                line=user_line() or "not known",
                hint="Of a length that is known it is a part by index: x.narrow(0, i * 2, 2), or "
                "x.index_select(0, i * 2 + torch.arange(2)), for x[i * 2 : (i + 1) * 2].",
            )
    return any(map(_is_place, entries))


def part_at(x, key):
    """`x[key]`: each place is the one of a dim of which a place alone is taken."""
    entries, part = _entries(key), x
    for n, dim in _dims(x, entries):
        part = part[(*[slice(None)] * dim, entries[n].reshape(1).long())]
        entries[n] = 0
    part = part[tuple(entries)]
    is_view = all(e is None or e is ... or type(e) in (int, slice) for e in entries)
    return note_part(part, x) if is_view else part


def set_at(x, key, value, write):
    """`x[key] = value`: into a part at the first of the places by `write`, and that into `x`."""
    entries = _entries(key)
    n, dim = next(_dims(x, entries))
    place = _counted(entries[n], x.shape[dim]).reshape(1).long()
    entries[n] = 0
    key = (*[slice(None)] * dim, place)
    own = is_batched(place)  # torch's rules for it keep x for a derivative, and x is written to
    part = x[key] if own else x.index_select(dim, place)
    write(part, tuple(entries), value)
    if own:
        write(x, key, part)
    else:
        checked_write(Tensor.index_copy_, (x, dim, place, part), {})


def _is_place(entry):
    return isinstance(entry, Tensor) and not entry.ndim and entry.dtype in _INTEGERS


def _entries(key):
    return [*key] if isinstance(key, tuple) else [key]


def _dims(x, entries):
    """The numbers of the entries that are places, each with its dim."""
    taken = [*map(_taken, entries)]
    cut = next((n for n, entry in enumerate(entries) if entry is ...), len(entries))
    for n, entry in enumerate(entries):
        if _is_place(entry):
            yield n, sum(taken[:n]) if n < cut else x.ndim - sum(taken[n:])


def _taken(entry):
    """How many dims an entry of an index stands for; those of an ellipsis are not counted."""
    if entry is None or entry is ... or isinstance(entry, bool):
        return 0
    if isinstance(entry, np.ndarray):
        return entry.ndim if entry.dtype == bool else 1
    if isinstance(entry, (list, tuple)):
        first, depth = entry, 0
        while isinstance(first, (list, tuple)) and first:
            first, depth = first[0], depth + 1
        return depth if isinstance(first, bool) else 1
    masks = isinstance(entry, Tensor) and entry.dtype in (torch.bool, torch.uint8)
    return entry.ndim if masks else 1


def _counted(j, size):
    """A place counted from the start; one that is out of range stays so."""
    return torch.where(j < 0, j + size, j)


@recorded_as(torch.select, Tensor.select)
def select(input, dim, index):
    """`out[i, k] = x[i, j, k]`"""
    if not _is_place(index):
        return checked_write(torch.select, (input, dim, index), {})
    return part_at(input, (*[slice(None)] * (dim % input.ndim), index))


@recorded_as(torch.narrow, Tensor.narrow)
def narrow(input, dim, start, length):
    """`out[i, k] = x[i, j + k]`"""
    if not _is_place(start):
        return checked_write(torch.narrow, (input, dim, start, length), {})
    places = _counted(start, input.shape[dim]) + torch.arange(length, device=start.device)
    return note_part(input.index_select(dim, places), input)
