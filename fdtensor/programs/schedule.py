"""`scheduled`: a program whose small collectives travel together, and that starts them in time.

Reductions wait for others of their kind until the first of their results is read: the gradients of
many small parameters are reduced at once, as buckets of data parallel training are. What inputs are
gathered to comes in groups too, each one group ahead of its first use.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from fdtensor.layouts.tensor_type import TensorType
from fdtensor.ops.graph import Var
from fdtensor.ops.saved_values import ALIAS
from fdtensor.plans.collectives import AllGather, Exchange, Step, is_local
from fdtensor.programs.program import Eqn, Program, Together, is_view_line

__all__ = ["BUCKET_BYTES", "scheduled"]

BUCKET_BYTES = 1 << 20
"""What travels together is at most so many bytes a rank; a larger tensor goes alone."""


def scheduled(program: Program, bucket_bytes: int = BUCKET_BYTES, ahead: bool = True) -> Program:
    """The same program with collectives of one kind packed into groups of so many bytes.

    Groups of gathered inputs start one `ahead` of their use, unless memory is what matters.
    """
    eqns = _gathered(program, _early(program.eqns), bucket_bytes, ahead)
    eqns = _joined(program, _reduced(eqns, bucket_bytes), bucket_bytes)
    return attrs.evolve(program, eqns=tuple(eqns))


def _kind(eqn: Eqn) -> Any:
    """What lines must share to travel together, or None for a line that travels alone."""
    return eqn.op.collective.bundle(eqn.op) if isinstance(eqn.op, Step) else None


def _size(type: TensorType) -> int:
    return type.local_nbytes(type.mesh.order[0])


def _packed(eqns: Sequence[Eqn]) -> Eqn:
    """One line for all of them."""
    if len(eqns) == 1:
        return eqns[0]
    steps = tuple(eqn.op for eqn in eqns)
    ins = tuple(eqn.args[0] for eqn in eqns)
    return Eqn(Together(steps), ins, (), tuple(eqn.outs[0] for eqn in eqns))  # type: ignore[arg-type]


def _early(eqns: Sequence[Eqn]) -> list[Eqn]:
    """The lines with each reduction, and moves of its result, just after what it reduces."""
    reductions: dict[Var, list[Eqn]] = {}
    makers = {v for eqn in eqns for v in eqn.outs if v is not None}
    reduced: set[Var] = set()
    for eqn in eqns:
        if eqn.is_collective and eqn.ins[0] in (makers if _reduces(eqn) else reduced):
            reductions.setdefault(eqn.ins[0], []).append(eqn)
            reduced.update(v for v in eqn.outs if v is not None)
    moved = {id(eqn) for some in reductions.values() for eqn in some}
    out: list[Eqn] = []

    def add(eqn: Eqn) -> None:
        out.append(eqn)
        for v in eqn.outs:
            for reduction in reductions.pop(v, []):  # type: ignore[arg-type]
                add(reduction)

    for eqn in eqns:
        if id(eqn) not in moved:
            add(eqn)
    return out


def _reduced(eqns: Sequence[Eqn], bucket_bytes: int, moves: bool = False) -> list[Eqn]:
    """The lines with small reductions held back until one of their results is read.

    Views and moves of their results wait with them; with `moves`, other moves travel together too.
    """
    out: list[Eqn] = []
    waiting: dict[Any, list[Eqn]] = {}
    after: dict[Any, list[Eqn]] = {}
    held: dict[Any, int] = {}
    owner: dict[Var, Any] = {}

    def flush(kind: Any) -> None:
        bucket, rest = waiting.pop(kind, []), after.pop(kind, [])
        held.pop(kind, None)
        for eqn in (*bucket, *rest):
            for v in eqn.outs:
                owner.pop(v, None)  # type: ignore[arg-type]
        if bucket:
            out.append(_packed(bucket))
            out.extend(_reduced(rest, bucket_bytes, moves=True))

    for eqn in eqns:
        kinds = [owner[v] for v in eqn.ins if v in owner]
        moved = eqn.is_collective and not _reduces(eqn)
        if kinds and len(eqn.ins) == 1 and (is_view_line(eqn) or moved):  # it waits too
            after.setdefault(kinds[0], []).append(eqn)
            owner.update((v, kinds[0]) for v in eqn.outs if v is not None)
            continue
        for kind in kinds:
            flush(kind)
        kind = _kind(eqn)
        size = _size(eqn.op.src) if kind is not None and isinstance(eqn.op, Step) else 0
        if kind is None or (moved and not moves) or size > bucket_bytes:
            out.append(eqn)
            continue
        if held.get(kind, 0) + size > bucket_bytes:
            flush(kind)
        waiting.setdefault(kind, []).append(eqn)
        held[kind] = held.get(kind, 0) + size
        owner[eqn.outs[0]] = kind  # type: ignore[index]
    for kind in list(waiting):
        flush(kind)
    return out


def _joined(program: Program, eqns: Sequence[Eqn], bucket_bytes: int) -> list[Eqn]:
    """The lines with each move taking along later ones of its kind whose values are there too."""
    known = {*program.inputs, *(v for v, _ in program.constants)}
    inputs = set(known)
    kinds = [None if _reduces(eqn) else _kind(eqn) for eqn in eqns]
    later = [i for i, kind in enumerate(kinds) if kind is not None and eqns[i].ins[0] not in inputs]
    done: set[int] = set()
    out: list[Eqn] = []
    for i, eqn in enumerate(eqns):
        if i in done:
            continue
        group = [i]
        if i in later:
            total = _out_size(eqn)
            for j in later:
                if j > i and j not in done and kinds[j] == kinds[i] and eqns[j].ins[0] in known:
                    total += _out_size(eqns[j])
                    if total > bucket_bytes:
                        break
                    group.append(j)
        done.update(group)
        out.append(_packed([eqns[j] for j in group]))
        known.update(v for j in group for v in eqns[j].outs if v is not None)
    return out


def _gathered(program: Program, eqns: list[Eqn], bucket_bytes: int, ahead: bool) -> list[Eqn]:
    """The lines with what inputs are gathered to in groups, each before its first use.

    `ahead`, each starts when the group before it is needed, and so travels behind its work.
    """
    early = {*program.inputs, *(v for v, _ in program.constants)}
    maker: dict[Var, int] = {}
    ready: set[int] = set()
    for i, eqn in enumerate(eqns):
        if all(v in early for v in eqn.ins) and eqn.ins:
            view = is_view_line(eqn) and eqn.op is not ALIAS  # what is kept comes when it is read
            local = view or (isinstance(eqn.op, Step) and is_local(eqn.op))
            kind = _kind(eqn)
            moves = kind is not None and kind[0] in (AllGather, Exchange) and not _reduces(eqn)
            if local or moves:
                ready.add(i)
            if local:
                early.update(v for v in eqn.outs if v is not None)
                maker.update((v, i) for v in eqn.outs if v is not None)
    gathers = [i for i in sorted(ready) if _kind(eqns[i]) is not None]
    groups = _groups(eqns, gathers, _again(eqns, gathers, maker), bucket_bytes)
    place = {group[0]: k for k, group in enumerate(groups)}
    done: set[int] = set()
    out: list[Eqn] = []

    def make(i: int) -> None:
        """Takes the views that line `i` reads."""
        for v in eqns[i].ins:
            j = maker.get(v)
            if j is not None and j not in done:
                make(j)
                done.add(j)
                out.append(eqns[j])

    def take(k: int) -> None:
        if k < len(groups) and groups[k][0] not in done:
            for j in groups[k]:
                make(j)
                done.add(j)
            out.append(_packed([eqns[j] for j in groups[k]]))

    for i, eqn in enumerate(eqns):
        if i in place:
            take(place[i])
            if ahead:
                take(place[i] + 1)
        elif i not in done:
            done.add(i)
            out.append(eqn)
    return out


def _groups(
    eqns: Sequence[Eqn], gathers: Sequence[int], again: Mapping[int, int], bucket_bytes: int
) -> list[list[int]]:
    """The gathers that travel together, by their lines, in the order of the first of each."""
    groups: list[list[int]] = []
    grouped: set[int] = set()
    for n, i in enumerate(gathers):
        if i in grouped:
            continue
        group, total = [i], _out_size(eqns[i])
        for j in gathers[n + 1 :]:
            if j not in grouped and again[j] == again[i] and _kind(eqns[j]) == _kind(eqns[i]):
                total += _out_size(eqns[j])
                if total > bucket_bytes:
                    break
                group.append(j)
        grouped.update(group)
        groups.append(group)
    return groups


def _again(eqns: Sequence[Eqn], gathers: Sequence[int], maker: Mapping[Var, int]) -> dict[int, int]:
    """How often each gather's input was gathered before: a second time waits for the backward."""
    seen: Counter[Var] = Counter()
    found = {}
    for i in gathers:
        v = eqns[i].ins[0]
        while v in maker:
            v = eqns[maker[v]].ins[0]
        found[i] = seen[v]
        seen[v] += 1
    return found


def _reduces(eqn: Eqn) -> bool:
    return getattr(getattr(eqn.op, "collective", None), "reduce_op", None) is not None


def _out_size(eqn: Eqn) -> int:
    assert isinstance(eqn.op, Step)
    return _size(eqn.op.dst)
