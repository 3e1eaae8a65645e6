"""`guard`: a look at the arguments of a call that tells at once whether they are those of an entry.

It is written out as a Python function for the structure of the arguments, small parts first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch

from fdtensor.ops.ambient import ambient
from fdtensor.programs.options import EVERY_CALL
from fdtensor.tensors.calls.entry import Entry
from fdtensor.tensors.dtensor import DTensor

__all__ = ["Guard", "guard"]

_GUARDS = 16
"""How many guards a function has: those of the first calls that come again."""

_MOST = 4096
"""The most leaves of arguments that are looked at so."""

_PLAIN = frozenset({int, bool, str, torch.dtype, torch.device})

_LOCAL = frozenset({torch.Tensor, torch.nn.Parameter})


Match = Callable[[Any, Any], tuple[list[Any], list[Any]] | None]


@attrs.frozen(eq=False)
class Guard:
    """What calls of an entry have in common: their arguments, what is read besides, settings."""

    entry: Entry
    match: Match
    """The leaves of the arguments and the local values of DTensors; None for other arguments."""
    reads: Any
    settings: Any

    def of_call(self, args: Any, kwargs: Any, reads: Any) -> tuple[list[Any], list[Any]] | None:
        """The leaves and local values of a call; None where it may have another entry."""
        matched = self.match(args, kwargs)
        if matched is None or ambient() != self.settings or (reads and reads.key()) != self.reads:
            return None
        return matched


def guard(
    guards: list[Guard],
    entry: Entry,
    check: Any,
    given: tuple[Any, Any],
    leaves: Sequence[Any],
    reads: Any,
) -> None:
    """Adds to the `guards` of a function that of an entry whose call has come again.

    `check` is how often the function checks its arguments on all ranks, which are `given` and have
    these `leaves`. Where only a whole look will do, the guard matches nothing.
    """
    if len(guards) >= _GUARDS or any(known.entry is entry for known in guards):
        return
    comm, match = entry.comm, None
    real = comm.rank is not None and entry.traced is not None
    if real and (check or comm.check) not in EVERY_CALL:
        match = _Spelling(comm).function(*given)
    matched = match and match(*given)
    if matched is None or [*map(id, matched[0])] != [*map(id, leaves)]:
        match = _nothing
    guards.append(Guard(entry, match or _nothing, reads and reads.key(), ambient()))


def _nothing(_args: Any, _kwargs: Any) -> None:
    return None


class _Unfit(Exception):
    """Raised for arguments that are of no kind for a guard."""


class _Spelling:
    """The source of a guard: what it reads of the arguments, and the names in its lines."""

    def __init__(self, comm: Any) -> None:
        self.names: dict[str, Any] = {"DTensor": DTensor, "comm": comm}
        self.leaves: list[str] = []
        self.tensors: list[str] = []
        self.values: list[str] = []

    def function(self, args: Any, kwargs: Any) -> Match | None:
        """The function, compiled; None for arguments that need a whole look."""
        try:
            lines = [*self.lines("args", args), *self.lines("kwargs", kwargs)]
        except _Unfit:
            return None
        if len(self.tensors) > 1:  # a write to one that is given twice shows in the other
            lines += _unless(
                f"len({{{', '.join(map('id({})'.format, self.tensors))}}}) != {len(self.tensors)}"
            )
        lines.append(f"return [{', '.join(self.leaves)}], [{', '.join(self.values)}]")
        source = "\n    ".join(["def match(args, kwargs):", *lines])
        exec(compile(source, "<fdtensor guard>", "exec"), self.names)
        return self.names["match"]

    def lines(self, name: str, value: Any) -> list[str]:
        """The lines for a value of this name, which return None for another one."""
        kind = value.__class__
        if len(self.leaves) > _MOST:
            raise _Unfit
        if kind is DTensor:
            return self._of_tensor(name, value)
        if kind is tuple or kind is list:
            own = _unless(f"{name}.__class__ is not {kind.__name__} or len({name}) != {len(value)}")
            parts = [f"{name}_{i}" for i in range(len(value))]
            own += [f"{', '.join(parts)}, = {name}"] if parts else []
            return own + self._of_parts(dict(zip(parts, value, strict=True)))
        if kind is dict and all(key.__class__ is str for key in value):
            own = _unless(f"{name}.__class__ is not dict or [*{name}] != {[*value]}")
            keys = {f"{name}_{i}": key for i, key in enumerate(sorted(value))}  # as optree sorts
            own += [f"{part} = {name}[{key!r}]" for part, key in keys.items()]
            return own + self._of_parts({part: value[key] for part, key in keys.items()})
        if value is None:  # a node without leaves
            return _unless(f"{name} is not None")
        if kind in _PLAIN or (kind is float and value):
            self.leaves.append(name)
            own, kept = self._constant(kind), self._constant(value)
            return _unless(f"{name}.__class__ is not {own} or {name} != {kept}")
        raise _Unfit

    def _of_parts(self, parts: dict[str, Any]) -> list[str]:
        blocks = [self.lines(name, value) for name, value in parts.items()]
        return [line for block in sorted(blocks, key=len) for line in block]

    def _of_tensor(self, name: str, x: DTensor[Any]) -> list[str]:
        local, held = f"{name}_v", x.held
        if x.comm is not self.names["comm"] or held.__class__ not in _LOCAL:
            raise _Unfit
        self.leaves.append(name)
        self.tensors.append(name)
        self.values.append(local)
        own, type = self._constant(held.__class__), self._constant(x.type)
        return [
            *_unless(f"{name}.__class__ is not DTensor or {name}.type is not {type}"),
            f"{local} = {name}.held",
            *_unless(
                f"{name}.comm is not comm or {local}.__class__ is not {own} or "
                f"{'not ' if held.requires_grad else ''}{local}.requires_grad"
            ),
        ]

    def _constant(self, value: Any) -> str:
        name = f"c{len(self.names)}"
        self.names[name] = value
        return name


def _unless(mistake: str) -> list[str]:
    return [f"if {mistake}:", "    return None"]
