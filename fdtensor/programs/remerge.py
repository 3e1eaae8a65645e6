"""`merged`: what rematerialization leaves to mend, within the same bytes."""

from __future__ import annotations

from collections.abc import Hashable

import attrs
import numpy as np

from fdtensor.ops.graph import Var
from fdtensor.programs.eqn import Eqn, Together, is_view_line, renamed
from fdtensor.programs.memory import Lines, local_bytes, usage_of

__all__ = ["merged"]


def merged(lines: Lines, max_bytes: int) -> Lines:
    """The lines without those that an earlier one repeats, where its results may wait for them."""
    usage = usage_of(lines)
    owner, times, held = usage.owner, dict(usage.lives), np.array(usage.held)
    first: dict[Hashable, int] = {}
    name: dict[Var, Var] = {}
    out: list[Eqn | None] = []
    for i, line in enumerate(lines.eqns):
        eqn = renamed(line, name)
        out.append(eqn)
        if is_view_line(eqn) or isinstance(eqn.op, Together) or not (eqn.ins and any(eqn.outs)):
            continue
        key = (eqn.op, repr(eqn.args), repr(eqn.kwargs))
        earlier = first.setdefault(key, i)
        before = out[earlier]
        if earlier == i or before is None or not _gives(before, eqn):
            first[key] = i
            continue
        pairs = [(a, b) for a, b in zip(before.outs, eqn.outs, strict=True) if b is not None]
        size = np.sum([local_bytes(lines.types[b.index], lines.ranks) for _, b in pairs], 0)
        ends = {a: times[owner[a.index]][-1] for a in before.outs if a is not None}
        freed = min(ends[a] for a, _ in pairs if a is not None)
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
