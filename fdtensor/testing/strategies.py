"""Hypothesis strategies, one a record: the definition of "any mesh", "any layout", "any type".

In every strategy None draws an argument, and a value pins it. Sizes are tiny: dims of 0 to 7, up
to 3 of them, meshes of up to 3 axes of up to 3 ranks. Examples shrink towards few ranks, then
`Replicate`, then `Shard`.

    @given(types(dtype=torch.float32))
    def test_bytes_add_up(type):
        assert type.nbytes <= sum(type.local_nbytes(rank) for rank in type.mesh.ranks)
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from itertools import permutations
from math import prod

import torch
from hypothesis import strategies as st

from fdtensor.layouts.errors import LayoutError
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import (
    REDUCE_OPS,
    Cut,
    Partial,
    Placement,
    Ragged,
    ReduceOp,
    Replicate,
    Shard,
    StridedShard,
)
from fdtensor.layouts.tensor_type import TensorType

__all__ = [
    "layouts",
    "meshes",
    "placements",
    "redistributions",
    "shapes",
    "types",
]

Shape = tuple[int, ...]

MOVEMENT = (Replicate, Shard, StridedShard, Ragged)
"""The placements that have nothing pending."""

DTYPES = (
    torch.int64,
    torch.float32,
    torch.bool,
    torch.uint8,
    torch.bfloat16,
    torch.float64,
    torch.complex64,
    torch.int16,
)
"""The dtypes that `types(dtype=None)` draws from: one of each kind and width."""

_AXES = ("dp", "tp", "pp", "ep")
# Most laws say little of an empty dim, a mesh of one rank or a single axis: the rest comes oftener.
_DIMS = (0, 1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4, 5, 6, 7)
_COUNTS = (0, 1, 2, 3, 1, 2, 3, 2, 3, 2)


def shapes(max_ndim: int = 3) -> st.SearchStrategy[Shape]:
    """Any shape of up to `max_ndim` dims of 0 to 7: `shapes()` draws `()`, `(3,)`, `(2, 0, 5)`.

    >>> from hypothesis import find
    >>> find(fd.testing.shapes(), lambda shape: sum(shape) == 3)
    (3,)
    """
    counts = st.sampled_from([n for n in _COUNTS if n <= max_ndim])
    return counts.flatmap(lambda n: st.tuples(*[st.sampled_from(_DIMS)] * n))


@st.composite
def meshes(
    draw: st.DrawFn,
    *,
    max_axes: int = 3,
    max_size: int = 3,
    max_ranks: int = 27,
    world: int | Sequence[int] | None = None,
) -> Mesh:
    """Any mesh of up to `max_axes` axes of up to `max_size` ranks, in any order of the ranks.

    Ranks count from 0 without gaps; with `world` they are any of these ranks, or of `range(world)`:
    `meshes(world=4)` fits a pool of 4. The mesh without axes, of one rank, is among them.

    >>> from hypothesis import find
    >>> find(fd.testing.meshes(), lambda mesh: mesh.size == 4)
    Mesh(dp=2, tp=2)
    """
    among = range(max_ranks) if world is None else range(world) if isinstance(world, int) else world
    sizes: list[int] = []
    for _ in range(draw(st.sampled_from([n for n in _COUNTS if n <= max_axes]))):
        most = min(max_size, min(max_ranks, len(among)) // prod(sizes))
        sizes.append(draw(st.sampled_from([*range(1, most + 1), *range(2, most + 1)])))
    count = prod(sizes)
    if world is None:
        among = range(count)
    if draw(st.booleans()):
        among = draw(st.permutations(among))
    return _mesh(draw, among[:count], sizes)


@st.composite
def placements(
    draw: st.DrawFn,
    shape: Shape | None = None,
    count: int | None = None,
    *,
    dim: int | None = None,
    partial: bool | Collection[ReduceOp] = True,
    kinds: Sequence[type[Placement]] = MOVEMENT,
) -> Placement:
    """Any placement that an axis of `count` ranks may give to a tensor of `shape`, cutting `dim`.

    `partial` says whether it may be pending, or with which reduce ops; `kinds` what else it may be:
    `placements((6, 4), 2, partial=["sum"], kinds=[Replicate, Shard])`.

    >>> from hypothesis import find
    >>> find(fd.testing.placements((6, 4), 2), lambda placement: placement != Replicate())
    Shard(0)
    """
    shape = draw(shapes()) if shape is None else shape
    count = draw(st.integers(1, 3)) if count is None else count
    ops = _ops(partial)
    possible = [kind for kind in kinds if shape or kind is Replicate] + [Partial] * bool(ops)
    kind = draw(st.sampled_from(possible or [Replicate]))
    if kind is Replicate:
        return Replicate()
    if kind is Partial:
        return Partial(draw(st.sampled_from(ops)))
    dim = draw(st.integers(0, len(shape) - 1)) if dim is None else dim
    if kind is Shard:
        return Shard(dim)
    if kind is StridedShard:
        return StridedShard(dim, draw(st.integers(1, 4)))
    bounds = st.integers(0, shape[dim])
    inner = sorted(draw(st.lists(bounds, min_size=count - 1, max_size=count - 1)))
    stops = (*inner, shape[dim])
    return Ragged(dim, tuple(b - a for a, b in zip((0, *inner), stops, strict=True)))


@st.composite
def layouts(
    draw: st.DrawFn,
    mesh: Mesh | None = None,
    shape: Shape | None = None,
    *,
    partial: bool | Collection[ReduceOp] = True,
    kinds: Sequence[type[Placement]] = MOVEMENT,
) -> Layout:
    """Any layout of a tensor of `shape` on `mesh`, with any order of the axes that cut a dim.

    All partial axes have one reduce op. Often all cuts are of one dim, one inside the other; there
    a second ragged shard becomes a Shard. `layouts(Mesh(dp=2, tp=2), (8, 5), partial=False)` draws
    those that have nothing pending.

    >>> from hypothesis import find
    >>> find(fd.testing.layouts(Mesh(dp=2, tp=2), (8, 5)), lambda layout: layout["tp"] == Shard(1))
    Layout(Mesh(dp=2, tp=2), (Replicate(), Shard(1)))
    """
    mesh = draw(meshes()) if mesh is None else mesh
    shape = draw(shapes()) if shape is None else shape
    ops = _ops(partial)
    ops = (draw(st.sampled_from(ops)),) if ops else ()
    focus = draw(st.none() | st.integers(0, len(shape) - 1)) if shape else None
    chosen: dict[str, Placement] = {}
    first: dict[int, str] = {}
    for axis, count in zip(mesh.axes, mesh.sizes, strict=True):
        chosen[axis] = draw(placements(shape, count, dim=focus, partial=ops, kinds=kinds))
        match chosen[axis]:
            case Ragged(dim) if dim in first:
                chosen[axis] = Shard(dim)
            case Ragged(dim):
                first[dim] = axis
    order = {}
    for dim in range(len(shape)):
        cutting = [a for a, p in chosen.items() if isinstance(p, Cut) and p.dim == dim]
        order[dim] = sorted(draw(st.permutations(cutting)), key=lambda a: a != first.get(dim))
    return Layout(mesh, tuple(chosen.values()), order)


@st.composite
def types(
    draw: st.DrawFn,
    mesh: Mesh | None = None,
    shape: Shape | None = None,
    dtype: torch.dtype | None = torch.int64,
    *,
    partial: bool | Collection[ReduceOp] = True,
    kinds: Sequence[type[Placement]] = MOVEMENT,
) -> TensorType:
    """Any tensor type; only the reduce ops that its dtype has are pending.

    `dtype=None` draws one of each kind and width; `types(Mesh(x=4), (6, 5))` draws layouts alone.

    >>> from hypothesis import find
    >>> print(find(fd.testing.types(Mesh(x=4), (6, 5)), lambda x: x.layout["x"] == Shard(0)))
    i64[6@x,5]
    """
    shape = draw(shapes()) if shape is None else shape
    dtype = draw(st.sampled_from(DTYPES)) if dtype is None else dtype
    ops: tuple[ReduceOp, ...] = tuple(op for op in _ops(partial) if op in _reduce_ops(dtype))
    return TensorType(shape, dtype, draw(layouts(mesh, shape, partial=ops, kinds=kinds)))


@st.composite
def redistributions(
    draw: st.DrawFn,
    world: int | None = None,
    cross_mesh: bool = False,
    *,
    mesh: Mesh | None = None,
    shape: Shape | None = None,
    dtype: torch.dtype | None = torch.int64,
    partial: bool | Collection[ReduceOp] = True,
    dst_partial: bool | Collection[ReduceOp] | None = None,
    kinds: Sequence[type[Placement]] = MOVEMENT,
) -> tuple[TensorType, TensorType]:
    """Any two types of one tensor: `(src, dst)`, on one mesh or, with `cross_mesh`, on any two.

    `mesh` pins that of the source, `dst_partial` is `partial` of the destination where it differs.
    Two meshes are over `range(world)`, 8 ranks where not given: overlapping, disjoint, or with the
    same ranks in another order.

        @given(redistributions(dtype=torch.float32, dst_partial=False))
        def test_no_plan_receives_less(pair):
            assert plan(*pair).received_bytes >= plan(*pair).lower_bound_bytes

    >>> from hypothesis import find
    >>> pair = find(fd.testing.redistributions(), lambda pair: plan(*pair).received_bytes > 0)
    >>> print(plan(*pair))
    i64[]{sum:dp} -> i64[] on Mesh(dp=2)
      exchange[axis=dp reduce_op=sum way=peer_to_peer]  i64[]  8 B
    1 step, 8 B received per rank
    """
    if cross_mesh and world is None:
        world = 8
    src = draw(types(mesh or draw(meshes(world=world)), shape, dtype, partial=partial, kinds=kinds))
    other = draw(_others(src.mesh, world)) if cross_mesh and world is not None else src.mesh
    ending = partial if dst_partial is None else dst_partial
    return src, draw(types(other, src.shape, src.dtype, partial=ending, kinds=kinds))


@st.composite
def _others(draw: st.DrawFn, mesh: Mesh, world: int) -> Mesh:
    """Any mesh over `range(world)`; often one of the same ranks as `mesh`, or of none of them."""
    rest = [rank for rank in range(world) if rank not in mesh.ranks]
    how = draw(st.sampled_from(("any", "reordered", "disjoint")))
    if how == "reordered":
        sizes = draw(st.sampled_from([*sorted(set(permutations(mesh.sizes))), (mesh.size,)]))
        return _mesh(draw, draw(st.permutations(mesh.ranks)), sizes)
    return draw(meshes(world=rest if how == "disjoint" and rest else world))


def _mesh(draw: st.DrawFn, ranks: Sequence[int], sizes: Sequence[int]) -> Mesh:
    names = draw(st.permutations(_AXES))[: len(sizes)]
    return Mesh.from_ranks(torch.tensor(ranks).reshape(tuple(sizes)), names)


def _ops(partial: bool | Collection[ReduceOp]) -> tuple[ReduceOp, ...]:
    if isinstance(partial, bool):
        return REDUCE_OPS if partial else ()
    return tuple(partial)


@functools.cache
def _reduce_ops(dtype: torch.dtype) -> tuple[ReduceOp, ...]:
    """The reduce ops that may be pending in a tensor of `dtype`."""
    ops: list[ReduceOp] = []
    for op in REDUCE_OPS:
        try:
            TensorType((), dtype, Layout(Mesh(x=1), [Partial(op)]))
        except LayoutError:
            continue
        ops.append(op)
    return tuple(ops)
