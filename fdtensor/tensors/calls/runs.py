"""`runs`: the functions that may run where a value is used: in containers and objects too."""

from __future__ import annotations

import functools
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from operator import is_
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch

from fdtensor.layouts.callsite import is_own
from fdtensor.layouts.remembered import remembered
from fdtensor.tensors.calls.follow import Method, follow, of_user

__all__ = ["UNBOUND", "Run", "are_same", "is_users", "names_in", "parts_within", "runs"]

UNBOUND: Any = object()
"""The first argument of a function that is no method."""

Run = tuple[FunctionType, Any]
"""A function, and its first argument where that is known."""

_MOST = 256
"""How many functions of one value are looked at, and how many containers and objects for them."""

_DEEPEST = 4
"""How many containers lie around a function at most."""

_WIDEST = 64
"""How many parts a container has at most whose functions are looked at."""


def runs(
    value: Any,
    names: frozenset[str] = frozenset(),
    of_module: Callable[[torch.nn.Module], Iterator[Run]] = lambda _: iter(()),
) -> Iterator[Run]:
    """The functions of the user that may run where a value is called, or where its parts are.

    Of an object that is one of the user's the special methods, by which operators and loops call
    it, and those attributes that code reads by these `names`; of a class too, whose objects the
    code may make. What modules run `of_module` tells.
    """
    return islice(_runs(value, names, of_module, set()), _MOST)


def _runs(
    value: Any,
    names: frozenset[str],
    of_module: Callable[[torch.nn.Module], Iterator[Run]],
    seen: set[int],
) -> Iterator[Run]:
    kind = value.__class__
    if kind is FunctionType:
        if is_users(value):
            yield value, UNBOUND
        elif hasattr(value, "__wrapped__") and id(value) not in seen:  # a decorator of a package
            seen.add(id(value))
            yield from _runs(value.__wrapped__, names, of_module, seen)
    elif kind is Method:
        if is_users(value.function):
            yield value.function, value.first
        else:  # a method of a package calls those of the user
            yield from _runs(value.first, names, of_module, seen)
    elif kind is MethodType:
        yield from [(value.__func__, value.__self__)] if is_users(value.__func__) else ()
    elif isinstance(value, torch.nn.Module):
        yield from of_module(value)
    elif kind is functools.partial:
        yield from _runs(value.func, names, of_module, seen)
    elif id(value) not in seen and len(seen) < _MOST:
        seen.add(id(value))
        for part in parts_within(value):
            yield from _runs(part, names, of_module, seen)
        own = _of_itself(value if isinstance(value, type) else kind) if _is_users(value) else None
        for name in () if own is None else sorted(own | names):
            entry, _ = follow(value, (name,))
            if entry is not value:
                yield from _runs(entry, names, of_module, seen)


@remembered(1024)
def _is_container(kind: type) -> bool:
    """Whether the parts of such a value can be looked at, and no code of the user runs."""
    named = issubclass(kind, tuple) and hasattr(kind, "_fields")
    own = not named or (kind.__len__, kind.__iter__) != (tuple.__len__, tuple.__iter__)
    return kind in _CONTAINERS or not own


_CONTAINERS = frozenset((list, tuple, dict, deque, OrderedDict, defaultdict))


def parts_within(value: Any, deep: int = _DEEPEST) -> list[Any]:
    """The parts of a container that may run; those of a large one are not looked at."""
    if not _is_container(value.__class__) or len(value) > _WIDEST or not deep:
        return []
    parts = value.values() if isinstance(value, dict) else value
    return [x for x in parts if _may_run(x, deep - 1)]


def are_same(these: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether two lists have the same objects."""
    return len(these) == len(others) and all(map(is_, these, others))


def _may_run(value: Any, deep: int) -> bool:
    """Whether functions of the user may run where this is used as an object, or called."""
    if value.__class__ in _RUN or isinstance(value, torch.nn.Module) or _is_users(value):
        return True
    return bool(parts_within(value, deep))


def _is_users(value: Any) -> bool:
    """Whether this is a class of the user, or an object of one."""
    return of_user(value if isinstance(value, type) else value.__class__)


_RUN = frozenset((FunctionType, Method, MethodType, functools.partial))


def is_users(function: Any) -> bool:
    """Whether this is a function of the user's own code."""
    return function.__class__ is FunctionType and is_own(function.__code__.co_filename)


@remembered(4096)
def names_in(code: CodeType) -> frozenset[str]:
    """The names that code may take attributes by, strings among them; of inner functions too."""
    names = {*code.co_names, *(c for c in code.co_consts if isinstance(c, str))}
    inner = [names_in(c) for c in code.co_consts if isinstance(c, CodeType)]
    return frozenset(names.union(*inner))


@remembered(1024)
def _of_itself(kind: type) -> frozenset[str]:
    """The methods of a class of the user that run without being named."""
    own = {name for base in kind.__mro__ if of_user(base) for name in base.__dict__}
    special = {n for n in own if n.startswith("__") and n.endswith("__")} - _APART
    return frozenset(special | (own & _CALLED))


_CALLED = {"forward", "backward", "setup_context", "jvp", "vmap"}
"""Methods that torch calls, of an `autograd.Function`."""

_APART = frozenset(
    f"__{name}__"
    for name in (
        *("del", "init_subclass", "class_getitem", "set_name"),
        *("repr", "str", "format", "reduce", "reduce_ex", "getstate", "setstate", "copy"),
        *("deepcopy", "hash", "class", "dict", "doc", "module", "weakref", "annotations"),
        *("slots", "match_args", "dataclass_fields", "dataclass_params", "setattr", "delattr"),
        *("set", "delete", "dir", "sizeof", "getinitargs", "getnewargs", "getnewargs_ex"),
    )
)
"""Special names under which there is nothing that runs as a value is used."""
