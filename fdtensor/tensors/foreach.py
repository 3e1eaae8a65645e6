"""`by_comm`: `torch._foreach_*` of tensors on several Comms, each part on its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fdtensor.layouts.torch_private import FOREACH
from fdtensor.tensors.dtensor import is_dtensor

__all__ = ["by_comm", "is_foreach"]


def is_foreach(f: Any) -> bool:
    """Whether a function does the same for each entry of a list: `torch._foreach_add`."""
    name = getattr(f, "__name__", None)
    return isinstance(name, str) and name.startswith(FOREACH)


def by_comm(run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """The results of `run(*args, **kwargs)` for the entries of each Comm; None if there is one.

    Lists as long as the first are taken apart with it, of tensors or of numbers.
    """
    operands = (*args, *kwargs.values())
    first = next((a for a in operands if _is_list(a) and any(map(is_dtensor, a))), ())
    places: dict[Any, list[int]] = {}
    for i, x in enumerate(first):
        places.setdefault(x.comm if is_dtensor(x) else None, []).append(i)
    if len(places) < 2:
        return None
    results: list[Any] = [None] * len(first)
    for indices in places.values():

        def part(a: Any, indices: Any = indices) -> Any:
            return [a[i] for i in indices] if _is_list(a) and len(a) == len(first) else a

        part_results = run(*map(part, args), **{name: part(a) for name, a in kwargs.items()})
        if part_results is not None:
            for i, result in zip(indices, part_results, strict=True):
                results[i] = result
    return results


def _is_list(x: Any) -> bool:
    return isinstance(x, (list, tuple))
