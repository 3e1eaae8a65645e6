"""`call_key`: what calls have in common that run the same program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fdtensor.layouts.errors import CommError, TraceError
from fdtensor.layouts.tree import argument, paths
from fdtensor.ops.ambient import ambient
from fdtensor.ops.transparent import recording
from fdtensor.programs.open_dims import Names
from fdtensor.runtime.comm import kind_of
from fdtensor.tensors.calls.reads import argument_key
from fdtensor.tensors.dtensor import DTensor
from fdtensor.tensors.owed import Collecting

__all__ = [
    "FIRST_LEAF",
    "READS",
    "SPEC",
    "call_key",
    "refuse_other_comm",
    "requires_grad",
    "tracking",
    "without_sizes",
]


def call_key(
    f: Callable[..., Any], reads: Any, leaves: Sequence[Any], spec: Any, orders: Any
) -> tuple[Any, ...]:
    """The key of a call with these arguments: their Comm, whether it wants derivatives, the rest.

    `f` is a function of DTensors, `reads` the key of what it reads besides them, and `orders` that
    of their dicts.
    """
    __tracebackhide__ = True
    first_places: tuple[int, ...] = ()
    if len(set(map(id, leaves))) < len(leaves):  # a write to a tensor given twice shows in both
        ids = [id(leaf) for leaf in leaves if leaf.__class__ is DTensor]
        first_places = tuple(map(ids.index, ids)) if len(set(ids)) < len(ids) else ()
    key: list[Any] = [spec, orders, first_places, reads]
    comm, grads = None, False
    for leaf in leaves:
        if leaf.__class__ is DTensor:
            comm = comm or leaf.comm
            if leaf.comm is not comm:
                refuse_other_comm(f, comm, leaves, spec)
            key.append(leaf.type)
            grads = grads or requires_grad(leaf.held)
        else:
            key.append(argument_key(leaf))
    if comm is None:
        raise _none_distributed(f, leaves)
    grads = grads and torch.is_grad_enabled()
    if grads:
        key += [tracking(leaf) for leaf in leaves if leaf.__class__ is DTensor]
    return (comm, grads, ambient(), *key)


SPEC = 3
"""The place in such a key of the tree of the arguments, which has random keys in it."""

READS = 6
"""The place in such a key of what the function reads besides its arguments."""

FIRST_LEAF = 7
"""The place in such a key of the first leaf."""


def without_sizes(key: tuple[Any, ...], names: Names) -> tuple[Any, ...]:
    """The key of a call without those sizes of its leaves that have names."""
    parts = list(key)
    for place, of_leaf in enumerate(names, FIRST_LEAF):
        if any(of_leaf):
            type, pairs = key[place], zip(of_leaf, key[place].shape, strict=True)
            shape = tuple([name or size for name, size in pairs])
            parts[place] = shape, type.dtype, type.layout
    return tuple(parts)


def requires_grad(local: Any) -> bool:
    """Whether a local value, or one of its tensors on simulated ranks, wants derivatives."""
    if local.__class__ is tuple:
        return any(leaf.requires_grad for leaf in local)
    return local.requires_grad


def tracking(x: DTensor[Any]) -> bool | type[Collecting]:
    """Whether a derivative by a tensor is wanted, and whether it may be left pending."""
    return Collecting if isinstance(x.held, Collecting) else requires_grad(x.held)


def refuse_other_comm(f: Callable[..., Any], comm: Any, leaves: Sequence[Any], spec: Any) -> None:
    """Raises `CommError` where an argument is on another Comm than this one, that of the first."""
    for place, leaf in enumerate(leaves):
        if leaf.__class__ is DTensor and leaf.comm is not comm:
            raise CommError(
                f"{argument(paths(spec, 'args')[place])} of {f!r} is on another Comm than the "
                "arguments before it.",
                first=comm,
                second=leaf.comm,
                **{"differ in": _differences(comm, leaf.comm)},
                hint="Make all DTensors with one Comm: connect(mesh) once, then pass it on.",
            )


def _differences(one: Any, other: Any) -> str:
    """What two Comms do not have alike, which may print the same."""
    pairs = {name: (getattr(one, name), getattr(other, name)) for name in ("mesh", "check", "cost")}
    names = [name for name, (a, b) in pairs.items() if a != b]
    if one.__class__ is not other.__class__:
        names = ["kind", *names]
    return ", ".join(names) or "nothing: they come from two calls of connect"


def _none_distributed(f: Callable[..., Any], leaves: Sequence[Any]) -> TraceError:
    """The error for a call that has no DTensor to say where it runs."""
    hint = "Make one with distribute(tensor, layout, comm), or call the function itself."
    if recording():
        hint = "Call the function itself: a traced function computes with full tensors of torch."
    given = ", ".join(map(kind_of, leaves)) or "none"
    return TraceError(f"no argument of {f!r} is a DTensor.", arguments=given, hint=hint)
