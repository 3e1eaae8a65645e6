"""`lazy_names`: the public names of a package, each imported when it is first asked for."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module

__all__ = ["lazy_names"]


def lazy_names(
    package: str, homes: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """The `__getattr__` and `__dir__` of a package, by the names that each of its modules has."""
    home_of = {name: f"fdtensor.{home}" for home, names in homes.items() for name in names}

    def get(name: str) -> object:
        if name not in home_of:
            own = sys.modules[package]  # Python says which of its names was meant, perhaps
            raise AttributeError(
                f"module {package!r} has no attribute {name!r}", name=name, obj=own
            )
        value = getattr(import_module(home_of[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    def listed() -> list[str]:
        return sorted(sys.modules[package].__all__)

    return get, listed
