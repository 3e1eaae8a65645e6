"""`Reads`: what a function reads besides its arguments, as a part of the key of its program.

These are the variables of functions around it, the globals that it names, and the object whose
method it is, each with those attributes that its code reads: of `config.model.width` the width
counts. What the functions of the user that it calls so read counts too. Of DTensors that it reads
the types count: a call reads their values anew.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import FunctionType, MethodType
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch

from fdtensor.layouts.callsite import is_own
from fdtensor.tensors.calls.follow import Method, of_user
from fdtensor.tensors.calls.looks import First, Known, Look, looks_of, parts_of
from fdtensor.tensors.calls.module_state import Itself, ModuleStates
from fdtensor.tensors.calls.python_state import (
    KEYS,
    key_of_argument,
    key_of_read,
    tensors_of_read,
)
from fdtensor.tensors.calls.runs import UNBOUND, Run, is_users, names_in, runs
from fdtensor.tensors.dtensor import DTensor

__all__ = ["Reads", "argument_key", "reads_of"]

_MOST = 256
"""How many functions are looked at that call each other."""

_Called = tuple[FunctionType, Any, Any]
"""A function, its first argument where that is known, and itself or a weak reference to it."""


class Reads:
    """What a function reads besides its arguments. It does not keep the function."""

    def __init__(self, f: Callable[..., Any]) -> None:
        self.functions: list[tuple[ref[FunctionType], Any]] = []
        self.bound: list[torch.nn.Module] = []
        self.partials: list[functools.partial[Any]] = []
        self._modules = ModuleStates()
        self._known: Known | None = None
        while f is not None:
            if isinstance(f, functools.partial):
                self.partials.append(f)
                f = f.func
            elif isinstance(f, MethodType):
                if _is_of_torch(f.__func__):
                    break
                self.bound += [f.__self__] if isinstance(f.__self__, torch.nn.Module) else []
                self.functions.append((ref(f.__func__), f.__self__))
                f = getattr(f.__func__, "__wrapped__", None)  # type: ignore[assignment]
            elif isinstance(f, FunctionType):
                if _is_of_torch(f):
                    break
                self.functions.append((ref(f), UNBOUND))
                f = getattr(f, "__wrapped__", None)  # type: ignore[assignment]
            elif isinstance(f, torch.nn.Module):
                self.bound.append(f)
                break
            else:  # an object may have a method that is called
                f = f.__call__ if of_user(f.__class__) else None  # type: ignore[assignment]

    def __bool__(self) -> bool:
        return bool(self.functions or self.bound or self.partials)

    def key(self, outer: tuple[Reads, ...] = ()) -> tuple[Any, ...]:
        """The values as a key, while the function lives; not those of `outer` functions again."""
        values, fixed = self._latest()
        if fixed is not None:
            return fixed
        outer, keys = (*outer, self), dict[int, Any]()
        for value in values:  # of which one may be read in many places
            if id(value) not in keys:
                keys[id(value)] = self._key_of(value, outer)
        return tuple([keys[id(value)] for value in values])

    def _key_of(self, value: Any, outer: tuple[Reads, ...]) -> Any:
        """The key of a value; of a function of DTensors, what that one reads too."""
        kind = value.__class__
        if kind in KEYS:
            return kind, value
        reads = getattr(value, "reads", None)
        if isinstance(reads, Reads) and reads not in outer:
            return Itself(value), reads.key(outer)
        return key_of_read(value, self._modules)

    def values(self) -> list[Any]:
        """The values, in order."""
        return self._latest()[0]

    def tensors(self, outer: tuple[Reads, ...] = ()) -> list[DTensor[Any]]:
        """The DTensors among the values, in lists, objects and modules too."""
        outer = (*outer, self)
        return [x for value in self.values() for x in self._tensors_of(value, outer)]

    def _tensors_of(self, value: Any, outer: tuple[Reads, ...]) -> Iterator[DTensor[Any]]:
        if value.__class__ in KEYS:
            return
        reads = getattr(value, "reads", None)
        if isinstance(reads, Reads):
            yield from () if reads in outer else reads.tensors(outer)
        else:
            yield from tensors_of_read(value, self._modules)

    def named(self) -> list[tuple[str, Any]]:
        """The parts of the key, each with the name of its value."""
        names = [name for name, _ in self._walk(Known(self._modules))]
        return [*zip(names, self.key(), strict=True)]

    def _latest(self) -> tuple[list[Any], tuple[Any, ...] | None]:
        """The values, and their key where they never change in place."""
        known = self._known
        values = None if known is None else known.again()
        if known is None or values is None:
            known = Known(self._modules)
            values = [value for _, value in self._walk(known)]
            own = [f() for f, _ in self.functions]
            keeps_itself = any(value is f for value in values for f in own)
            self._known = None if keeps_itself else known
            if known.is_fixed:
                known.key = tuple([self._key_of(value, (self,)) for value in values])
        return values, known.key

    def _walk(self, known: Known) -> Iterator[tuple[str, Any]]:
        """What is read, each with its name; in the same order where nothing has changed."""
        todo = [(f, first, weak) for weak, first in self.functions if (f := weak()) is not None]
        for place in (*self.partials, *map(First, self.bound)):
            for value in known.look(Look("what it is bound to", place)):
                yield "what it is bound to", value
                todo += [(g, own, g) for g, own in runs(value, of_module=self._run)]
        seen: set[tuple[int, int]] = set()
        for f, first, code in todo:  # which grows
            if (id(f), id(first)) in seen or len(seen) == _MOST:
                continue
            seen.add((id(f), id(first)))
            names = names_in(f.__code__)
            for look in looks_of(f, first, code):
                for value in known.look(look):
                    yield from [(look.text, part) for part in parts_of(value)]
                    is_method = look.first is not UNBOUND and value.__class__ is FunctionType
                    used = Method(value, look.first) if is_method else value
                    todo += [(g, own, g) for g, own in runs(used, names, self._run)]

    def _run(self, module: torch.nn.Module) -> Iterator[Run]:
        """The functions of the user that a module runs."""
        forwards = self._modules.known(module).forwards.values()
        return ((f, first) for f, first in forwards if is_users(f))


def argument_key(value: Any) -> Any:
    """A Python argument as a key, as `key_of_argument` says; of functions what they read counts."""
    kind = value.__class__
    if kind in KEYS and kind is not FunctionType:
        return kind, value
    reads = getattr(value, "reads", None)
    if isinstance(reads, Reads):  # a function of DTensors
        return Itself(value), *[key_of_argument(v, _read_values) for v in reads.values()]
    return key_of_argument(value, _read_values)


def _read_values(f: Callable[..., Any]) -> list[Any]:
    """What a function that is an argument reads; of one of an installed package nothing."""
    function = f.__func__ if isinstance(f, MethodType) else f
    code = getattr(function, "__code__", None)
    if code is None or not (function.__closure__ or is_own(code.co_filename)):
        return []
    if function is not f:  # whose object is not to be kept
        return Reads(f).values()
    reads = _of_arguments.get(function)
    if reads is None:
        reads = _of_arguments[function] = Reads(f)
    return reads.values()


_of_arguments: WeakKeyDictionary[Any, Reads] = WeakKeyDictionary()


def reads_of(f: Any) -> Reads:
    """What a function reads; one of DTensors knows it."""
    known = getattr(f, "reads", None)
    return known if isinstance(known, Reads) else Reads(f)


def _is_of_torch(f: FunctionType) -> bool:
    """Whether a function is one of torch, and not around another: what it reads does not vary."""
    return not f.__closure__ and (f.__module__ or "").partition(".")[0] == "torch"
