"""`argument_key` and `reader_of`: the Python values that a program is made with, as keys.

A program belongs to the Python values that its function is given, and to those that it reads by
itself: from its closure, or by name from the globals of its module. Where one is another at the
next call, another program is made. Attributes of objects count where the object is an argument;
what a function further down reads, and the parameters of modules that it closes over, do not.
"""

from __future__ import annotations

import dis
import functools
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

__all__ = ["argument_key", "reader_of"]

_PLAIN = frozenset(
    (
        *(int, bool, str, bytes, type(None), torch.dtype, torch.device),
        *(FunctionType, BuiltinFunctionType, type),
    )
)
"""Kinds of which a value is its own key."""

_CONTAINERS = (list, tuple, set, frozenset, dict)

_DEEPEST, _WIDEST = 4, 64
"""How many containers inside of each other, and entries of one, are looked at."""


class _Itself:
    """An object as a key, kept so that no other takes its id."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and self.value is other.value


def argument_key(value: Any, depth: int = 0) -> Any:
    """A Python argument as a key: 1, 1.0 and True differ, as do 0.0 and -0.0; nan equals itself.

    Of an object that is told from others by being itself, the attributes are a part of the key.
    """
    kind = value.__class__
    if kind in _PLAIN:
        return kind, value
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return kind, value.dtype.str, value.shape, value.tobytes()
    if _has_state(value) and depth < _DEEPEST:
        return _Itself(value), *[argument_key(v, depth + 1) for v in vars(value).items()]
    return _key(value, argument_key, depth)


def _captured_key(value: Any, depth: int = 0) -> Any:
    return _key(value, _captured_key, depth)


def _key(value: Any, of: Callable[[Any, int], Any], depth: int) -> Any:
    kind = value.__class__
    if kind in _PLAIN:
        return kind, value
    if kind is float:
        return float, repr(value)
    if kind is slice:  # has no hash before Python 3.12
        return slice, *[of(v, depth) for v in (value.start, value.stop, value.step)]
    if kind in _CONTAINERS and depth < _DEEPEST and len(value) <= _WIDEST:
        return kind, *[of(v, depth + 1) for v in (value.items() if kind is dict else value)]
    if isinstance(value, torch.nn.Module):
        return _Itself(value), *[module.training for module in value.modules()]
    if isinstance(value, torch.Tensor):  # two of them are compared element by element
        return _Itself(value)
    try:
        hash(value)
    except TypeError:
        return _Itself(value)
    return kind, value


def _has_state(value: Any) -> bool:
    """Whether a value is an object of the user with attributes, and no value by its own word."""
    kind = value.__class__
    if isinstance(value, (type, ModuleType, FunctionType, torch.nn.Module)):
        return False
    of_others = kind.__module__.partition(".")[0] in ("torch", "fdtensor", "numpy", "builtins")
    by_itself = kind.__hash__ in (None, object.__hash__)
    return by_itself and not of_others and hasattr(value, "__dict__")


def reader_of(f: Callable[..., Any]) -> Callable[[], tuple[Any, ...]] | None:
    """A function that gives the key of what `f` reads besides its arguments; None for nothing."""
    cells: list[Any] = []
    names: list[tuple[dict[str, Any], str]] = []
    bound: list[Any] = []
    while f is not None:
        if isinstance(f, functools.partial):
            bound += [f.args, f.keywords]
            f = f.func
        elif isinstance(f, MethodType):
            bound.append(f.__self__)
            f = f.__func__  # type: ignore[assignment]
        elif isinstance(f, FunctionType):
            space = f.__globals__
            cells += f.__closure__ or ()
            names += [(space, name) for name in _names_in(f.__code__) if _varies(space, name)]
            bound += [v for v in (f.__defaults__, f.__kwdefaults__) if v]
            f = getattr(f, "__wrapped__", None)  # type: ignore[assignment]
        else:
            bound += [f] if isinstance(f, torch.nn.Module) else []
            break
    if not (cells or names or bound):
        return None

    def read() -> tuple[Any, ...]:
        values = [_contents(cell) for cell in cells]
        values += [space.get(name) for space, name in names]
        values += bound
        return tuple(
            [(v.__class__, v) if v.__class__ in _PLAIN else _captured_key(v) for v in values]
        )

    return read


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing is in it yet
        return None


@functools.lru_cache(maxsize=4096)
def _names_in(code: Any) -> tuple[str, ...]:
    """The globals that code reads, functions inside of it included."""
    reads = [i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL"]
    inner = [part for part in code.co_consts if hasattr(part, "co_code")]
    return tuple(dict.fromkeys([*reads, *(name for part in inner for name in _names_in(part))]))


def _varies(space: dict[str, Any], name: str) -> bool:
    return name in space and not isinstance(space[name], ModuleType)
