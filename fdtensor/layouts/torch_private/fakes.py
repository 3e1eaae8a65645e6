"""Modes that do not import the compiler of torch, of which they need nothing: 2.11 to 2.13.

Its import takes as long as that of torch. Fake tensors ask it for flags, and the first op that a
mode sees asks it to leave that mode alone, which matters to those alone who compile.
"""

# pyright: reportPrivateUsage=false, reportUnknownVariableType=false

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, TypeVar

import torch
from torch._compile import _disable_dynamo
from torch._decomp import global_decomposition_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["fake_mode", "at_import_of_compiler", "uncompiled"]

Mode = TypeVar("Mode", bound=type[TorchDispatchMode])

_NAME = "torch._dynamo"
_CONFIG = f"{_NAME}.config"
_RUNS = "__dynamo_disable"

_HOMES = (
    "torch._decomp.decompositions",
    "torch._meta_registrations",
    "torch._prims",
    "torch._refs",
    "torch._refs.nn.functional",
    "torch._refs.special",
)
"""Where torch has functions for the types of results."""


def uncompiled(mode: Mode) -> Mode:
    """The class of modes, which is kept from the compiler once that is imported, and not before."""
    _ask_later([vars(mode).get("__torch_dispatch__")])
    return mode


def _ask_later(functions: Iterable[Any]) -> None:
    """Lets functions that are kept from the compiler run without it, unless it is imported.

    Those too that such functions are wrapped around, and so read from where they were defined.
    """
    if _NAME in sys.modules:
        return
    todo = [f for f in functions if isinstance(f, FunctionType)]
    seen = set(todo)
    while todo:
        function = todo.pop()
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        read: dict[str, Any] = {name: _content(cell) for name, cell in cells}
        if function.__code__ is _KEPT.__code__:
            _let_run(read.get("fn"))
        within = [f for f in read.values() if isinstance(f, FunctionType) and f not in seen]
        seen.update(within)
        todo += within


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None


_KEPT: Any = _disable_dynamo(lambda: None)
"""A function that is kept from the compiler, which its first call asks for that."""


def _let_run(function: Any) -> None:
    """What a kept function calls for itself in place of what the compiler would make of it."""
    if function is not None and not hasattr(function, _RUNS):
        setattr(function, _RUNS, function)
        _LET_RUN.append(function)


_LET_RUN: list[Any] = []
"""The functions that run without the compiler, until it is imported."""


class _Import:
    """Sees that something is about to import the compiler, and leaves all as torch has it."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        del path, target
        if name != _NAME:
            return None
        sys.meta_path.remove(self)
        for function in _LET_RUN:
            if getattr(function, _RUNS, None) is function:
                delattr(function, _RUNS)
        _LET_RUN.clear()
        if isinstance(torch.__dict__.get("_dynamo"), _Instead):
            del torch.__dict__["_dynamo"]
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _AndThen(spec.loader)
        return spec


class _AndThen(Loader):
    """The loader of the compiler, and what contexts do once it is imported."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        for action in tuple(_ONCE_IMPORTED):
            action()


_ONCE_IMPORTED: list[Callable[[], Any]] = []


@contextmanager
def at_import_of_compiler(action: Callable[[], Any]) -> Generator[None]:
    """Calls `action` if the compiler of torch is imported, or within the context when it is."""
    if _NAME in sys.modules:
        action()
        yield
        return
    _ONCE_IMPORTED.append(action)
    try:
        yield
    finally:
        _ONCE_IMPORTED.remove(action)


if _NAME not in sys.modules:
    sys.meta_path.insert(0, _Import())


uncompiled(FakeTensorMode)


def fake_mode(**options: Any) -> FakeTensorMode:
    """A `FakeTensorMode` with these options."""
    if _NAME not in sys.modules and _CONFIG not in sys.modules:
        _read_flags()
        _ask_later(_kernels())
    return FakeTensorMode(**options)


def _kernels() -> Iterator[Any]:
    """The functions of torch for the types of results."""
    for table in global_decomposition_table.values():
        yield from table.values()
    for name in _HOMES:
        yield from vars(importlib.import_module(name)).values()


class _Instead(ModuleType):
    """A module until something imports it: it has a few names, and imports it for all others."""

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self.__name__), name)


def _read_flags() -> None:
    """Imports the module of the flags without the package, which takes the same one later."""
    path = Path(torch.__file__).parent / "_dynamo" / "config.py"
    spec = importlib.util.spec_from_file_location(_CONFIG, path)
    assert spec is not None
    assert spec.loader is not None
    flags = importlib.util.module_from_spec(spec)
    sys.modules[_CONFIG] = flags
    try:
        spec.loader.exec_module(flags)
    except Exception:  # torch imports it with the package then, as it does on its own
        del sys.modules[_CONFIG]
        return
    instead: Any = _Instead(_NAME)
    instead.config = flags
    idle: Any = _Instead(f"{_NAME}.compiled_autograd")
    idle._disable = nullcontext  # `torch.func.grad` asks for it, and there is nothing to disable
    instead.compiled_autograd = idle
    torch.__dict__.setdefault("_dynamo", instead)
