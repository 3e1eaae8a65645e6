"""`bundled`: a program whose small collectives travel together.

Reductions are held back for others of their kind until one of their results is read: the gradients
of many small parameters are reduced at once, as in the buckets of data parallel training. Inputs
are gathered in groups too, each before its first use.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import attrs

from fdtensor.ops.graph import Var
from fdtensor.plans.collectives import AllGather, Bundle, Exchange
from fdtensor.programs.buckets import Buckets, kind_of, reduces
from fdtensor.programs.eqn import is_part_line
from fdtensor.programs.loops import has_loops
from fdtensor.programs.program import Eqn, Program, Together, is_view_line

__all__ = ["bundled", "unbundled"]


def bundled(program: Program, bucket_bytes: int | None = None) -> Program:
    """The same program with collectives of one kind packed into groups, by their bytes.

    A group has at most `bucket_bytes` per rank, and a larger tensor goes alone; by default they
    follow from the cost model of the program, as `Buckets` tells. A program with loops stays as it
    is: what travels together may not cross the ends of a loop.
    """
    if has_loops(program.eqns):
        return program
    buckets = Buckets.of(program, bucket_bytes)
    eqns = _gathered(program, _early(program.eqns), buckets)
    eqns = _joined(program, _reduced(eqns, buckets), buckets)
    return attrs.evolve(program, eqns=tuple(eqns))


def unbundled(program: Program) -> Program:
    """The same program with a line for each collective."""
    eqns: list[Eqn] = []
    for eqn in program.eqns:
        if isinstance(eqn.op, Together):
            each = zip(eqn.op.steps, eqn.ins, eqn.outs, strict=True)
            eqns += [Eqn(step, (v,), (), (out,), eqn.note) for step, v, out in each]
        else:
            eqns.append(eqn)
    return attrs.evolve(program, eqns=tuple(eqns))


def _packed(eqns: Sequence[Eqn]) -> Eqn:
    """The lines as one line, whose steps travel together."""
    if len(eqns) == 1:
        return eqns[0]
    steps = tuple(eqn.op for eqn in eqns)
    ins = tuple(eqn.args[0] for eqn in eqns)
    return Eqn(Together(steps), ins, (), tuple(eqn.outs[0] for eqn in eqns))  # type: ignore[arg-type]


def _early(eqns: Sequence[Eqn]) -> list[Eqn]:
    """The lines with each reduction, and moves of its result, just after its operand."""
    reductions: dict[Var | None, list[Eqn]] = {}
    makers = {v for eqn in eqns for v in eqn.outs if v is not None}
    reduced: set[Var] = set()
    for eqn in eqns:
        if eqn.is_collective and eqn.ins[0] in (makers if reduces(eqn) else reduced):
            reductions.setdefault(eqn.ins[0], []).append(eqn)
            reduced.update(v for v in eqn.outs if v is not None)
    moved = {id(eqn) for group in reductions.values() for eqn in group}
    out: list[Eqn] = []

    def add(eqn: Eqn) -> None:
        out.append(eqn)
        for v in eqn.outs:
            for reduction in reductions.pop(v, ()):
                add(reduction)

    for eqn in eqns:
        if id(eqn) not in moved:
            add(eqn)
    return out


def _reduced(eqns: Sequence[Eqn], buckets: Buckets, moves: bool = False) -> list[Eqn]:
    """The lines with small reductions held back until one of their results is read.

    Views and moves of their results are held back too; with `moves`, other moves travel together.
    """
    out: list[Eqn] = []
    held_back: dict[Bundle, list[Eqn]] = {}
    after: dict[Bundle, list[Eqn]] = {}
    size_of: dict[Bundle, float] = {}
    owner: dict[Var | None, Bundle] = {}

    def flush(kind: Bundle) -> None:
        bucket, rest = held_back.pop(kind, ()), after.pop(kind, ())
        size_of.pop(kind, None)
        for eqn in (*bucket, *rest):
            for v in eqn.outs:
                owner.pop(v, None)
        if bucket:
            out.append(_packed(bucket))
            out.extend(_reduced(rest, buckets, moves=True))

    for eqn in eqns:
        kinds = [owner[v] for v in eqn.ins if v in owner]
        moved = eqn.is_collective and not reduces(eqn)
        if kinds and len(eqn.ins) == 1 and (is_view_line(eqn) or moved):  # it is held back too
            after.setdefault(kinds[0], []).append(eqn)
            owner.update((v, kinds[0]) for v in eqn.outs if v is not None)
            continue
        for kind in kinds:
            flush(kind)
        kind = kind_of(eqn)
        size = buckets.before(eqn) if kind is not None else 0
        if kind is None or (moved and not moves) or size > buckets.limits[kind]:
            out.append(eqn)
            continue
        if size_of.get(kind, 0) + size > buckets.limits[kind]:
            flush(kind)
        held_back.setdefault(kind, []).append(eqn)
        size_of[kind] = size_of.get(kind, 0) + size
        owner[eqn.outs[0]] = kind
    for kind in list(held_back):
        flush(kind)
    return out


def _joined(program: Program, eqns: Sequence[Eqn], buckets: Buckets) -> list[Eqn]:
    """The lines with each move taking along later ones of its kind whose operands exist already."""
    known = {*program.inputs, *(v for v, _ in program.constants)}
    inputs = set(known)
    kinds = [None if reduces(eqn) else kind_of(eqn) for eqn in eqns]
    later = [i for i, kind in enumerate(kinds) if kind is not None and eqns[i].ins[0] not in inputs]
    done: set[int] = set()
    out: list[Eqn] = []
    for i, eqn in enumerate(eqns):
        if i in done:
            continue
        group, kind = [i], kinds[i]
        if i in later and kind is not None:
            total = buckets.after(eqn)
            for j in later:
                if j > i and j not in done and kinds[j] == kind and eqns[j].ins[0] in known:
                    total += buckets.after(eqns[j])
                    if total > buckets.limits[kind]:
                        break
                    group.append(j)
        done.update(group)
        out.append(_packed([eqns[j] for j in group]))
        known.update(v for j in group for v in eqns[j].outs if v is not None)
    return out


def _gathered(program: Program, eqns: list[Eqn], buckets: Buckets) -> list[Eqn]:
    """The lines with inputs gathered in groups, each before its first use."""
    gathers, maker = _input_gathers(program, eqns)
    groups = _groups(eqns, gathers, _past_gathers(eqns, gathers, maker), buckets)
    place = {group[0]: k for k, group in enumerate(groups)}
    done: set[int] = set()
    out: list[Eqn] = []

    def views_before(i: int) -> None:
        """Adds the views that line `i` reads."""
        for v in eqns[i].ins:
            j = maker.get(v)
            if j is not None and j not in done:
                views_before(j)
                done.add(j)
                out.append(eqns[j])

    def start(k: int) -> None:
        """Adds group `k` unless it has been."""
        if k < len(groups) and groups[k][0] not in done:
            for j in groups[k]:
                views_before(j)
                done.add(j)
            out.append(_packed([eqns[j] for j in groups[k]]))

    for i, eqn in enumerate(eqns):
        if i in place:
            start(place[i])
        elif i not in done:
            done.add(i)
            out.append(eqn)
    return out


def _input_gathers(program: Program, eqns: Sequence[Eqn]) -> tuple[list[int], dict[Var, int]]:
    """The lines that gather inputs or views of them, and the line of each such view."""
    early = {*program.inputs, *(v for v, _ in program.constants)}
    maker: dict[Var, int] = {}
    gathers: list[int] = []
    for i, eqn in enumerate(eqns):
        if not eqn.ins or not all(v in early for v in eqn.ins):
            continue
        local = is_part_line(eqn)
        kind = kind_of(eqn)
        moves = kind is not None and kind[0] in (AllGather, Exchange) and not reduces(eqn)
        if kind is not None and (local or moves):
            gathers.append(i)
        if local:
            early.update(v for v in eqn.outs if v is not None)
            maker.update((v, i) for v in eqn.outs if v is not None)
    return gathers, maker


def _groups(
    eqns: Sequence[Eqn], gathers: Sequence[int], past: Mapping[int, int], buckets: Buckets
) -> list[list[int]]:
    """The gathers that travel together, by their lines, in the order of the first of each."""
    groups: list[list[int]] = []
    grouped: set[int] = set()
    for n, i in enumerate(gathers):
        if i in grouped:
            continue
        group, total, kind = [i], buckets.after(eqns[i]), kind_of(eqns[i])
        assert kind is not None
        for j in gathers[n + 1 :]:
            if j not in grouped and past[j] == past[i] and kind_of(eqns[j]) == kind:
                total += buckets.after(eqns[j])
                if total > buckets.limits[kind]:
                    break
                group.append(j)
        grouped.update(group)
        groups.append(group)
    return groups


def _past_gathers(
    eqns: Sequence[Eqn], gathers: Sequence[int], maker: Mapping[Var, int]
) -> dict[int, int]:
    """How often each gather's input was gathered before: a second time is for the backward."""
    seen: Counter[Var] = Counter()
    past: dict[int, int] = {}
    for i in gathers:
        v = eqns[i].ins[0]
        while v in maker:
            v = eqns[maker[v]].ins[0]
        past[i] = seen[v]
        seen[v] += 1
    return past
