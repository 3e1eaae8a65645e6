"""`lazy_names`: the public names of a package, each imported when it is first asked for."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module

__all__ = ["lazy_names"]


def lazy_names(
    package: str, *homes: str
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """The `__getattr__` and `__dir__` of a package whose `__all__` its modules `homes` define.

    The modules are imported in their order until one has the name in its own `__all__`.
    """

    def get(name: str) -> object:
        public: Sequence[str] = sys.modules[package].__all__
        for home in homes if name in public else ():
            module = import_module(home)
            if name in module.__all__:
                value = getattr(module, name)
                setattr(sys.modules[package], name, value)
                return value
        raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name)

    def listed() -> list[str]:
        return sorted(sys.modules[package].__all__)

    return get, listed
