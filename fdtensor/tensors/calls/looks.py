"""`Known`: where the values lie that a function was seen to read, to read them again quickly."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from operator import attrgetter, is_
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import ref

import attrs
import torch

from fdtensor.tensors.calls.code_reads import chains_in
from fdtensor.tensors.calls.follow import Method, follow, is_own_module, of_user
from fdtensor.tensors.calls.module_state import ModuleState, ModuleStates
from fdtensor.tensors.calls.python_state import KEYS
from fdtensor.tensors.calls.runs import UNBOUND, are_same, is_users, parts_within

__all__ = ["First", "Known", "Look", "looks_of", "parts_of"]

_FIXED = KEYS | {float, complex, CodeType}
"""Kinds of values that never change in place."""

_CODE = attrgetter("__code__", "__defaults__", "__kwdefaults__")


@attrs.frozen(eq=False)
class First:
    """The first argument of a function, as a place."""

    value: Any


@attrs.frozen(eq=False)
class Look:
    """Where a value lies that a function reads.

    That is in a dict of globals, a cell or a first argument, or as an attribute of what lies there.
    In a function lie its code and its defaults, in a partial what it is bound to.
    """

    text: str
    where: Any
    name: str = ""
    attributes: tuple[str, ...] = ()
    first: Any = UNBOUND
    """The first argument of a function that lies there."""

    def values(self) -> list[Any]:
        """The value, after the modules on the way to it."""
        return _read([(self.where, self.name, self.attributes)])


_Place = tuple[Any, str, tuple[str, ...]]


# one loop for all: it runs at each call
def _read(places: Sequence[_Place]) -> list[Any]:
    """What lies in these places."""
    values: list[Any] = []
    for where, name, attributes in places:
        kind = where.__class__
        if kind is dict:
            value = where.get(name)
        elif kind is CellType:
            try:
                value = where.cell_contents
            except ValueError:  # nothing is in it yet
                value = None
        elif kind is First:
            value = where.value
        elif kind is functools.partial:
            values += *where.args, *where.keywords.values()
            continue
        else:
            values += _CODE(where() if kind is ref else where)
            continue
        if attributes:
            value, modules = follow(value, attributes)
            values += modules
        values.append(value)
    return values


class Known:
    """The values that a function was seen to read, and where they lie.

    Where one of them is a function, or an object that may be called, it is to be the same again:
    others would read other things. Of others, such as tensors, the new ones are taken.
    """

    def __init__(self, states: ModuleStates) -> None:
        self.states = states
        self.places: list[_Place] = []
        self.values: list[Any] = []
        """What counts of them."""
        self.is_fixed = True
        """Whether none of them changes in place."""
        self.key: tuple[Any, ...] | None = None
        """That of all values, where they are fixed."""
        self._checked: list[Any] = []
        self._methods: list[tuple[int, Method]] = []
        self._free: list[tuple[int, int]] = []
        self._filled: list[tuple[int, list[Any]]] = []
        """The places of containers, and those of their parts that are to be the same again."""
        self._modules: list[tuple[torch.nn.Module, ModuleState]] = []

    def look(self, look: Look) -> list[Any]:
        """What lies there."""
        values = look.values()
        self.places.append((look.where, look.name, look.attributes))
        for value in values:
            self._note(value)
        return values

    def _note(self, value: Any) -> None:
        kind, place = value.__class__, len(self._checked)
        parts = parts_of(value)
        self.is_fixed = self.is_fixed and all(part.__class__ in _FIXED for part in parts)
        self.values += parts
        if kind is Method:
            self._methods.append((place, value))
        elif isinstance(value, torch.nn.Module):
            self._modules.append((value, self.states.known(value)))
        elif kind not in _FIXED and not _is_called(kind):
            if within := parts_within(value):
                self._filled.append((place, within))
            self._free.append((place, len(self.values) - 1))
            self.values[-1] = value = kind  # which keeps no tensor
        self._checked.append(value)

    def again(self) -> list[Any] | None:
        """The values that count; None where something else may be read."""
        latest, values = _read(self.places), self.values
        if len(latest) != len(self._checked):
            return None
        for i, method in self._methods:
            value = latest[i]
            if value.__class__ is not Method or value.function is not method.function:
                return None
            latest[i] = method if value.first is method.first else value
        if not all(are_same(parts_within(latest[i]), within) for i, within in self._filled):
            return None
        if self._free:
            values = [*values]
            for i, place in self._free:
                values[place], latest[i] = latest[i], latest[i].__class__
        if any(self.states.known(module) is not state for module, state in self._modules):
            return None
        return values if all(map(is_, latest, self._checked)) else None


def parts_of(value: Any) -> Sequence[Any]:
    """What counts of a value: of a method its function, and the object if that is not looked at."""
    if value.__class__ is not Method:
        return (value,)
    return (value.function,) if is_users(value.function) else (value.first, value.function)


def _is_called(kind: type) -> bool:
    """Whether an object of this kind may run a function of the user."""
    if kind in (functools.partial, MethodType):
        return True
    return of_user(kind) and any("__call__" in base.__dict__ for base in kind.__mro__)


def looks_of(f: FunctionType, first: Any, code: Any) -> list[Look]:
    """Where the values lie that a function reads, of its `first` argument too.

    `code` is the function, or a weak reference to it.
    """
    looks: list[Look] = []
    space, free, cells = f.__globals__, f.__code__.co_freevars, f.__closure__ or ()
    for chain in chains_in(f.__code__):
        text = ".".join((chain.name, *chain.attributes))
        match chain.root:
            case "global" if _varies(space.get(chain.name)):
                looks.append(Look(text, space, chain.name, chain.attributes))
            case "cell":
                looks.append(Look(text, cells[free.index(chain.name)], "", chain.attributes))
            case "first" if first is not UNBOUND:
                looks.append(Look(text, First(first), "", chain.attributes))
            case "super" if first is not UNBOUND:
                looks += _looks_of_super(chain.name, first)
            case _:
                pass
    return [*looks, Look(f"the code or a default of {f.__name__}", code)]


def _looks_of_super(name: str, first: Any) -> list[Look]:
    """Where `super()` of an object may have a function: in all of its classes."""
    classes = first.__mro__ if isinstance(first, type) else first.__class__.__mro__
    known = [base for base in classes if isinstance(base.__dict__.get(name), FunctionType)]
    text = f"super().{name}"
    looks = [Look(text, First(base), "", (name,), first) for base in known]
    if all(is_users(base.__dict__[name]) for base in known):
        return looks
    return [*looks, Look("what super() reads", First(first))]


def _varies(value: Any) -> bool:
    """Whether a global may be another one later: no package is."""
    return not isinstance(value, ModuleType) or is_own_module(value.__name__)
