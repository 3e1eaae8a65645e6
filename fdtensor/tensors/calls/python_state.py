"""`argument_key` and `Reads`: the Python values that a program is made with, as keys.

A program belongs to the Python values that its function is given, and to those that it reads by
itself: from its closure, or by name from the globals of its module. Where one is another at the
next call, another program is made. Attributes count of objects that are arguments, and of those
that compare by what they hold, and those of modules that are numbers, strings, tensors, or lists
and the like of these; of other objects that a function reads by itself they do not, and neither
does what a function further down reads. Of DTensors that it reads their types count.
"""

from __future__ import annotations

import builtins
import dis
import functools
from collections.abc import Callable, Iterator
from enum import Enum
from numbers import Number
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import ref

import numpy as np
import torch

from fdtensor.layouts.remembered import remembered
from fdtensor.layouts.torch_private import SYMBOLIC
from fdtensor.ops.left_behind import OF_MODULES
from fdtensor.tensors.calls.module_state import Itself, ModuleStates
from fdtensor.tensors.dtensor import DTensor

__all__ = ["Reads", "argument_key", "reads_of"]

_PLAIN = frozenset(
    (
        *(int, bool, str, bytes, type(None), torch.dtype, torch.device),
        *(FunctionType, BuiltinFunctionType, type),
    )
)
"""Kinds of which a value is its own key."""

_CONTAINERS = (list, tuple, set, frozenset, dict)

_DEEPEST, _WIDEST = 6, 1024
"""How many containers inside of each other, and entries of one, are looked at."""


class _Look:
    """A look at values: the objects that were `seen`, and what is known of modules."""

    def __init__(self, modules: ModuleStates) -> None:
        self.modules = modules
        self.seen: set[int] = set()


def argument_key(value: Any) -> Any:
    """A Python argument as a key: 1, 1.0 and True differ, as do 0.0 and -0.0; nan equals itself.

    The attributes of objects and modules are a part of it.
    """
    kind = value.__class__
    return (kind, value) if kind in _PLAIN else _key(value, True, 0, _Look(ModuleStates()))


# a line or two for each kind of value
def _key(value: Any, is_argument: bool, depth: int, looking: _Look) -> Any:
    """The key of an argument, which was `given`, or of a value that a function reads by itself.

    Objects that it has `looking.seen` are not looked into again: they may hold each other.
    """
    kind = value.__class__
    if kind in _PLAIN:
        return kind, value
    if isinstance(value, (Enum, type, ModuleType)):
        return kind, value
    if isinstance(value, (torch.Size, *SYMBOLIC)):  # of a recording, there may be symbols in it
        return _own_key(value)
    if isinstance(value, Number):  # equal ones may differ: 1 and 1.0, 0.0 and -0.0
        return kind, repr(value)
    if kind is DTensor and not is_argument and not looking.seen:  # a call reads it anew
        return kind, value.type, Itself(value.comm), value.requires_grad
    if isinstance(value, torch.Tensor):  # two of them are compared element by element
        return Itself(value)
    if kind is slice:  # has no hash before Python 3.12
        return slice, *[
            _key(v, is_argument, depth, looking) for v in (value.start, value.stop, value.step)
        ]
    if isinstance(value, bytearray):
        return kind, bytes(value)
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return kind, value.dtype.str, value.shape, value.tobytes()
    if depth >= _DEEPEST:
        return _own_key(value)
    if isinstance(value, _CONTAINERS) and len(value) <= _WIDEST:
        entries = value.items() if isinstance(value, dict) else value
        own = _attributes(value) if is_argument and kind not in _CONTAINERS else ()
        return kind, *[_key(v, is_argument, depth + 1, looking) for v in (*entries, *own)]
    if isinstance(value, torch.nn.Module):
        if is_argument:
            return tuple(_given_module(value, depth, looking))
        return _key_of_module(value, depth, looking)
    key = _own_key(value)
    counts = _of_user(kind) and (is_argument or key.__class__ is not Itself)
    if counts and id(value) not in looking.seen:
        looking.seen.add(id(value))
        return key, *[_key(v, is_argument, depth + 1, looking) for v in _attributes(value)]
    return key


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


def _of_user(kind: type) -> bool:
    return kind.__module__.partition(".")[0] not in ("torch", "fdtensor", "numpy", "builtins")


def _is_of_torch(f: FunctionType) -> bool:
    """Whether a function is one of torch, and not around another: what it reads does not vary."""
    return not f.__closure__ and (f.__module__ or "").partition(".")[0] == "torch"


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    """The attributes of an object, those of `__slots__` included."""
    yield from getattr(value, "__dict__", {}).items()
    for base in value.__class__.__mro__:
        slots = base.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield name, getattr(value, name)


