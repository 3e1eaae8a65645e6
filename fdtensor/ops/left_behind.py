"""`left_behind`: what a function does to Python while it is recorded, and no later call repeats.

A module that keeps a tensor of its forward in an attribute would be left with one without values,
and numbers that Python or NumPy draws stay those of the first call.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Generator, Iterator
from typing import Any

import attrs
import numpy as np
import torch

from fdtensor.layouts.tree import flatten
from fdtensor.ops.transparent import has_values

__all__ = ["OF_MODULES", "LeftBehind", "left_behind"]


@attrs.define
class LeftBehind:
    """What a recording has left behind, known when it is over."""

    attributes: tuple[str, ...] = ()
    """Of modules, by the kind of the module: they have their earlier values again."""
    counts: tuple[str, ...] = ()
    """The attributes of modules that the function itself sets to other numbers."""
    generators: tuple[str, ...] = ()
    """The modules of Python that have drawn numbers."""

    def told(self, name: str, line: str) -> Iterator[str]:
        """What a function of this name does that is lost, or that no later call does."""
        if self.attributes:
            yield (
                f"{name} keeps tensors in {', '.join(self.attributes[:3])}, and a program keeps "
                f"none: what was there before is there again ({line}). Return them as results, and "
                "pass those of an earlier call as arguments."
            )
        for attribute in self.counts:
            yield (
                f"{name} sets {attribute}, and what it computes may depend on it: each call with "
                f"another value is recorded anew ({line}). Count outside, or pass a tensor and "
                "return the next."
            )
        for generator in self.generators:
            yield (
                f"{name} draws from {generator}, and its program keeps the numbers of this call "
                f"({line}). Draw with torch, by key=, or pass them as arguments."
            )


@contextlib.contextmanager
def left_behind() -> Generator[LeftBehind]:
    """A context for a recording. Attributes that hold tensors of it are restored at its end."""
    left, known = LeftBehind(), _Known()
    before = _generators()
    try:
        with _entered(known):
            yield left
    finally:
        after = _generators()
        left.generators = tuple(name for name, state in before.items() if state != after[name])
        restored = [name for module, own in known.items() for name in _restored(module, own)]
        left.counts = tuple([name for each in known.items() for name in _counted(*each)])
        left.attributes = tuple(dict.fromkeys(restored))


_Known = dict[torch.nn.Module, dict[str, Any]]
"""The attributes that modules had before their first call of a recording."""


@contextlib.contextmanager
def _entered(known: _Known) -> Generator[None]:
    """A context in which this thread's calls of modules are noted, each before it begins.

    Not a hook on all modules: compiled ones warn of that, and others run slower.
    """
    with _LOCK:
        if torch.nn.Module.__call__ is not _noted:
            _Plain.call, torch.nn.Module.__call__ = torch.nn.Module.__call__, _noted
        _RECORDINGS.append((threading.get_ident(), known))
    try:
        yield
    finally:
        with _LOCK:
            _RECORDINGS[:] = [each for each in _RECORDINGS if each[1] is not known]
            if not _RECORDINGS and torch.nn.Module.__call__ is _noted:  # no other's since
                torch.nn.Module.__call__ = _Plain.call


_LOCK = threading.Lock()
_RECORDINGS: list[tuple[int, _Known]] = []


class _Plain:
    """What calls modules while nothing is recorded."""

    call: Any = None


def _noted(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    for thread, known in list(_RECORDINGS):
        if thread == threading.get_ident() and module not in known:
            known[module] = {name: _copied(value) for name, value in vars(module).items()}
    return _Plain.call(module, *args, **kwargs)


def _generators() -> dict[str, object]:
    """The states of the generators that Python and NumPy draw from by default."""
    legacy: Any = np.random.get_state()
    kind, words, place = legacy[:3]
    return {"random": random.getstate(), "numpy.random": (kind, bytes(words), place)}


def _copied(value: Any) -> tuple[Any, Any]:
    """A value, and what is in it where it is a list or a dict, which may change in place."""
    return value, value.copy() if isinstance(value, (list, dict)) else None


def _restored(module: torch.nn.Module, own: dict[str, Any]) -> Iterator[str]:
    """The attributes of a module that hold tensors without values, which have earlier ones now."""
    attributes = vars(module)
    for name in [n for n, value in attributes.items() if n not in OF_MODULES and _is_lost(value)]:
        if name != _WEIGHTS:
            yield f"{type(module).__name__}.{name}"
        earlier, content = own.get(name, (None, None))
        if name not in own:
            del attributes[name]
            continue
        if isinstance(earlier, list):
            earlier[:] = content
        elif content is not None:
            earlier.clear()
            earlier.update(content)
        attributes[name] = earlier


def _counted(module: torch.nn.Module, own: dict[str, Any]) -> Iterator[str]:
    """The attributes of a module that are another number now, or another string."""
    for name, value in vars(module).items():
        earlier, _ = own.get(name, (None, None))
        number = name not in OF_MODULES and isinstance(value, (int, float, str))
        if number and value is not earlier and value != earlier:  # nan differs from itself
            yield f"{type(module).__name__}.{name}"


_WEIGHTS = "_flat_weights"
"""Where recurrent modules of torch list their parameters anew when one is set: nothing is lost."""

OF_MODULES = frozenset(vars(torch.nn.Module()))
"""The attributes that every module has."""


def _is_lost(value: Any) -> bool:
    """Whether a value holds a tensor that has no values outside of a recording."""
    if isinstance(value, torch.Tensor):
        return not has_values(value)
    if not isinstance(value, (list, tuple, dict)):
        return False
    tensors = (leaf for leaf in flatten(value)[0] if isinstance(leaf, torch.Tensor))
    return not all(map(has_values, tensors))
