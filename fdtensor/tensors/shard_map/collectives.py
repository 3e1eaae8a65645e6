"""The named collectives: what a function in `shard_map` calls, by the names of mesh axes.

`axis` is a name or a tuple of names, from major to minor. All are differentiable, forward, twice
and under `torch.func`; the cotangent of what a rank gives is that of its own copy, as in JAX.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from fdtensor.layouts.dtypes import dtype_name, reducible
from fdtensor.layouts.errors import CommError, FdtensorError, LayoutError
from fdtensor.layouts.kinds import is_iterable
from fdtensor.layouts.placement import Partial, Ragged, ReduceOp, Replicate
from fdtensor.layouts.record import integer
from fdtensor.layouts.torch_private import current_graph_task, transforms_active
from fdtensor.ops.transparent import recording
from fdtensor.tensors.shard_map.moves import LocalCollective, Move, Permute, blocks, quoted
from fdtensor.tensors.shard_map.places import Call, OneRank, Place, current
from fdtensor.tensors.shard_map.varying import Extreme, Linear, Tie, is_tracked

__all__ = [
    "all_gather",
    "all_to_all",
    "axis_index",
    "axis_size",
    "pmax",
    "pmean",
    "pmin",
    "ppermute",
    "psum",
    "reduce_scatter",
]

Axis = str | Sequence[str]


def axis_size(axis: Axis) -> int:
    """How many ranks there are along `axis`.

    >>> mesh = Mesh(x=2)
    >>> rows = mesh.layout("x")
    >>> x = distribute(torch.arange(1, 5), rows, SimulatedComm(mesh))
    >>> shard_map(lambda b: b * fd.collectives.axis_size("x"), mesh, rows, rows)(x).local
    (tensor([2, 4]), tensor([6, 8]))
    """
    place, axes = _here("axis_size", axis)
    size = 1
    for name in axes:
        size *= place.mesh.axis_size(name)
    return size


def axis_index(axis: Axis) -> int:
    """The index of this rank along `axis`; of several axes the last one counts fastest.

    >>> mesh = Mesh(x=2)
    >>> rows = mesh.layout("x")
    >>> x = distribute(torch.arange(1, 5), rows, SimulatedComm(mesh))
    >>> shard_map(lambda b: 0 * b + fd.collectives.axis_index("x"), mesh, rows, rows)(x).local
    (tensor([0, 0]), tensor([1, 1]))
    """
    place, axes = _here("axis_index", axis)
    return place.index(axes)


def psum(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The sum over the ranks along `axis`: `[A] [B] -> [A+B] [A+B]`. Bools are counted.

    >>> mesh = Mesh(x=2)
    >>> rows = mesh.layout("x")
    >>> x = distribute(torch.arange(1, 5), rows, SimulatedComm(mesh))
    >>> shard_map(lambda b: fd.collectives.psum(b, "x"), mesh, rows, rows)(x).local
    (tensor([4, 6]), tensor([4, 6]))
    """
    if isinstance(x, torch.Tensor) and x.dtype == torch.bool:
        x = x.to(torch.int64)
    return _reduced("psum", "sum", x, axis)


