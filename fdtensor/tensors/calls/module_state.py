"""`ModuleState`: what the forward of a module depends on besides its operands, as a key.

A call asks for it anew each time, so that `ModuleStates` looks for changes by identity alone.
"""

from __future__ import annotations

from array import array
from collections import deque
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, FunctionType, MappingProxyType, MethodType
from typing import Any

import numpy as np
import torch

from fdtensor.layouts.torch_private import (
    module_hooks,
    module_tensors,
    module_values,
)
from fdtensor.ops.left_behind import OF_MODULES
from fdtensor.tensors.calls.follow import of_user
from fdtensor.tensors.calls.runs import Run, are_same, parts_within, runs
from fdtensor.tensors.dtensor import DTensor

__all__ = ["Itself", "ModuleState", "ModuleStates"]

_VALUES = (
    *(int, str, bytes, type(None), type, torch.dtype, torch.device),
    *(FunctionType, BuiltinFunctionType, Enum),
)
"""Kinds of which a value is its own key."""

_MUTABLE = (
    *(list, tuple, set, frozenset, dict, deque, MappingProxyType),
    *(np.ndarray, array, range, partial, MethodType, DTensor),
)
"""Kinds that count by what is in them."""


class Itself:
    """An object as a key, kept so that no other takes its id."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Itself) and self.value is other.value


class ModuleState:
    """What the forward of a module depends on, as a key: of all modules in it the classes, modes,
    tensors and those attributes that are values. Its hash is worked out once.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.mutable: list[tuple[dict[str, Any], str]] = []
        """The attributes that may change in place: of which module, and their names."""
        self.forwards: dict[tuple[FunctionType, int], Run] = {}
        """The functions that modules run, each with a class of the modules, and those that lie in
        their attributes."""
        self.filled: list[tuple[Any, list[Any]]] = []
        """The containers in attributes, and those of their parts that may run."""
        self.values: list[Any] = [*map(Itself, module_hooks(None))]
        for name, part in module.named_modules(remove_duplicate=False):
            run = [part.__class__.forward, *module_hooks(part)]
            functions = [f for f in run if isinstance(f, FunctionType)]
            values = [v for n, v in vars(part).items() if n not in OF_MODULES]
            own = [(f, part.__class__) for f in functions] + [r for v in values for r in runs(v)]
            self.forwards |= {(f, id(first)): (f, first) for f, first in own}
            self.filled += [(v, within) for v in values if (within := parts_within(v))]
            self.values += [name, part.__class__, part.training, *map(Itself, run)]
            parameters, buffers = module_tensors(part)
            self.values += [(n, Itself(t)) for n, t in (*parameters.items(), *buffers.items())]
            for n, v in vars(part).items():
                if n in OF_MODULES:
                    continue
                key = _as_key(v)
                if key is not None:
                    self.values.append((n, key))
                elif isinstance(v, _MUTABLE) or of_user(v.__class__):
                    self.mutable.append((vars(part), n))
                else:
                    self.values.append((n, Itself(v)))
        self._hash = hash(tuple(self.values))

    @property
    def is_latest(self) -> bool:
        """Whether the containers in attributes have the functions that they had."""
        return all(are_same(parts_within(value), within) for value, within in self.filled)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, ModuleState) and self.values == other.values


def _as_key(value: Any) -> Any:
    """A value as a key, where it does not change in place; None for objects.

    1, 1.0 and True differ, as do 0.0 and -0.0; nan equals itself.
    """
    match value:
        case torch.Tensor():
            return Itself(value)
        case float() | complex() | np.generic():
            return value.__class__, repr(value)
        case tuple() if all(isinstance(x, _VALUES) for x in value):
            return value.__class__, value, tuple(map(type, value))
        case _:
            return (value.__class__, value) if isinstance(value, _VALUES) else None


class ModuleStates:
    """The states of modules, worked out anew only where a value in one is another object."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[list[Any], ModuleState]] = {}

    def known(self, module: torch.nn.Module) -> ModuleState:
        """The state of a module when it was last asked for."""
        known = self._known.get(id(module))
        return self.of(module) if known is None else known[1]

    def of(self, module: torch.nn.Module) -> ModuleState:
        """The state of a module."""
        values = module_values(module)
        before, state = self._known.get(id(module), ([], None))
        if state is None or not are_same(before, values) or not state.is_latest:
            state = ModuleState(module)
            self._known[id(module)] = values, state
        return state
