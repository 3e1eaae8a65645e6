"""`warn_of_recording`: a function that is recorded for each value, or while autograd seeks nans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import thread_time
from typing import Any

import attrs

from fdtensor.layouts.callsite import warn_user
from fdtensor.layouts.errors import FallbackWarning
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.layouts.tree import argument, paths
from fdtensor.ops.random_bits.keys import Key
from fdtensor.ops.transparent import checks_nans
from fdtensor.tensors.calls.entry import Entry
from fdtensor.tensors.calls.key import FIRST_LEAF, READS, SPEC
from fdtensor.tensors.calls.reads import Reads
from fdtensor.tensors.calls.text import shown
from fdtensor.tensors.dtensor import DTensor

__all__ = ["timed", "warn_of_recording"]

TIMES = 32
"""For how many values of one argument a function is recorded before that is told."""

FEW = 4
"""For how many it is told where recording took long."""

LONG = 2.0
"""For how many seconds of this thread that is."""

LONG_OF_SIZES = 20.0
"""The same where sizes change: a few of them are no fault."""


def timed(make: Callable[[], Entry]) -> Entry:
    """What is made, with the seconds that it took."""
    start = thread_time()
    return attrs.evolve(make(), seconds=thread_time() - start)


def warn_of_recording(
    function: Any, key: tuple[Any, ...], leaves: Sequence[Any], spec: Any
) -> None:
    """Says of a call that is recorded now what its caller may not expect, once for each function.

    `function` is the `Spmd` that is called, and `key` the one of this call.
    """
    _warn_of_nans(function.f, function.reasons)
    alike: dict[_Apart, list[float]] = {}
    for other, entry in function.programs.items():
        apart = _apart(key, other, leaves, spec)
        if apart is not None:
            alike.setdefault(apart, []).append(entry.seconds)
    for apart, seconds in alike.items():
        of_sizes = apart[0][1] is not None and apart[0][0] != _READS
        if of_sizes and function.options.dynamic is not None:
            continue  # they were not recorded
        times, spent = len(seconds) + 1, sum(seconds)
        is_long = spent > (LONG_OF_SIZES if of_sizes else LONG)
        if times < (FEW if is_long else TIMES) or apart in function.reasons:
            continue
        function.reasons.add(apart)
        so_far = f"so far for {times}{f' in {spent:.0f} s' if is_long else ''}"
        name, advice = _told(apart, spec, function.reads)
        text = f"{shown(function.f)} is recorded again for each {name}, {so_far}. {advice}"
        warn_user(text, FallbackWarning)


def _warn_of_nans(f: Callable[..., Any], said: set[object]) -> None:
    """Says that anomaly mode, where it looks for nans, sees none inside of a program."""
    if checks_nans() and "nans" not in said:
        said.add("nans")
        warn_user(
            f"anomaly mode looks for nans in the gradients that {shown(f)} gives, and not inside "
            "of its program. It looks at each op of a function that is called on DTensors without "
            "spmd.",
            FallbackWarning,
        )


_Apart = tuple[tuple[int, int | None], ...]
"""What two calls differ in: the places of leaves, each with a dim where only sizes differ; that of
what the function reads with the number of the value."""


def _apart(
    key: tuple[Any, ...], other: tuple[Any, ...], leaves: Sequence[Any], spec: Any
) -> _Apart | None:
    """What two calls differ in; None where it is neither one Python argument nor sizes alone."""
    pairs = enumerate(zip(key, other, strict=False), -FIRST_LEAF)
    differing = [(place, a, b) for place, (a, b) in pairs if a != b]
    if len(key) != len(other) or not differing:
        return None
    place = differing[0][0]
    if len(differing) == 1 and place == _SPEC and Key.__name__ + "(" in repr(spec):
        return ((place, None),)
    if len(differing) == 1 and place == _READS:
        values, others = differing[0][1:]
        parts = [i for i, (a, b) in enumerate(zip(values, others, strict=False)) if a != b]
        return ((place, parts[0]),) if len(values) == len(others) and len(parts) == 1 else None
    if place < 0 or differing[-1][0] >= len(leaves):
        return None
    if len(differing) == 1 and not isinstance(leaves[place], DTensor):
        return ((place, None),)
    apart: list[tuple[int, int | None]] = []
    for place, a, b in differing:
        if not (isinstance(a, TensorType) and isinstance(b, TensorType)):
            return None
        if (a.dtype, a.layout, a.ndim) != (b.dtype, b.layout, b.ndim):
            return None
        pairs = enumerate(zip(a.shape, b.shape, strict=True))
        apart += [(place, d) for d, (one, another) in pairs if one != another]
    return tuple(apart)


_SPEC = SPEC - FIRST_LEAF

_READS = READS - FIRST_LEAF


def _told(apart: _Apart, spec: Any, reads: Reads) -> tuple[str, str]:
    """What calls differ in, by name, and what to do about it."""
    advice = "A tensor is recorded once: distribute({}, mesh.layout(), comm)."
    place, dim = apart[0]
    if place == _SPEC:
        return "value of a random key", advice.format("key.tensor()")
    if place == _READS and dim is not None:
        return f"value of {reads.named()[dim][0]}", (
            "A tensor that is given as an argument is recorded once: "
            "distribute(torch.tensor(value), mesh.layout(), comm)."
        )
    names = paths(spec, "args")
    if dim is None:
        return f"value of {argument(names[place])}", advice.format("torch.tensor(value)")
    sizes = " and ".join(f"{argument(names[place])} in dim {d}" for place, d in apart)
    return f"size of {sizes}", "One recording serves all sizes of dims in dynamic=."