def pmean(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The mean over the ranks along `axis`: `[A] [B] -> [(A+B)/2] [(A+B)/2]`.

    >>> mesh = Mesh(x=2)
    >>> rows = mesh.layout("x")
    >>> x = distribute(torch.arange(4.0), rows, SimulatedComm(mesh))
    >>> shard_map(lambda b: fd.collectives.pmean(b, "x"), mesh, rows, rows)(x).local
    (tensor([1., 2.]), tensor([1., 2.]))
    """
    return _reduced("pmean", "avg", x, axis) / axis_size(axis)


def pmax(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The elementwise maximum over the ranks along `axis`; ranks that tie share its cotangent.

    >>> mesh = Mesh(x=2)
    >>> rows = mesh.layout("x")
    >>> x = distribute(torch.arange(1, 5), rows, SimulatedComm(mesh))
    >>> shard_map(lambda b: fd.collectives.pmax(b, "x"), mesh, rows, rows)(x).local
    (tensor([3, 4]), tensor([3, 4]))
    """
    return _reduced("pmax", "max", x, axis)


def pmin(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The elementwise minimum over the ranks along `axis`; ranks that tie share its cotangent.

    >>> mesh = Mesh(x=2)
    >>> rows = mesh.layout("x")
    >>> x = distribute(torch.arange(1, 5), rows, SimulatedComm(mesh))
    >>> shard_map(lambda b: fd.collectives.pmin(b, "x"), mesh, rows, rows)(x).local
    (tensor([1, 2]), tensor([1, 2]))
    """
    return _reduced("pmin", "min", x, axis)


def all_gather(x: torch.Tensor, axis: Axis, dim: int = 0, tiled: bool = True) -> torch.Tensor:
    """The blocks of all ranks along `axis`, one after the other: `[A] [B] -> [A B] [A B]`.

    Blocks may differ in size along `dim`. With `tiled=False` they are stacked along a new `dim`.

    >>> mesh = Mesh(x=2)
    >>> rows = mesh.layout("x")
    >>> x = distribute(torch.arange(1, 5), rows, SimulatedComm(mesh))
    >>> whole = shard_map(lambda b: fd.collectives.all_gather(b, "x"), mesh, rows)
    >>> whole(x).local
    (tensor([1, 2, 3, 4]), tensor([1, 2, 3, 4]))
    """
    name = f"all_gather[dim={dim}]" if tiled else f"all_gather[dim={dim}, tiled=False]"
    place, axes = _here("all_gather", axis, x)
    if not tiled:
        x = x.unsqueeze(_dim("all_gather", dim, x.dim() + 1))
    dim = _dim("all_gather", dim, x.dim())
    sizes, tracked = _met(name, place, axes, x, free=dim)
    return _moved(place, Move(axes, Ragged(dim, sizes), Replicate()), x, tracked)


def reduce_scatter(x: torch.Tensor, axis: Axis, dim: int = 0) -> torch.Tensor:
    """A block of the sum over `axis` for each rank: `[A B] [C D] -> [A+C] [B+D]`.

    Dim `dim` is cut as `Shard(dim)` does: the last blocks may be short or empty.

    >>> mesh = Mesh(x=2)
    >>> rows = mesh.layout("x")
    >>> x = distribute(torch.arange(1, 5), rows, SimulatedComm(mesh))
    >>> shard_map(lambda b: fd.collectives.reduce_scatter(b, "x", dim=0), mesh, rows, rows)(x).local
    (tensor([4]), tensor([6]))
    """
    place, axes = _here("reduce_scatter", axis, x)
    _has("reduce_scatter", "sum", x)
    dim = _dim("reduce_scatter", dim, x.dim())
    sizes, tracked = _met(f"reduce_scatter[dim={dim}]", place, axes, x)
    cut = Ragged(dim, blocks(x.shape[dim], len(sizes)))
    return _moved(place, Move(axes, Partial("sum"), cut), x, tracked)


def all_to_all(x: torch.Tensor, axis: Axis, split_dim: int, concat_dim: int) -> torch.Tensor:
    """Cuts `split_dim` as `Shard` does, sends block i to rank i and joins along `concat_dim`.

    `[A B] [C D] -> [A C] [B D]`. Ranks may differ in size along `concat_dim`.

    >>> mesh = Mesh(x=2)
    >>> rows, columns = mesh.layout("x"), mesh.layout(None, "x")
    >>> x = distribute(torch.arange(8).reshape(2, 4), rows, SimulatedComm(mesh))
    >>> turned = shard_map(lambda b: fd.collectives.all_to_all(b, "x", 1, 0), mesh, rows, columns)
    >>> turned(x).local
    (tensor([[0, 1],
            [4, 5]]), tensor([[2, 3],
            [6, 7]]))
    """
    place, axes = _here("all_to_all", axis, x)
    split, concat = (_dim("all_to_all", d, x.dim()) for d in (split_dim, concat_dim))
    name, count = f"all_to_all[split_dim={split}, concat_dim={concat}]", axis_size(axis)
    if split == concat:
        size = x.shape[split]
        if size % count:
            raise LayoutError(
                f"all_to_all over {quoted(axes)} cannot cut dim {split} of {size} into {count} "
                "even blocks, to join them along the same dim.",
                hint=f"Give every rank a multiple of {count}, or join along another dim.",
            )
        _, tracked = _met(name, place, axes, x)
        rows = x.unflatten(split, (count, size // count)).movedim(split, 0)[None]
        move = Move(axes, Ragged(0, (1,) * count), Ragged(1, (1,) * count))
        return _moved(place, move, rows, tracked)[:, 0].movedim(0, split).flatten(split, split + 1)
    sizes, tracked = _met(name, place, axes, x, free=concat)
    cut = Ragged(split, blocks(x.shape[split], count))
    return _moved(place, Move(axes, Ragged(concat, sizes), cut), x, tracked)


def ppermute(x: torch.Tensor, axis: Axis, perm: Iterable[tuple[int, int]]) -> torch.Tensor:
    """Sends from index `src` along `axis` to index `dst`, for each pair `(src, dst)` of `perm`.

    Ranks that nobody sends to get zeros. An index sends at most once and receives at most once.

    >>> mesh = Mesh(x=2)
    >>> rows = mesh.layout("x")
    >>> x = distribute(torch.arange(1, 5), rows, SimulatedComm(mesh))
    >>> swapped = [(0, 1), (1, 0)]
    >>> shard_map(lambda b: fd.collectives.ppermute(b, "x", swapped), mesh, rows, rows)(x).local
    (tensor([3, 4]), tensor([1, 2]))
    """
    place, axes = _here("ppermute", axis, x)
    try:
        pairs = tuple(sorted((integer(src), integer(dst)) for src, dst in perm))
    except (TypeError, ValueError, AttributeError):
        raise CommError(
            f"{perm!r} is not a permutation.", hint="Give pairs of indices: [(0, 1), (1, 0)]."
        ) from None
    count = len(_ranks(place, axes, place.rank))
    ends = list(zip(*pairs, strict=True)) or [(), ()]
    if any(len(set(end)) < len(end) or not set(end) <= set(range(count)) for end in ends):
        raise CommError(
            f"ppermute over {quoted(axes)} names an index twice, or one that is not there.",
            perm=pairs,
            hint=f"Let each of the indices 0 to {count - 1} send at most once and receive at most "
            "once.",
        )
    _, tracked = _met(f"ppermute[perm={[*pairs]}]", place, axes, x)
    return _moved(place, Permute(axes, pairs), x, tracked)


# --- what they share -------------------------------------------------------------------------


_OUTSIDE = "Call it in the function that you give to shard_map(f, mesh, ...)."

_AFTERWARDS = (
    "A backward calls it, when the function of shard_map is done: take torch.utils.checkpoint of "
    "what shard_map gives, not of a part of its function."
)


def _here(name: str, axis: Axis, *tensors: object) -> tuple[Place, tuple[str, ...]]:
    """Where this runs and the axes by name."""
    place = current()
    if place is None:
        raise CommError(
            f"{name} is called outside of shard_map.",
            hint=_AFTERWARDS if current_graph_task() != -1 else _OUTSIDE,
        )
    if recording() and isinstance(place, OneRank):  # it would wait for ranks that wait for it
        raise CommError(
            f"{name} is called in a traced function inside of shard_map.",
            hint="Call it in the function of shard_map itself, or trace a function that has the "
            "shard_map in it.",
        )
    axes: Any = (axis,) if isinstance(axis, str) or not is_iterable(axis) else tuple(axis)
    for axis_name in axes:
        place.mesh.axis(axis_name)
    if not axes or len(set(axes)) < len(axes):
        raise CommError(
            f"{name} over {axis!r} names no axis, or one twice.",
            mesh=place.mesh,
            hint="Name each axis once.",
        )
    for x in tensors:
        if not isinstance(x, torch.Tensor):
            raise CommError(
                f"{name} of {x!r}, which is not a tensor.",
                hint="Give it a tensor; axis_size(axis) is the number of ranks.",
            )
    return place, axes


def _ranks(place: Place, axes: tuple[str, ...], rank: int) -> tuple[int, ...]:
    """The ranks along `axes` through `rank`."""
    return place.mesh.coset(axes, place.mesh.coord(rank) or ())


def _dim(name: str, dim: int, ndim: int) -> int:
    """The dim counted from the front."""
    if not isinstance(dim, int) or not -ndim <= dim < ndim:
        raise LayoutError(
            f"{name} along dim {dim!r} of a tensor that has {ndim} dims.",
            hint=f"Use a dim from 0 to {ndim - 1}." if ndim else "Unsqueeze it first.",
        )
    return dim % ndim


def _has(name: str, op: ReduceOp, x: torch.Tensor) -> None:
    if not reducible(x.dtype, op):
        raise LayoutError(
            f"{name} of a tensor of {dtype_name(x.dtype)}, which has no {op}.",
            hint="Convert it first, such as with x.float().",
        )


def _met(
    what: str, place: Place, axes: tuple[str, ...], x: torch.Tensor, free: int | None = None
) -> tuple[tuple[int, ...], bool]:
    """After all ranks have said that they call this: what the ranks along `axes` have of dim
    `free`, and whether any rank tracks its tensor.

    Raises `CommError` on all ranks where shapes differ elsewhere.
    """
    call = Call.of(f"{what} over {quoted(axes)}", [x], [is_tracked(x)])
    table = dict(zip(place.mesh.order, place.meet(call), strict=True))
    for rank, own_call in table.items():
        first = _ranks(place, axes, rank)[0]
        shapes = [list(table[r].shapes[0]) for r in (first, rank)]
        for shape in shapes:
            if free is not None and free < len(shape):
                shape[free] = -1
        if shapes[0] != shapes[1]:
            raise _agreed(place, CommError(
                f"ranks {first} and {rank} call {what} over {quoted(axes)} with shapes "
                f"{table[first].shapes[0]} and {own_call.shapes[0]}.",
                hint="Give it tensors of one shape"
                + (f", but for dim {free}." if free is not None else "."),
            ))  # fmt: skip
    own = [table[r].shapes[0] for r in _ranks(place, axes, place.rank)]
    sizes = tuple([shape[free] if free is not None else 0 for shape in own])
    return sizes, any(own_call.tracked[0] for own_call in table.values())


def _agreed(place: Place, error: FdtensorError) -> FdtensorError:
    """The error, which all ranks raise: none waits to hear of it."""
    if hasattr(place, "over"):
        place.over = True  # type: ignore[attr-defined]
    return error


def _reduced(name: str, op: ReduceOp, x: torch.Tensor, axis: Axis) -> torch.Tensor:
    place, axes = _here(name, axis, x)
    _has(name, op, x)
    _, tracked = _met(name, place, axes, x)
    if op in ("max", "min"):
        return _moved(place, Move(axes, Partial(op), Replicate()), x, tracked, Extreme)
    return _moved(place, Move(axes, Partial("sum"), Replicate()), x, tracked)


def _moved(
    place: Place, move: LocalCollective, x: torch.Tensor, tracked: bool, by: Any = None
) -> torch.Tensor:
    """The tensor after a move; where `some` rank tracks it, all run the backward, in this order."""
    by, x = by or Linear, place.own(x)
    if not tracked or place.token is None or transforms_active():
        return by.apply(place, move, x)
    if not x.requires_grad:
        x, place.token = Tie.apply(x, place.token)  # type: ignore[misc]
    x, place.token = Tie.apply(by.apply(place, move, x), place.token)  # type: ignore[misc]
    return x
