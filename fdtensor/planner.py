"""`plan`: the steps from one type to another that receive the fewest bytes, as a value.

Movement is one exchange in which each rank receives what it lacks. Pending reductions take two:
the terms of each element go to one owner, chosen among those who want the result; then the owners'
blocks move to the destination. What nobody wants is sliced away first, new pending terms are made
last, and an exchange that happens to be a named collective is written as one.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import attrs
import numpy as np

from fdtensor import collective as collectives
from fdtensor.collective import AllReduce, Exchange, Mask, Pad, Scale, Slice, Step, is_local
from fdtensor.cost import (
    NCCL,
    CostModel,
    lower_bound,
    peak_at,
    received,
    received_at,
    seconds,
    sent,
    sent_at,
)
from fdtensor.errors import PlanError
from fdtensor.exchange import grid, roomiest, talk
from fdtensor.layout import Layout, TensorType, dtype_name, parse_dtype
from fdtensor.mesh import Mesh
from fdtensor.placement import Partial, Replicate, parse_placement
from fdtensor.record import Record
from fdtensor.transition import by_exchange, named, scalable

__all__ = ["Plan", "owners", "plan"]

SPREAD = 64
"""Owners are spread over axes that neither type uses while at most so many ranks talk."""


@attrs.frozen(eq=False, repr=False)
class Plan(Record):
    """The steps that take a tensor of type `src` to type `dst`.

    Bytes are per rank. `received_bytes` and `sent_bytes` are those of the busiest rank,
    `peak_bytes` is the most that any rank holds at once, source and destination included.
    """

    src: TensorType
    dst: TensorType
    steps: tuple[Step, ...]
    cost: CostModel

    @property
    def received_bytes(self) -> int:
        """The bytes that the busiest rank receives."""
        return int(_received(self).max(initial=0))

    @property
    def total_bytes(self) -> int:
        """The bytes that all ranks receive together."""
        return int(np.broadcast_to(_received(self), self.dst.mesh.sizes).sum())

    @property
    def sent_bytes(self) -> int:
        """The bytes that the rank that sends most sends."""
        return _sent(self)

    def received_bytes_at(self, rank: int) -> int:
        """The bytes that `rank` receives."""
        return sum(received_at(step, rank) for step in self.steps)

    def sent_bytes_at(self, rank: int) -> int:
        """The bytes that `rank` sends."""
        return sum(sent_at(step, rank) for step in self.steps)

    @property
    def lower_bound_bytes(self) -> int:
        """The bytes that no plan can be below: see `fdtensor.cost.lower_bound`."""
        return lower_bound(self.src, self.dst)

    @property
    def peak_bytes(self) -> int:
        """The most bytes that any rank holds at once: the caller's input, the output, buffers."""
        return _peak(self)

    def peak_bytes_at(self, rank: int) -> int:
        """The most bytes that `rank` holds at once."""
        if not self.steps:  # what does not move is still copied
            inside = self.src.mesh.position(rank) is not None
            return 2 * self.src.local_nbytes(rank) if inside else 0
        return peak_at(self.steps, rank)

    @property
    def seconds(self) -> float:
        """The seconds that the cost model gives."""
        return sum(seconds(step, self.cost) for step in self.steps)

    @property
    def is_local(self) -> bool:
        """Whether nothing is sent."""
        return all(is_local(step) for step in self.steps)

    @property
    def digest(self) -> str:
        """A hexadecimal fingerprint: equal plans have the same one on every rank and machine."""
        return _digest(self)

    def transpose(self) -> Plan:
        """The plan of the backward: cotangents of `dst` to cotangents of `src`.

        Raises `PlanError` for a plan that is not linear: one with max, min, product or bits pending.
        """
        for op in (*self.src.layout.partial.values(), *self.dst.layout.partial.values()):
            if op not in ("sum", "avg"):
                raise PlanError(
                    f"a plan with {op} pending is not linear, so it has no transpose.",
                    src=self.src,
                    dst=self.dst,
                    hint="Differentiate through sum or avg, or detach the tensor first.",
                )
        return plan(self.dst.cotangent(), self.src.cotangent(), cost=self.cost)

    def to_json(self) -> str:
        """The plan as JSON text; `Plan.from_json` gives the same plan back."""
        return json.dumps(_jsonable(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that `to_json` wrote; raises `PlanError` for another text."""
        try:
            return _from_jsonable(json.loads(text))
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise PlanError(
                f"this text is not a plan: {error}.",
                text=text[:60] + "..." * (len(text) > 60),
                hint="Give what Plan.to_json returned.",
            ) from error

    def __str__(self) -> str:
        title, rows, total = _listing(self)
        widths = [max((len(row[i]) for row in rows), default=0) for i in range(3)]
        lines = [f"  {a:<{widths[0]}}  {b:<{widths[1]}}  {c:>{widths[2]}}" for a, b, c in rows]
        return "\n".join([title, *lines, total])

    def __repr__(self) -> str:
        return f"Plan.from_json({self.to_json()!r})"

    def _repr_html_(self) -> str:
        title, rows, total = _listing(self)
        cells = "".join(
            f"<tr><td style='text-align:left'><code>{a}</code></td>"
            f"<td style='text-align:left'><code>{b}</code></td>"
            f"<td style='text-align:right'>{c}</td></tr>"
            for a, b, c in ([_escape(cell) for cell in row] for row in rows)
        )
        head = "<tr><th>step</th><th>type</th><th>received per rank</th></tr>"
        facts = (
            f"{_escape(total)}; bound {_bytes(self.lower_bound_bytes)}, "
            f"peak {_bytes(self.peak_bytes)}, {_time(self.seconds)}"
        )
        return (
            f"<div><p><code>{_escape(title)}</code></p>"
            f"<table>{head}{cells}</table><p>{facts}</p></div>"
        )


def plan(
    src: TensorType,
    dst: TensorType | Layout,
    *,
    cost: CostModel | None = None,
    max_bytes: int | None = None,
) -> Plan:
    """The plan that receives the fewest bytes from `src` to `dst`, on the same mesh or another.

    Among plans with the same bytes, the one that takes the least time by `cost` (by default that
    of NCCL, where named collectives are best). `max_bytes` bounds what any rank holds at once, its
    source and destination block counted: messages are then cut into pieces as needed.
    Raises `PlanError` where shape or dtype differ, or where `max_bytes` is too little.
    """
    return _plan(src, dst, cost or NCCL, max_bytes)


@functools.lru_cache(maxsize=65536)
def _plan(
    src: TensorType, dst: TensorType | Layout, cost: CostModel, max_bytes: int | None
) -> Plan:
    if not isinstance(src, TensorType) or not isinstance(dst, (TensorType, Layout)):
        raise PlanError(
            "a plan goes from a TensorType to a TensorType or Layout.",
            src=repr(src),
            dst=repr(dst),
            hint="Write plan(TensorType(shape, dtype, layout), layout).",
        )
    if isinstance(dst, Layout):
        dst = src.with_layout(dst)
    if src.shape != dst.shape or src.dtype != dst.dtype:
        raise PlanError(
            f"a plan moves a tensor, it does not change it from {dtype_name(src.dtype)}"
            f"{list(src.shape)} to {dtype_name(dst.dtype)}{list(dst.shape)}.",
            src=src,
            dst=dst,
            hint="Give both types the same shape and dtype.",
        )
    found = [Plan(src, dst, steps, cost) for steps in _candidates(src, dst, cost)]
    best = found[0]
    if len(found) > 1:
        best = min(found, key=lambda p: (p.total_bytes, p.seconds, len(p.steps)))
    return best if max_bytes is None else _within(best, max_bytes)


# --- the search ------------------------------------------------------------------------------


Steps = tuple[Step, ...]


def _candidates(src: TensorType, dst: TensorType, cost: CostModel) -> Iterator[Steps]:
    """The ways worth comparing; one of them receives the fewest bytes."""
    plain_src, plain_dst = _plain(src), _plain(dst)
    if plain_src is plain_dst:
        yield ()
    elif src.numel == 0:
        yield (Step(Slice((), ()), src, dst),)
    else:
        for middle, finish in _endings(plain_src, plain_dst):
            for steps in _reducing(plain_src, middle, cost):
                yield _between(src, dst, (*steps, *finish))


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
    a, b = grid(src), grid(dst)
    return a.cuts == b.cuts and a.partial == b.partial and src.layout.partial == dst.layout.partial


def _cut(src: TensorType, dst: TensorType) -> Step:
    """The local step that keeps what a rank wants of what it holds."""
    if src.mesh is dst.mesh:
        found = named(src, dst)
        if found is not None and isinstance(found, (Slice, Mask, Pad)):
            return Step(found, src, dst)
    return Step(Slice((), ()), src, dst)


def _endings(src: TensorType, dst: TensorType) -> Iterator[tuple[TensorType, Steps]]:
    """Types without new pending terms, each with the local steps from it to `dst`.

    A new pending axis comes from a value that all hold (mask), or from blocks (pad), which lets the
    exchanges before it carry less.
    """
    a, b = grid(src), grid(dst)
    same = src.mesh is dst.mesh
    names, before, after = dst.mesh.axes, src.layout.partial if same else {}, dst.layout.partial
    large = [names[i] for i in b.partial]
    kept = [axis for axis in large if axis in before and before[axis] == after[axis]]
    scaled = [axis for axis in large if axis in before and axis not in kept]
    if scaled and not scalable(src, dst):
        scaled = []
    added = [axis for axis in large if axis not in kept and axis not in scaled]

    scales: Steps = ()
    settled = dst  # dst without what is added, and before scaling
    for axis in added:
        settled = settled.placed(axis, Replicate())
    if scaled:
        op = before[scaled[0]]
        unscaled = settled
        for axis in scaled:
            unscaled = unscaled.with_layout(_replaced(unscaled.layout, axis, Partial(op)))
        scales = (Step(Scale(tuple(scaled), after[scaled[0]]), unscaled, settled),)
        settled = unscaled
    if not added:
        yield settled, scales
        return
    op = after[added[0]]
    base = scales[-1].dst if scales else settled
    yield settled, (*scales, Step(Mask(tuple(added), op), base, dst))
    if op == "avg" or not dst.shape:
        return
    index = {axis: i for i, axis in enumerate(names)}
    place = {i: d for d, cuts in enumerate(a.cuts) for i, _, _ in cuts} if same else {}
    order = [i for cuts in a.cuts for i, _, _ in cuts] if same else []
    needed = [axis for axis in added if not same or index[axis] not in a.free]
    for chosen in (needed, added) if needed and needed != added else (added,):
        cut = settled.layout
        axes = sorted(chosen, key=lambda x: order.index(index[x]) if index[x] in order else 99)
        for axis in axes:
            here = settled.with_layout(cut)
            there = place.get(index[axis])
            cut = cut.split(axis, roomiest(here, index[axis], there, src if same else None))
        middle = settled.with_layout(cut)
        base = middle
        steps = []
        if scales:
            layout = middle.layout
            for axis in scaled:
                layout = _replaced(layout, axis, Partial(after[axis]))
            base = middle.with_layout(layout)
            steps.append(Step(scales[0].collective, middle, base))
        masked = [axis for axis in added if axis not in chosen]
        padded = dst
        for axis in masked:
            padded = padded.placed(axis, Replicate())
        dims = tuple(base.layout[axis].dim for axis in axes)  # type: ignore[union-attr]
        steps.append(Step(Pad(tuple(axes), dims, op), base, padded))
        if masked:
            steps.append(Step(Mask(tuple(masked), op), padded, dst))
        yield middle, tuple(steps)


def _replaced(layout: Layout, axis: str, placement: Partial) -> Layout:
    placements = list(layout.placements)
    placements[layout.mesh.axis(axis)] = placement
    return Layout(layout.mesh, placements, dict(layout.order))


def _reducing(src: TensorType, dst: TensorType, cost: CostModel) -> Iterator[Steps]:
    """The ways from `src` to a `dst` that adds no pending terms."""
    who = talk(src, dst)
    if not who.reduced:
        yield _moving(src, dst, cost)
        return
    owned = owners(src, dst)
    yield (*_one(src, owned, cost), *_moving(owned, dst, cost))
    wide = owners(src, dst, spread=True)
    if wide is not owned and prod(dst.mesh.sizes[i] for i in who.dst.free) <= SPREAD:
        yield (*_one(src, wide, cost), *_moving(wide, dst, cost))
    if who.same_mesh:
        sliced = _sliced(src, dst)
        names = src.mesh.axes
        reduced = sliced
        for i in who.reduced:
            reduced = reduced.placed(names[i], Replicate())
        axes = tuple(names[i] for i in who.reduced)
        first = (Step(named(src, sliced), src, sliced),) if sliced is not src else ()  # type: ignore[arg-type]
        reduce = Step(AllReduce(axes, src.layout.partial[axes[0]]), sliced, reduced)
        yield (*first, reduce, *_moving(reduced, dst, cost))


def owners(src: TensorType, dst: TensorType, spread: bool = False) -> TensorType:
    """`dst` cut further by its free axes, so that each element's terms meet at one owner.

    With `spread` also by the axes that are free on both sides: that is the least total, but the
    second exchange then talks across them. A 0-d tensor is owned by all who want it.
    """
    who = talk(src, dst)
    same, names = who.same_mesh, dst.mesh.axes
    if not dst.shape:
        return dst
    axes = [i for i in who.dst.free if spread or not (same and i in who.src.free)]
    place = {i: d for d, cuts in enumerate(who.src.cuts) for i, _, _ in cuts} if same else {}
    order = list(place)
    owned = dst.layout
    # first the axes that cut the source, in its order: their ranks hold terms of these very blocks
    for i in sorted(axes, key=lambda i: order.index(i) if i in place else len(order) + i):
        here = dst.with_layout(owned)
        owned = owned.split(names[i], roomiest(here, i, place.get(i), src if same else None))
    return dst.with_layout(owned)


def _sliced(src: TensorType, dst: TensorType) -> TensorType:
    """`src` cut as far as `dst` cuts it with axes that the source leaves free."""
    a, b = grid(src), grid(dst)
    layout, names = src.layout, src.mesh.axes
    for d in range(len(src.shape)):
        held, cuts = a.cuts[d], b.cuts[d]
        if cuts[: len(held)] == held:
            for i, _, placement in cuts[len(held) :]:
                if i not in a.free:
                    break
                layout = _extended(layout, names[i], placement)
    return src.with_layout(layout)


def _extended(layout: Layout, axis: str, placement: Any) -> Layout:
    placements = list(layout.placements)
    placements[layout.mesh.axis(axis)] = placement
    order = dict(layout.order)
    order[placement.dim] = (*layout.cuts(placement.dim), axis)
    return Layout(layout.mesh, placements, order)


def _moving(src: TensorType, dst: TensorType, cost: CostModel) -> Steps:
    """The fastest of the ways that receive exactly what each rank lacks, without reductions."""
    if src is dst:
        return ()
    if src.mesh is dst.mesh and _same_blocks(src, dst):
        return ()
    return _one(src, dst, cost)


def _one(src: TensorType, dst: TensorType, cost: CostModel) -> Steps:
    """The fastest way that is one exchange, or a slice and a named collective."""
    if _nothing_moves(src, dst):
        return (_cut(src, dst),)
    ways = [(by_exchange(src, dst, "peer_to_peer"),), (by_exchange(src, dst, "all_to_all"),)]
    if src.mesh is dst.mesh:
        sliced = _sliced(src, dst)
        found = named(sliced, dst)
        if found is not None:
            step = Step(found, sliced, dst)
            if sliced is src:
                ways.append((step,))
            else:
                ways.append((Step(named(src, sliced), src, sliced), step))  # type: ignore[arg-type]
    else:
        found = named(src, dst)
        if found is not None:
            ways.append((Step(found, src, dst),))
    return min(ways, key=lambda steps: sum(seconds(step, cost) for step in steps))


def _nothing_moves(src: TensorType, dst: TensorType) -> bool:
    who = talk(src, dst)
    if who.reduced:
        return False
    if who.same_mesh and not who.axes:
        return True
    return not received(by_exchange(src, dst)).any()


# --- memory ----------------------------------------------------------------------------------


def _within(found: Plan, max_bytes: int) -> Plan:
    """The plan itself, or the same exchanges in as many pieces as the budget asks for."""
    if found.peak_bytes <= max_bytes:
        return found
    steps = []
    for step in found.steps:
        steps.append(step if is_local(step) else by_exchange(step.src, step.dst))
    tried, pieces = [found], 1
    longest = max([1, *found.src.shape])
    while True:
        cut = Plan(found.src, found.dst, tuple(_in_pieces(s, pieces) for s in steps), found.cost)
        tried.append(cut)
        if cut.peak_bytes <= max_bytes:
            return cut
        if pieces >= longest:
            break
        pieces = min(2 * pieces, longest)
    least = min(candidate.peak_bytes for candidate in tried)
    raise PlanError(
        f"no plan fits in {max_bytes} bytes per rank: the least is {least}.",
        src=found.src,
        dst=found.dst,
        source=f"{max(found.src.local_nbytes(r) for r in _some(found.src.mesh))} bytes",
        destination=f"{max(found.dst.local_nbytes(r) for r in _some(found.dst.mesh))} bytes",
        hint=f"Pass max_bytes={least} or more, or choose layouts with smaller blocks.",
    )


def _in_pieces(step: Step, pieces: int) -> Step:
    if not isinstance(step.collective, Exchange):
        return step
    return Step(attrs.evolve(step.collective, pieces=pieces), step.src, step.dst)


def _some(mesh: Mesh) -> Sequence[int]:
    """All ranks of a mesh, or of a large one those at the ends of its axes, who hold the most."""
    if mesh.size <= 1024:
        return mesh.ranks
    corners = [sorted({0, 1 % n, n // 2, n - 1}) for n in mesh.sizes]
    coords: list[tuple[int, ...]] = [()]
    for indices in corners:
        coords = [(*c, i) for c in coords for i in indices][:4096]
    return [mesh.rank_at(c) for c in coords]


@functools.lru_cache(maxsize=4096)
def _peak(found: Plan) -> int:
    meshes = {found.src.mesh: None, found.dst.mesh: None}
    ranks = {rank for mesh in meshes for rank in _some(mesh)}
    return max(found.peak_bytes_at(rank) for rank in ranks)


@functools.lru_cache(maxsize=4096)
def _received(found: Plan) -> np.ndarray:
    total = np.zeros((1,) * found.dst.mesh.ndim, np.int64)
    for step in found.steps:
        if not is_local(step):
            total = total + received(step)
    return total


@functools.lru_cache(maxsize=4096)
def _sent(found: Plan) -> int:
    counts = [(step.src.mesh, sent(step)) for step in found.steps if not is_local(step)]
    if all(mesh is found.src.mesh for mesh, _ in counts):
        return int(sum((count for _, count in counts), np.zeros((), np.int64)).max())
    by_rank: dict[int, int] = {}
    for mesh, count in counts:
        for rank, n in zip(mesh.order, np.broadcast_to(count, mesh.sizes).reshape(-1)):
            by_rank[rank] = by_rank.get(rank, 0) + int(n)
    return max(by_rank.values(), default=0)


# --- text ------------------------------------------------------------------------------------


def _listing(found: Plan) -> tuple[str, list[tuple[str, str, str]], str]:
    """The title, a row for each step, and the total, as texts."""
    here, there = found.src.mesh, found.dst.mesh
    title = f"{found.src} -> {found.dst} on {there!r}"
    if here is not there:
        title = f"{found.src} on {_short(here)} -> {found.dst} on {_short(there)}"
    rows = [
        (str(step.collective), str(step.dst), _bytes(int(received(step).max(initial=0))))
        for step in found.steps
    ]
    count = len(rows)
    plural = "step" if count == 1 else "steps"
    return title, rows, f"{count} {plural}, {_bytes(found.received_bytes)} received per rank"


def _short(mesh: Mesh) -> str:
    text = repr(mesh)
    return text if len(text) <= 60 else f"{mesh.size} ranks as {dict(zip(mesh.axes, mesh.sizes))}"


def _bytes(count: int) -> str:
    return f"{count} B"


def _time(value: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value / 1e-6:.3g} us"


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


# --- JSON ------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def _digest(found: Plan) -> str:
    return hashlib.sha256(found.to_json().encode()).hexdigest()[:32]


def _jsonable(found: Plan) -> dict[str, Any]:
    """Meshes, types and steps as tables of plain values that refer to each other by index."""
    meshes: dict[Mesh, int] = {}
    types: dict[TensorType, int] = {}

    def type_index(type: TensorType) -> int:
        meshes.setdefault(type.mesh, len(meshes))
        return types.setdefault(type, len(types))

    src, dst = type_index(found.src), type_index(found.dst)
    steps = [
        {
            "src": type_index(step.src),
            "dst": type_index(step.dst),
            "kind": type(step.collective).__name__,
            **{
                f.name: getattr(step.collective, f.name)
                for f in attrs.fields(type(step.collective))
            },
        }
        for step in found.steps
    ]
    cost = {f.name: getattr(found.cost, f.name) for f in attrs.fields(CostModel)}
    return {
        "fdtensor": 1,
        "meshes": [
            {
                "axes": mesh.axes,
                "sizes": mesh.sizes,
                "ranks": None if isinstance(mesh.order, range) else mesh.order,
            }
            for mesh in meshes
        ],
        "types": [
            {
                "shape": t.shape,
                "dtype": dtype_name(t.dtype),
                "mesh": meshes[t.mesh],
                "placements": [str(p) for p in t.layout.placements],
                "order": t.layout.order,
            }
            for t in types
        ],
        "src": src,
        "dst": dst,
        "steps": steps,
        "cost": cost,
    }


def _from_jsonable(data: dict[str, Any]) -> Plan:
    meshes = [
        Mesh._make(
            m["axes"],
            tuple(m["sizes"]),
            range(prod(m["sizes"])) if m["ranks"] is None else m["ranks"],
        )
        for m in data["meshes"]
    ]
    types = [
        TensorType(
            t["shape"],
            parse_dtype(t["dtype"]),
            Layout(
                meshes[t["mesh"]],
                [parse_placement(p) for p in t["placements"]],
                {d: tuple(axes) for d, axes in t["order"]},
            ),
        )
        for t in data["types"]
    ]
    steps = []
    for entry in data["steps"]:
        kind = getattr(collectives, entry["kind"])
        fields = {f.name: _tuples(entry[f.name]) for f in attrs.fields(kind)}
        steps.append(Step(kind(**fields), types[entry["src"]], types[entry["dst"]]))
    cost = CostModel(**{name: _tuples(value) for name, value in data["cost"].items()})
    return Plan(types[data["src"]], types[data["dst"]], tuple(steps), cost)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
