"""`donated_among` and `spend`: arguments that a call may free once it has read them last."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fdtensor.layouts.errors import FdtensorError, TraceError
from fdtensor.layouts.tree import flatten
from fdtensor.programs.arguments import arguments_of
from fdtensor.tensors.calls.text import shown
from fdtensor.tensors.dtensor import DTensor
from fdtensor.tensors.owed import StandIn

__all__ = ["Donate", "donated_among", "spend"]

Donate = str | int | Sequence[str | int]
"""The arguments of a function that its calls may free, by name or position."""


class _Spent(StandIn):
    """What a DTensor holds once a call was free to free it: nothing."""

    __slots__ = ("by",)

    def __init__(self, by: str) -> None:
        self.by = by

    def local(self, comm: Any) -> Any:
        del comm
        raise self._gone()

    @property
    def at_hand(self) -> Any:
        raise self._gone()

    def _gone(self) -> FdtensorError:
        return FdtensorError(
            f"this DTensor was donated to {self.by}, which has freed it.",
            hint="Read what the call gave back instead, or leave the argument out of donate=.",
        )


def donated_among(
    f: Callable[..., Any], spec: Any, leaves: Sequence[Any], donate: Donate, derived: bool
) -> frozenset[int]:
    """The numbers, among the DTensors of a call, of those in the arguments that it may free.

    Raises `TraceError` for an argument that was not given or is given twice, and where derivatives
    are wanted: these would read it.
    """
    if donate == ():
        return frozenset()
    if derived:
        raise TraceError(
            f"{shown(f)} is given tensors that require grad, and frees arguments.",
            donate=donate,
            hint="Donate to a function that computes its gradients inside, or detach() them.",
        )
    numbers = iter(range(len(leaves)))
    each = [next(numbers) if isinstance(leaf, DTensor) else None for leaf in leaves]
    arguments = arguments_of(f, spec, each)
    names = [donate] if isinstance(donate, (str, int)) else donate
    trees = [arguments.of(name, "donate names") for name in names]
    donated = frozenset(k for k in flatten(trees)[0] if isinstance(k, int))
    known = [leaf for leaf in leaves if isinstance(leaf, DTensor)]
    for x in (known[number] for number in donated):
        if sum(x is other for other in known) > 1:
            raise TraceError(
                f"{shown(f)} is given one DTensor as two arguments, and frees one of them.",
                donate=donate,
                x=x.type,
                hint="Leave both arguments out of donate=, or give it once.",
            )
    return donated


def spend(leaves: Sequence[Any], donated: frozenset[int], f: Callable[..., Any]) -> None:
    """Takes from DTensors, by their numbers, what they hold."""
    spent = _Spent(shown(f))
    known = [leaf for leaf in leaves if isinstance(leaf, DTensor)]
    for number in donated:
        object.__setattr__(known[number], "held", spent)