def _key_of_module(module: torch.nn.Module, depth: int, looking: _Look) -> tuple[Any, ...]:
    """The key of a module that a function reads by itself."""
    state = looking.modules.of(module)
    mutable = [(name, _key(own[name], False, depth + 1, looking)) for own, name in state.mutable]
    return Itself(module), state, *mutable


def _given_module(module: torch.nn.Module, depth: int, looking: _Look) -> Iterator[Any]:
    """The key of a module that is an argument, whose attributes of all kinds count."""
    yield from _key_of_module(module, depth, looking)
    for part in module.modules():
        own = [a for a in vars(part).items() if a[0] not in OF_MODULES]
        yield from [_key(a, True, depth + 1, looking) for a in own]


class Reads:
    """What a function reads besides its arguments. It does not keep the function."""

    def __init__(self, f: Callable[..., Any]) -> None:
        self.cells: list[tuple[str, Any]] = []
        self.names: list[tuple[dict[str, Any], str]] = []
        self.functions: list[Callable[[], Any]] = []
        self.bound: list[Any] = []
        self._modules = ModuleStates()
        while f is not None:
            if isinstance(f, functools.partial):
                self.bound += [*f.args, *f.keywords.values()]
                f = f.func
            elif isinstance(f, MethodType):
                self.bound.append(f.__self__)
                f = f.__func__  # type: ignore[assignment]
            elif isinstance(f, FunctionType):
                if _is_of_torch(f):
                    break
                space = f.__globals__
                self.cells += zip(f.__code__.co_freevars, f.__closure__ or (), strict=True)
                names = _names_in(f.__code__)
                self.names += [(space, name) for name in names if _varies(space, name)]
                self.functions.append(ref(f))
                f = getattr(f, "__wrapped__", None)  # type: ignore[assignment]
            else:
                self.bound += [f] if isinstance(f, torch.nn.Module) else []
                break

    def __bool__(self) -> bool:
        return bool(self.cells or self.names or self.functions or self.bound)

    def key(self, outer: tuple[Reads, ...] = ()) -> tuple[Any, ...]:
        """The values as a key, while the function lives; not those of `outer` functions again."""
        outer = (*outer, self)
        return tuple(
            [
                (v.__class__, v) if v.__class__ in _PLAIN else self._key_of(v, outer)
                for v in self._values()
            ]
        )

    def _key_of(self, value: Any, outer: tuple[Reads, ...]) -> Any:
        """The key of a value; of a function of DTensors, what that one reads too."""
        reads = getattr(value, "reads", None)
        if isinstance(reads, Reads) and reads not in outer:
            return Itself(value), reads.key(outer)
        return _key(value, False, 0, _Look(self._modules))

    def tensors(self, outer: tuple[Reads, ...] = ()) -> list[DTensor[Any]]:
        """The DTensors among the values, in lists, tuples and dicts too."""
        outer = (*outer, self)
        return [x for v in self._values() for x in _tensors(v, 0, outer)]

    def named(self) -> list[tuple[str, Any]]:
        """The parts of the key, each with the name of its value."""
        names = [name for name, _ in self.cells] + [name for _, name in self.names]
        others = ["what it is bound to"] * (len(self.bound) + 2 * len(self.functions))
        return [*zip([*names, *others], self.key(), strict=True)]

    def _values(self) -> list[Any]:
        values = [_contents(cell) for _, cell in self.cells]
        values += [space.get(name) for space, name in self.names]
        values += self.bound
        for function in self.functions:
            values += [function().__defaults__, function().__kwdefaults__]
        return values


def reads_of(f: Any) -> Reads:
    """What a function reads; one of DTensors knows it."""
    known = getattr(f, "reads", None)
    return known if isinstance(known, Reads) else Reads(f)


def _tensors(value: Any, depth: int, outer: tuple[Reads, ...]) -> Iterator[DTensor[Any]]:
    reads = getattr(value, "reads", None)
    if value.__class__ is DTensor:
        yield value
    elif isinstance(reads, Reads) and reads not in outer:
        yield from reads.tensors(outer)
    elif value.__class__ in _CONTAINERS and len(value) <= _WIDEST and depth < _DEEPEST:
        for entry in value.values() if isinstance(value, dict) else value:
            yield from _tensors(entry, depth + 1, outer)


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing is in it yet
        return None


@remembered(4096)
def _names_in(code: Any) -> tuple[str, ...]:
    """The globals that code reads, functions inside of it included."""
    reads = [i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL"]
    inner = [part for part in code.co_consts if hasattr(part, "co_code")]
    return tuple(dict.fromkeys([*reads, *(name for part in inner for name in _names_in(part))]))


def _varies(space: dict[str, Any], name: str) -> bool:
    """Whether a global may be another one later: no module is, nor is what Python has built in."""
    return not isinstance(space.get(name), ModuleType) and (
        name in space or not hasattr(builtins, name)
    )
