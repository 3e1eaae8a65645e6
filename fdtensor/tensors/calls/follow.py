"""`follow`: attributes of what a function reads, as they lie there: no code of the user runs."""

from __future__ import annotations

import functools
import sys
from collections import deque
from collections.abc import Sequence
from types import FunctionType, GetSetDescriptorType, MemberDescriptorType, ModuleType
from typing import Any

import attrs
import torch

from fdtensor.layouts.callsite import is_own
from fdtensor.layouts.remembered import remembered

__all__ = ["Method", "follow", "is_open", "is_own_module", "of_user"]


@attrs.frozen(eq=False)
class Method:
    """A function that is read from an object, which is its first argument."""

    function: FunctionType
    first: Any


def follow(value: Any, attributes: Sequence[str]) -> tuple[Any, list[torch.nn.Module]]:
    """What these attributes lead to, and the modules before it, of which all counts.

    It stops at the last object that can be looked into: not into a tensor, nor into what works its
    attributes out. A property is a `Method`. What is only written to leads to its class.
    """
    modules: list[torch.nn.Module] = []
    for name in attributes:
        if isinstance(value, torch.nn.Module):
            entry = _attribute(value, name)
            if entry.__class__ is not Method and not of_user(entry.__class__):
                break
            modules.append(value)
        elif isinstance(value, (type, ModuleType, FunctionType)) or is_open(value.__class__):
            entry = _attribute(value, name)
        elif value.__class__ in _WRITTEN and name in _WRITES:
            return value.__class__, modules
        else:
            break
        if entry is _MISSING:
            break
        value = entry
        if value.__class__ is Method:
            break
    return value, modules


_WRITTEN = frozenset((list, set, dict, deque))

_WRITES = frozenset(("append", "appendleft", "extend", "insert", "add", "update", "clear"))
"""The methods that write to a container, whatever is in it."""

_MISSING: Any = object()

_NOTHING: dict[str, Any] = {}

_COMPUTED = (functools.cached_property, property)


def _attribute(value: Any, name: str) -> Any:
    """An attribute of an object, a class or a module; `_MISSING` where none lies in it."""
    own = getattr(value, "__dict__", _NOTHING)
    if isinstance(value, ModuleType):
        return own.get(name, _MISSING)
    is_class = isinstance(value, type)
    classes = value.__mro__ if is_class else value.__class__.__mro__
    entry = next((c.__dict__[name] for c in classes if name in c.__dict__), _MISSING)
    if not is_class and name in own and not isinstance(entry, _COMPUTED):
        return own[name]
    if isinstance(entry, (MemberDescriptorType, GetSetDescriptorType)):
        return _MISSING if is_class else getattr(value, name, _MISSING)
    function = _function_of(entry)
    if not isinstance(function, FunctionType):
        return _MISSING if hasattr(entry.__class__, "__get__") else entry
    if isinstance(entry, classmethod):
        return Method(function, value if is_class else value.__class__)
    return function if is_class or isinstance(entry, staticmethod) else Method(function, value)


def _function_of(entry: Any) -> Any:
    """The function behind an attribute of a class; itself where there is none."""
    match entry:
        case property():
            return entry.fget
        case functools.cached_property():
            return entry.func
        case staticmethod() | classmethod():
            return entry.__func__
    return entry


def is_open(kind: type) -> bool:
    """Whether the attributes of such an object may count: not of what has a meaning of its own."""
    return kind.__module__.partition(".")[0] not in _CLOSED


_CLOSED = frozenset(("torch", "fdtensor", "numpy", "builtins"))


def of_user(kind: type) -> bool:
    """Whether a class is of the user's own code, or holds what it is given, as a namespace does."""
    return kind.__module__ in ("types", "collections") or is_own_module(kind.__module__)


@remembered(4096)
def is_own_module(name: str) -> bool:
    """Whether a module is of the user's own code, not of Python or of an installed package."""
    top = name.partition(".")[0]
    if top == "__main__":
        return True
    file = getattr(sys.modules.get(name), "__file__", None)
    return top not in _CLOSED and top not in sys.stdlib_module_names and is_own(file or "")
