"""`key_of_argument` and `key_of_read`: the Python values that a program is made with, as keys.

A program belongs to the Python values that its function is given, and to those that it reads by
itself. Where one is another at the next call, another program is made. What containers and objects
hold counts; of objects that a function reads by itself that of the user's own classes, and of
modules what lies in them.
"""

from __future__ import annotations

import functools
import io
from array import array
from collections import deque
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, ValuesView
from datetime import date, time
from enum import Enum
from numbers import Number
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MappingProxyType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any

import numpy as np
import torch

from fdtensor.layouts.remembered import remembered
from fdtensor.layouts.torch_private import SYMBOLIC
from fdtensor.ops.left_behind import OF_MODULES
from fdtensor.tensors.calls.follow import is_open, is_own_module, of_user
from fdtensor.tensors.calls.module_state import Itself, ModuleStates
from fdtensor.tensors.dtensor import DTensor

__all__ = ["KEYS", "key_of_argument", "key_of_read", "tensors_of_read"]

KEYS = frozenset(
    (
        *(int, bool, str, bytes, type(None), torch.dtype, torch.device),
        *(FunctionType, BuiltinFunctionType, type),
    )
)
"""Kinds of which a value is its own key."""

_MAPPINGS = (dict, MappingProxyType)

_CONTAINERS = (
    *(list, tuple, set, frozenset, deque, *_MAPPINGS),
    *(KeysView, ValuesView, ItemsView),
)

_DEEPEST, _WIDEST = 12, 1024
"""How many containers inside of each other, and entries of one, are looked at."""

_MOST = 4096
"""How many attributes are looked at in all."""


_Parts = Callable[[Any], Iterable[Any]]


class _Look:
    """A look at values: those of `arguments`, or of what a function reads by itself.

    It has the objects that were `seen`, and what is known of modules. `functions` gives what
    functions read, where that counts.
    """

    def __init__(
        self, arguments: bool, modules: ModuleStates, functions: _Parts | None = None
    ) -> None:
        self.arguments, self.modules, self.functions = arguments, modules, functions
        self.seen: dict[int, int] = {}
        self.left = _MOST

    def inside(self, value: Any) -> Iterator[tuple[str, Any]]:
        """The attributes of an object, at the first look into it, where they count."""
        kind = value.__class__
        if kind in _CONTAINERS or isinstance(value, torch.nn.Module):
            return
        counts = is_open(kind) if self.arguments else of_user(kind)
        if counts and id(value) not in self.seen and self.left > 0:
            self.seen[id(value)] = len(self.seen)
            for attribute in _attributes(value):
                self.left -= 1
                yield attribute

    def own(self, value: Any) -> Any:
        """The key of an object besides its attributes: another one with the same will do."""
        kind = value.__class__
        if self.arguments or not of_user(kind) or not _is_of_python(kind):
            return _own_key(value)
        return (kind, self.seen.get(id(value))) if self.left > 0 else _own_key(value)


def key_of_argument(value: Any, functions: Callable[[Any], Iterable[Any]]) -> Any:
    """A Python argument as a key: 1, 1.0 and True differ, as do 0.0 and -0.0; nan equals itself.

    The attributes of objects and modules are a part of it, and what `functions` says that functions
    read.
    """
    return _key(value, 0, _Look(True, ModuleStates(), functions))


def key_of_read(value: Any, modules: ModuleStates) -> Any:
    """A value that a function reads by itself as a key: of a DTensor the type; it is read anew."""
    return _key(value, 0, _Look(False, modules))


def tensors_of_read(value: Any, modules: ModuleStates) -> Iterator[DTensor[Any]]:
    """The DTensors of which that key has the types alone, in order."""
    return _tensors(value, 0, _Look(False, modules))


def _key(value: Any, depth: int, looking: _Look) -> Any:
    """The key of a value that is looked at."""
    kind = value.__class__
    if looking.functions is not None and (kind is FunctionType or kind is MethodType):
        within = _Look(True, looking.modules)  # what it calls is among what it reads
        parts = (*looking.functions(value), *vars(value).items())
        return kind, value, *[_key(part, depth + 1, within) for part in parts]
    if kind in KEYS:
        return kind, value
    if kind is float:
        return kind, repr(value)
    if kind is DTensor and not looking.arguments:  # a call reads it anew
        return kind, value.type, Itself(value.comm), value.requires_grad
    if kind is slice or kind is range:  # equal ranges may differ, and a slice may have no hash
        ends = value.start, value.stop, value.step
        return kind, *[_key(end, depth, looking) for end in ends]
    if _is_one(value, depth):
        return _key_of_one(value)
    if depth >= _DEEPEST:
        return _own_key(value)
    return _key_of_many(value, depth + 1, looking)


_ONES: tuple[Any, ...] = (
    *(Enum, type, ModuleType, torch.Tensor, CodeType),
    *(bytearray, array, memoryview, torch.Size, *SYMBOLIC),
)
"""Kinds of values that are no more than they compare by; of a recording, sizes may have symbols."""


