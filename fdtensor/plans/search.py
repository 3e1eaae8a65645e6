"""The search: the ways from one type to another that are worth comparing, as steps.

Movement is one exchange in which each rank receives what it lacks. Pending reductions take two:
the terms of each element go to one owner, chosen among those that want the result; then the owners'
blocks move to the destination. What nobody wants is sliced away first, new pending terms are made
last, and an exchange that happens to be a named collective is written as one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import attrs

from fdtensor.layouts.layout import Layout
from fdtensor.layouts.placement import Cut, Partial, Replicate
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.plans.collectives import (
    AllReduce,
    Mask,
    Pad,
    Scale,
    Slice,
    Step,
    by_exchange,
    by_meetings,
    scalable,
)
from fdtensor.plans.cost import CostModel, seconds
from fdtensor.plans.counts import most, to_receive
from fdtensor.plans.meetings import MAX_TALKING, few_enough
from fdtensor.plans.movement import Movement, movement
from fdtensor.plans.normal_type import normalized
from fdtensor.plans.owners import cut_like, owners
from fdtensor.plans.transitions import named

__all__ = ["Leg", "Steps", "alternatives", "by_owners", "candidates", "same_everywhere"]

Steps = tuple[Step, ...]

Leg = tuple[Steps, ...]
"""A part of a way, in the several sequences of steps that make it: the fastest is taken."""


def candidates(src: TensorType, dst: TensorType, cost: CostModel) -> Iterator[Steps]:
    """The ways worth comparing; one of them receives the fewest bytes."""
    for legs in alternatives(src, dst):
        yield _between(src, dst, tuple([s for leg in legs for s in _fastest(leg, cost)]))


def alternatives(src: TensorType, dst: TensorType) -> Iterator[tuple[Leg, ...]]:
    """The same by any cost model: the legs of each way, between types without axes of one rank."""
    plain_src, plain_dst = _plain(src), _plain(dst)
    if plain_src is plain_dst:
        yield ()
    elif src.numel == 0:
        yield (((Step(Slice((), ()), src, dst),),),)
    else:
        for middle, finish in _endings(plain_src, plain_dst):
            for legs in _reducing(plain_src, middle):
                yield (*legs, (finish,)) if finish else legs


def _fastest(leg: Leg, cost: CostModel) -> Steps:
    if len(leg) == 1:
        return leg[0]
    return min(leg, key=lambda steps: sum(seconds(step, cost) for step in steps))


def by_owners(src: TensorType, dst: TensorType) -> Steps | None:
    """The way whose terms meet at owners that follow no layout; None where there are too many.

    It receives `least_total` bytes, by two all-to-alls.
    """
    plain_src, plain_dst = _plain(src), _plain(dst)
    before, after = plain_src.layout.partial, plain_dst.layout.partial
    # terms that are added have the op of all others, so beside them nothing is scaled
    scaled = _scaled(plain_src, plain_dst) if after.keys() <= before.keys() else []
    middle, finish = _unscaled(plain_src, plain_dst, scaled)
    if not few_enough(plain_src, middle):
        return None
    return _between(src, dst, (by_meetings(plain_src, middle), *finish))


def same_everywhere(src: TensorType, dst: TensorType) -> bool:
    """Whether types differ at most along axes of one rank, where all placements are the same."""
    return _plain(src) is _plain(dst)


def _plain(type: TensorType) -> TensorType:
    """The type with Replicate on the axes of size 1, where every placement means the same."""
    mesh, layout = type.mesh, type.layout
    alone = [i for i, size in enumerate(mesh.sizes) if size == 1]
    if all(isinstance(layout.placements[i], Replicate) for i in alone):
        return type
    placements = [Replicate() if i in alone else p for i, p in enumerate(layout.placements)]
    order = {d: [a for a in axes if mesh.axis_size(a) > 1] for d, axes in layout.order}
    return type.with_layout(Layout(mesh, placements, order))


def _between(src: TensorType, dst: TensorType, steps: Steps) -> Steps:
    """The steps with the ends as they were given."""
    if steps and steps[0].src is not src:
        steps = (attrs.evolve(steps[0], src=src), *steps[1:])
    if steps and steps[-1].dst is not dst:
        steps = (*steps[:-1], attrs.evolve(steps[-1], dst=dst))
    return steps


def _same_blocks(src: TensorType, dst: TensorType) -> bool:
    """Whether every rank already holds what it wants, by the layouts alone."""
    a, b = normalized(src), normalized(dst)
    return a.cuts == b.cuts and a.partial == b.partial and src.layout.partial == dst.layout.partial


def _cut(src: TensorType, dst: TensorType) -> Step:
    """The local step that keeps what a rank wants of what it holds."""
    if src.mesh is dst.mesh:
        collective = named(src, dst)
        if isinstance(collective, (Slice, Mask, Pad)):
            return Step(collective, src, dst)
    return Step(Slice((), ()), src, dst)


def _endings(src: TensorType, dst: TensorType) -> Iterator[tuple[TensorType, Steps]]:
    """Types whose pending terms are all in `src`, each with the local steps from it to `dst`."""
    same = src.mesh is dst.mesh
    before, after = src.layout.partial if same else {}, dst.layout.partial
    pending = [dst.mesh.axes[i] for i in normalized(dst).partial]
    scaled = _scaled(src, dst)
    added = [a for a in pending if a not in scaled and (a not in before or before[a] != after[a])]
    for middle, finish in _adding(src, dst, added):
        unscaled, scale = _unscaled(src, middle, scaled)
        yield unscaled, (*scale, *finish)


def _scaled(src: TensorType, dst: TensorType) -> list[str]:
    """The axes whose pending terms are only scaled: sums that become averages, or the reverse."""
    before, after = src.layout.partial if src.mesh is dst.mesh else {}, dst.layout.partial
    pending = [dst.mesh.axes[i] for i in normalized(dst).partial]
    scaled = [a for a in pending if a in before and before[a] != after[a]]
    return scaled if scaled and scalable(src, dst) else []


def _unscaled(src: TensorType, dst: TensorType, scaled: Sequence[str]) -> tuple[TensorType, Steps]:
    """The type before terms are scaled, and the step that scales them."""
    if not scaled:
        return dst, ()
    before, after = src.layout.partial[scaled[0]], dst.layout.partial[scaled[0]]
    unscaled = dst.with_layout(_with(dst.layout, scaled, Partial(before)))
    return unscaled, (Step(Scale(tuple(scaled), after), unscaled, dst),)


def _adding(
    src: TensorType, dst: TensorType, added: list[str]
) -> Iterator[tuple[TensorType, Steps]]:
    """Types without the pending axes `added`, each with the local steps that add them.

    A mask makes terms of a value that all ranks hold, a pad makes them of blocks. Blocks are less
    to carry, so with a pad the exchanges before it are smaller.
    """
    if not added:
        yield dst, ()
        return
    op = dst.layout.partial[added[0]]
    plain = _replicated(dst, added)
    yield plain, (Step(Mask(tuple(added), op), plain, dst),)
    if op == "avg" or not dst.shape:
        return
    same = src.mesh is dst.mesh
    needed = [a for a in added if not same or dst.mesh.axis(a) not in normalized(src).free]
    for chosen in (needed, added) if needed and needed != added else (added,):
        middle = cut_like(src, plain, [dst.mesh.axis(a) for a in chosen])
        masked = [a for a in added if a not in chosen]
        padded = _replicated(dst, masked)
        steps: Steps = (Step(named(middle, padded), middle, padded),)  # type: ignore[arg-type]
        if masked:
            steps += (Step(Mask(tuple(masked), op), padded, dst),)
        yield middle, steps


def _replicated(type: TensorType, axes: Sequence[str]) -> TensorType:
    for axis in axes:
        type = type.placed(axis, Replicate())
    return type


def _with(layout: Layout, axes: Sequence[str], placement: Partial) -> Layout:
    """The layout with pending axes that have another reduce op, all at once."""
    placements = [
        placement if a in axes else p
        for a, p in zip(layout.mesh.axes, layout.placements, strict=True)
    ]
    return Layout(layout.mesh, placements, dict(layout.order))


def _reducing(src: TensorType, dst: TensorType) -> Iterator[tuple[Leg, ...]]:
    """The ways from `src` to a `dst` that adds no pending terms."""
    moves = movement(src, dst)
    if not moves.reduced:
        yield _moving(src, dst)
        return
    owned = owners(moves)
    yield (_one(src, owned), *_moving(owned, dst))
    even = owners(moves, near=False)
    if even is not owned:  # more ranks talk, and each receives as much
        yield (_one(src, even), *_moving(even, dst))
    if owned is not dst:  # two terms for two ranks: each may as well reduce for itself
        yield (_one(src, dst),)
    spread = owners(moves, spread=True)
    if spread is not owned and prod(dst.mesh.sizes[i] for i in moves.dst.free) <= MAX_TALKING:
        yield (_one(src, spread), *_moving(spread, dst))
    if moves.same_mesh:
        sliced = _sliced(src, dst)
        names = src.mesh.axes
        reduced = sliced
        for i in moves.reduced:
            reduced = reduced.placed(names[i], Replicate())
        axes = tuple(names[i] for i in moves.reduced)
        first = (Step(named(src, sliced), src, sliced),) if sliced is not src else ()  # type: ignore[arg-type]
        reduce = Step(AllReduce(axes, src.layout.partial[axes[0]]), sliced, reduced)
        yield (((*first, reduce),), *_moving(reduced, dst))


def _sliced(src: TensorType, dst: TensorType) -> TensorType:
    """`src` cut as far as `dst` cuts it with axes that the source leaves free."""
    a, b = normalized(src), normalized(dst)
    layout, names = src.layout, src.mesh.axes
    for d in range(len(src.shape)):
        held, cuts = a.cuts[d], b.cuts[d]
        if cuts[: len(held)] == held:
            for i, _, placement in cuts[len(held) :]:
                if i not in a.free:
                    break
                layout = _extended(layout, names[i], placement)
    return src.with_layout(layout)


def _extended(layout: Layout, axis: str, placement: Cut) -> Layout:
    """The layout with `axis` as the innermost cut of the dim of `placement`."""
    placements = [
        placement if a == axis else p
        for a, p in zip(layout.mesh.axes, layout.placements, strict=True)
    ]
    order = {**dict(layout.order), placement.dim: (*layout.cuts(placement.dim), axis)}
    return Layout(layout.mesh, placements, order)


def _moving(src: TensorType, dst: TensorType) -> tuple[Leg, ...]:
    """One leg that receives exactly what each rank lacks, without reductions, or none."""
    if src is dst:
        return ()
    if src.mesh is dst.mesh and _same_blocks(src, dst):
        return ()
    return (_one(src, dst),)


def _one(src: TensorType, dst: TensorType) -> Leg:
    """The ways that are one exchange, or a slice and a named collective."""
    if _nothing_moves(movement(src, dst)):
        return ((_cut(src, dst),),)
    ways: list[Steps] = [
        (by_exchange(src, dst, "peer_to_peer"),),
        (by_exchange(src, dst, "all_to_all"),),
    ]
    if src.mesh is dst.mesh:
        sliced = _sliced(src, dst)
        collective = named(sliced, dst)
        if collective is not None:
            step = Step(collective, sliced, dst)
            if sliced is src:
                ways.append((step,))
            else:
                ways.append((Step(named(src, sliced), src, sliced), step))  # type: ignore[arg-type]
    else:
        collective = named(src, dst)
        if collective is not None:
            ways.append((Step(collective, src, dst),))
    return tuple(ways)


def _nothing_moves(moves: Movement) -> bool:
    """Whether every rank holds already what it wants."""
    if moves.reduced:
        return False
    return (moves.same_mesh and not moves.axes) or not most(to_receive(moves))
