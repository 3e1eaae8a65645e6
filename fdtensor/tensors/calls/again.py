"""`warn_of_recording`: a function that is recorded for each value, or while autograd seeks nans."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any

import attrs

from fdtensor.layouts.callsite import warn_user
from fdtensor.layouts.errors import FallbackWarning
from fdtensor.layouts.tree import argument, paths
from fdtensor.ops.random_bits.keys import Key
from fdtensor.ops.transparent import checks_nans
from fdtensor.tensors.calls.entry import Entry
from fdtensor.tensors.calls.key import FIRST_LEAF, SPEC
from fdtensor.tensors.calls.text import shown
from fdtensor.tensors.dtensor import DTensor

__all__ = ["timed", "warn_of_recording"]

TIMES = 32
"""For how many values of one argument a function is recorded before that is told."""

FEW = 4
"""For how many it is told where recording took long."""

LONG = 2.0
"""For how many seconds that is."""


def timed(make: Callable[[], Entry]) -> Entry:
    """What is made, with the seconds that it took."""
    start = perf_counter()
    return attrs.evolve(make(), seconds=perf_counter() - start)


def warn_of_recording(
    f: Callable[..., Any],
    key: tuple[Any, ...],
    others: Mapping[tuple[Any, ...], Entry],
    leaves: Sequence[Any],
    spec: Any,
    said: set[str],
) -> None:
    """Says of a call that is recorded now what its caller may not expect, once for each function.

    `key` is that of the call, `others` are those of all that are known, and `said` has the reasons
    of the warnings before.
    """
    _warn_of_nans(f, said)
    _warn_of_values(f, key, others, leaves, spec, said)


def _warn_of_nans(f: Callable[..., Any], said: set[str]) -> None:
    """Says that anomaly mode, where it looks for nans, sees none inside of a program."""
    if checks_nans() and "nans" not in said:
        said.add("nans")
        warn_user(
            f"anomaly mode looks for nans in the gradients that {shown(f)} gives, and not inside "
            "of its program. It looks at each op of a function that is called on DTensors without "
            "spmd.",
            FallbackWarning,
        )


def _warn_of_values(
    f: Callable[..., Any],
    key: tuple[Any, ...],
    others: Mapping[tuple[Any, ...], Entry],
    leaves: Sequence[Any],
    spec: Any,
    said: set[str],
) -> None:
    """Says that calls differ in one Python argument alone, once for each that is not `said`.

    `key` is that of a call which is recorded now, `others` are those of all that are known.
    """
    alone: dict[int, list[float]] = {}
    for other, entry in others.items():
        apart = [i for i, (a, b) in enumerate(zip(key, other, strict=False)) if a != b]
        if len(apart) == 1 and len(other) == len(key):
            alone.setdefault(apart[0] - FIRST_LEAF, []).append(entry.seconds)
    for place, seconds in alone.items():
        times, spent = len(seconds) + 1, sum(seconds)
        if times < (FEW if spent > LONG else TIMES):
            continue
        if 0 <= place < len(leaves) and not isinstance(leaves[place], DTensor):
            name, given = argument(paths(spec, "args")[place]), "torch.tensor(value)"
        elif place == SPEC - FIRST_LEAF and Key.__name__ + "(" in repr(spec):
            name, given = "a random key", "key.tensor()"
        else:
            continue
        if name not in said:
            said.add(name)
            warn_user(
                f"{shown(f)} is recorded again for each value of {name}, so far for {times}"
                f"{f' in {spent:.0f} s' if spent > LONG else ''}. "
                f"A tensor is recorded once: distribute({given}, mesh.layout(), comm).",
                FallbackWarning,
            )