def _is_one(value: Any, depth: int) -> bool:
    """Whether a value has no parts that count."""
    if isinstance(value, np.ndarray):
        return not value.dtype.hasobject
    return isinstance(value, _ONES) or (depth == 0 and _is_consumed(value))


def _is_consumed(value: Any) -> bool:
    return isinstance(value, Iterator) and not isinstance(value, io.IOBase)


def _key_of_one(value: Any) -> Any:
    """The key of a value without parts."""
    kind = value.__class__
    match value:
        case torch.Size():
            return _own_key(value)
        case Enum() | type() | ModuleType():
            return kind, value
        case torch.Tensor() | CodeType():  # compared by all that is in them
            return Itself(value)
        case bytearray() | array() | memoryview():
            return kind, *_bytes_of(value)
        case np.ndarray():
            return kind, value.dtype.str, value.shape, value.tobytes()
    return Itself(object()) if _is_consumed(value) else _own_key(value)  # each call takes others


def _key_of_many(value: Any, depth: int, looking: _Look) -> Any:
    """The key of a value with parts, or with attributes."""
    parts = [_key(part, depth, looking) for part in _parts(value, looking)]
    kind = value.__class__
    if isinstance(value, (Number, date, time)):  # equal ones may differ: 1 and 1.0, 0.0 and -0.0
        own: Any = repr(value)
    elif isinstance(value, np.ndarray) and value.size <= _WIDEST:
        own = value.shape
    elif isinstance(value, _CONTAINERS) and len(value) <= _WIDEST:
        own = None
    elif isinstance(value, torch.nn.Module):
        own = Itself(value), looking.modules.known(value)
    elif isinstance(value, functools.partial):
        own = Itself(value)
    else:
        own = looking.own(value)
    return kind, own, *parts, *[_key(part, depth, looking) for part in looking.inside(value)]


def _tensors(value: Any, depth: int, looking: _Look) -> Iterator[DTensor[Any]]:
    """The DTensors that `_key` meets, in its order."""
    kind = value.__class__
    if kind is DTensor:
        yield value
    elif not (kind in KEYS or depth >= _DEEPEST or _is_one(value, depth)):
        for part in _parts(value, looking):
            yield from _tensors(part, depth + 1, looking)
        for part in looking.inside(value):
            yield from _tensors(part, depth + 1, looking)


def _parts(value: Any, looking: _Look) -> Iterable[Any]:
    """What is in a value besides its attributes; of a mapping, pairs."""
    if isinstance(value, torch.nn.Module):
        return _parts_of_module(value, looking)
    if isinstance(value, functools.partial):
        return value.func, value.args, value.keywords
    if isinstance(value, np.ndarray):
        return value.flat if value.size <= _WIDEST else ()
    if isinstance(value, _CONTAINERS) and len(value) <= _WIDEST:
        return value.items() if isinstance(value, _MAPPINGS) else value
    return ()


def _parts_of_module(module: torch.nn.Module, looking: _Look) -> list[Any]:
    """What may change in place in a module; of an argument, all attributes and what it runs."""
    state = looking.modules.of(module)
    parts = [(name, of[name]) for of, name in state.mutable]
    if looking.arguments:
        own = [a for part in module.modules() for a in vars(part).items()]
        parts += [attribute for attribute in own if attribute[0] not in OF_MODULES]
        for f, first in state.forwards.values():
            parts += looking.functions(f) if looking.functions else ()
            parts += _of_class(first) if isinstance(first, type) else ()
    return parts


def _bytes_of(value: bytearray | array[Any] | memoryview) -> tuple[object, ...]:
    """What tells one piece of memory from another."""
    if isinstance(value, memoryview):
        return value.format, value.shape, value.tobytes()
    return (bytes(value),) if isinstance(value, bytearray) else (value.typecode, value.tobytes())


def _own_key(value: Any) -> Any:
    """The key of an object without a look inside: what it compares by, or itself."""
    kind = value.__class__
    if kind.__hash__ in (None, object.__hash__):
        return Itself(value)
    try:
        hash(value)
    except TypeError:
        return Itself(value)
    return kind, value


@remembered(4096)
def _is_of_python(kind: type) -> bool:
    """Whether all that objects of a class hold are attributes: it is made of no class of C."""
    classes = kind.__mro__[:-1]
    return all(c.__flags__ & _HEAP for c in classes) or kind is SimpleNamespace


_HEAP = 1 << 9
"""The flag of a class that is written in Python."""


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    """The attributes of an object, those of `__slots__` and of the user's classes included."""
    yield from getattr(value, "__dict__", {}).items()
    yield from _of_class(value.__class__)
    for base in value.__class__.__mro__:
        slots = base.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield name, getattr(value, name)


def _of_class(kind: type) -> Iterator[tuple[str, Any]]:
    """The attributes of a class, as far as it is of the user's own code."""
    for base in kind.__mro__:
        if is_own_module(base.__module__):
            yield from [(n, v) for n, v in vars(base).items() if not n.startswith("__")]
