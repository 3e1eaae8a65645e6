"""`merged` and `ahead`: what rematerialization leaves to mend, within the same bytes.

Lines that are run twice run once where their results may wait; what travels starts so early that it
arrives when it is read.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import attrs
import numpy as np
import numpy.typing as npt

from fdtensor.ops.graph import Var, substituted
from fdtensor.plans.cost import CostModel
from fdtensor.programs.eqn import Eqn, Together, is_view_line
from fdtensor.programs.memory import Lines, bytes_held, lives, local_bytes, owners
from fdtensor.programs.seconds import line_seconds

__all__ = ["ahead", "merged"]


def merged(lines: Lines, max_bytes: int) -> Lines:
    """The lines without those that an earlier one repeats, where its results may wait for them."""
    owner = owners(lines)
    times = lives(lines, owner)
    held = bytes_held(lines)
    first: dict[Hashable, int] = {}
    name: dict[Var, Var] = {}
    out: list[Eqn | None] = []
    for i, line in enumerate(lines.eqns):
        eqn = _renamed(line, name)
        out.append(eqn)
        if is_view_line(eqn) or isinstance(eqn.op, Together) or not eqn.ins:
            continue
        key = (eqn.op, repr(eqn.args), repr(eqn.kwargs))
        earlier = first.setdefault(key, i)
        before = out[earlier]
        if earlier == i or before is None or not _gives(before, eqn):
            first[key] = i
            continue
        pairs = [(a, b) for a, b in zip(before.outs, eqn.outs, strict=True) if b is not None]
        size = np.sum([local_bytes(lines.types[b.index], lines.ranks) for _, b in pairs], 0)
        freed = min(times[owner[a.index]][-1] for a, _ in pairs if a is not None)
        if (held[freed + 1 : i + 1] + size > max_bytes).any():
            first[key] = i
            continue
        held[freed + 1 : i] += size
        for a, b in pairs:
            assert a is not None
            name[b] = a
            times[owner[a.index]] = [*times[owner[a.index]], *times[owner[b.index]]]
        out[i] = None
    outs = tuple(name.get(v, v) for v in lines.outs)
    return attrs.evolve(lines, eqns=tuple(e for e in out if e is not None), outs=outs)


def _gives(eqn: Eqn, other: Eqn) -> bool:
    """Whether a line has all results of another."""
    return all(b is None or a is not None for a, b in zip(eqn.outs, other.outs, strict=True))


def _renamed(eqn: Eqn, name: dict[Var, Var]) -> Eqn:
    args, kwargs = substituted((eqn.args, eqn.kwargs), lambda v: name.get(v, v))
    return attrs.evolve(eqn, args=args, kwargs=kwargs)


def ahead(lines: Lines, max_bytes: int, cost: CostModel) -> Lines:
    """The lines with what travels so early that others compute for as long, where memory allows.

    A line that sends data is moved up from the one that reads it, never down.
    """
    eqns: list[Eqn] = list(lines.eqns)
    held = bytes_held(lines)
    for eqn in lines.eqns:
        if eqn.is_collective:
            i = eqns.index(eqn)
            size = np.sum([local_bytes(step.dst, lines.ranks) for step in eqn.steps], 0)
            room = (held + size <= max_bytes).all(1)
            j = _start(lines, eqns, room, i, cost)
            if j < i:
                eqns.insert(j, eqns.pop(i))
                buffers = held[i] - held[i - 1]
                held[j + 1 : i + 1] = held[j:i] + size
                held[j] = held[j + 1] + np.maximum(buffers, 0)
    return attrs.evolve(lines, eqns=tuple(eqns))


def _start(
    lines: Lines, eqns: Sequence[Eqn], room: npt.NDArray[np.bool_], i: int, cost: CostModel
) -> int:
    """The place at which line `i` should start, where there is room for its results."""
    eqn = eqns[i]
    needed = line_seconds(lines.types, eqn, cost)
    use = next((k for k in range(i + 1, len(eqns)) if set(eqns[k].ins) & set(eqn.outs)), i)
    for line in eqns[i + 1 : use]:
        needed -= 0.0 if line.is_collective else line_seconds(lines.types, line, cost)
    operands = set(eqn.ins)
    j = i
    while j > 0 and needed > 0:
        before = eqns[j - 1]
        if operands & set(before.outs) or not room[j - 1] or before.is_collective:
            break
        needed -= line_seconds(lines.types, before, cost)
        j -= 1
    return j
