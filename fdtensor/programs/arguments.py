"""`Arguments`: the arguments of a call by position and name, with other leaves in them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import optree

from fdtensor.layouts.errors import TraceError
from fdtensor.layouts.tree import unflatten

__all__ = ["Arguments", "arguments_of"]


@attrs.frozen(eq=False)
class Arguments:
    """The arguments of a call by position and name, with other leaves in them."""

    args: tuple[Any, ...]
    names: Mapping[str, Any]

    def of(self, argument: int | str, told: str) -> Any:
        """One of them; raises `TraceError`, with what is `told` of it, where it was not given."""
        try:
            return self.args[argument] if isinstance(argument, int) else self.names[argument]
        except (IndexError, KeyError, TypeError):
            raise TraceError(
                f"{told} argument {argument!r}, which was not given.",
                positions=f"0 to {len(self.args) - 1}" if self.args else "none",
                names=", ".join(map(repr, self.names)) or "none",
                hint="Give the position or the name of an argument.",
            ) from None


def arguments_of(
    f: Callable[..., Any], spec: optree.PyTreeSpec, leaves: Sequence[Any]
) -> Arguments:
    """The arguments of `f`, whose structure is `spec`, with these leaves."""
    args, kwargs = unflatten(spec, leaves)
    try:
        signature = inspect.signature(f)
        others = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
        # a key for random numbers, say, is taken by what is around the function
        own = {k: v for k, v in kwargs.items() if others or k in signature.parameters}
        names = {**signature.bind(*args, **own).arguments, **kwargs}
    except (TypeError, ValueError):
        names = dict(kwargs)
    return Arguments(args, names)
