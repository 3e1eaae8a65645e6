"""`warn_of_values`: a function that is recorded again for each value of a Python argument."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any

from fdtensor.layouts.callsite import warn_user
from fdtensor.layouts.errors import FallbackWarning
from fdtensor.layouts.tree import argument, paths
from fdtensor.ops.random_bits.keys import Key
from fdtensor.tensors.calls.key import FIRST_LEAF, SPEC
from fdtensor.tensors.calls.text import shown
from fdtensor.tensors.dtensor import DTensor

__all__ = ["warn_of_values"]

TIMES = 32
"""For how many values of one argument a function is recorded before that is told."""


def warn_of_values(
    f: Callable[..., Any],
    key: tuple[Any, ...],
    others: Collection[tuple[Any, ...]],
    leaves: Sequence[Any],
    spec: Any,
    said: set[str],
) -> None:
    """Says that calls differ in one Python argument alone, once for each that is not `said`.

    `key` is that of a call which is recorded now, `others` are those of all that are known.
    """
    alone: Counter[int] = Counter()
    for other in others:
        apart = [i for i, (a, b) in enumerate(zip(key, other, strict=False)) if a != b]
        if len(apart) == 1 and len(other) == len(key):
            alone[apart[0] - FIRST_LEAF] += 1
    for place, times in alone.items():
        if times < TIMES - 1:
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
                f"{shown(f)} is recorded again for each value of {name}, so far for {times + 1}. "
                f"A tensor is recorded once: distribute({given}, mesh.layout(), comm).",
                FallbackWarning,
            )
