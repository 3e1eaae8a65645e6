"""`guard`: a look at the arguments of a call that tells at once whether they are those of an entry.

A Python function that is written out for their structure takes the arguments apart.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import attrs
import torch

from fdtensor.layouts.tensor_type import TensorType
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
    comm, match = entry.comm, _nothing
    if comm.rank is not None and (check or comm.check) not in EVERY_CALL:
        match = _Spelling(comm).function(*given)
    matched = match(*given)
    if matched is None or [*map(id, matched[0])] != [*map(id, leaves)]:
        match = _nothing
    guards.append(Guard(entry, match, reads and reads.key(), ambient()))


def _nothing(_args: Any, _kwargs: Any) -> tuple[list[Any], list[Any]] | None:
    """What matches no arguments."""


class _Spelling:
    """The source of a guard: how it takes arguments apart, and the names in its lines."""

    def __init__(self, comm: Any) -> None:
        self.comm = comm
        self.names: dict[str, Any] = {}
        self.leaves: dict[str, Any] = {}

    def function(self, args: Any, kwargs: Any) -> Match:
        """The function, compiled; for arguments that need a whole look, what matches none."""
        lines = [*self._apart("args", args), *self._apart("kwargs", kwargs)]
        same = _Same.of([*self.leaves.values()], self.comm)
        if same is None:
            return _nothing
        tensors = ", ".join(n for n, leaf in self.leaves.items() if leaf.__class__ is DTensor)
        others = ", ".join(n for n, leaf in self.leaves.items() if leaf.__class__ is not DTensor)
        lines.append(f"return [{', '.join(self.leaves)}], [{tensors}], [{others}]")
        source = "\n    ".join(["def apart(args, kwargs):", *lines])
        exec(compile(source, "<fdtensor guard>", "exec"), self.names)
        return functools.partial(_matched, self.names["apart"], same)

    def _apart(self, name: str, value: Any) -> list[str]:
        """The lines that give names to the leaves of a value, and return None for another one."""
        kind = value.__class__
        if kind is tuple or kind is list:
            own = _unless(f"{name}.__class__ is not {kind.__name__} or len({name}) != {len(value)}")
            return own + self._parts(name, name, value)
        if kind is dict and all(key.__class__ is str for key in value):
            own = _unless(f"{name}.__class__ is not dict or [*{name}] != {[*value]}")
            keys = sorted(value)  # as optree sorts
            whole = "(" + ", ".join(f"{name}[{key!r}]" for key in keys) + ",)" if keys else "()"
            return own + self._parts(name, whole, [value[key] for key in keys])
        if value is None:  # a node without leaves
            return _unless(f"{name} is not None")
        self.leaves[name] = value
        return []

    def _parts(self, name: str, whole: str, values: Sequence[Any]) -> list[str]:
        parts = [f"{name}_{i}" for i in range(len(values))]
        lines = [f"{', '.join(parts)}, = {whole}"] if parts else []
        return lines + [x for part in map(self._apart, parts, values) for x in part]


def _unless(mistake: str) -> list[str]:
    return [f"if {mistake}:", "    return None"]


_TYPE, _COMM, _HELD, _GRAD = map(attrgetter, ("type", "comm", "held", "requires_grad"))


@attrs.frozen
class _Same:
    """What the leaves of all calls of an entry have in common; lists are compared in C."""

    classes: list[type]
    types: list[TensorType]
    comms: list[Any]
    locals: list[type]
    grads: list[bool]
    others: list[Any]

    @classmethod
    def of(cls, leaves: list[Any], comm: Any) -> _Same | None:
        """What these have; None where one is of a kind that needs a whole look."""
        tensors = [x for x in leaves if x.__class__ is DTensor]
        others = [x for x in leaves if x.__class__ is not DTensor]
        plain = all(type(x) in _PLAIN or (type(x) is float and x) for x in others)
        held = [*map(_HELD, tensors)]
        local = _LOCAL.issuperset(map(type, held)) and {*map(_COMM, tensors)} == {comm}
        if len(leaves) > _MOST or not plain or not local:
            return None
        each = [*map(_TYPE, tensors)], [comm] * len(tensors), [*map(type, held)]
        return cls([*map(type, leaves)], *each, [*map(_GRAD, held)], others)


def _matched(
    apart: Callable[[Any, Any], Any], same: _Same, args: Any, kwargs: Any
) -> tuple[list[Any], list[Any]] | None:
    """The leaves and local values of arguments that are the same in all that counts."""
    parts = apart(args, kwargs)
    if parts is None:
        return None
    leaves, tensors, others = parts
    if [*map(type, leaves)] != same.classes or others != same.others:
        return None
    if [*map(_TYPE, tensors)] != same.types or [*map(_COMM, tensors)] != same.comms:
        return None
    values = [*map(_HELD, tensors)]
    if [*map(type, values)] != same.locals or [*map(_GRAD, values)] != same.grads:
        return None
    if len({*map(id, tensors)}) < len(tensors):  # a write to one that is given twice shows in both
        return None
    return leaves, values
