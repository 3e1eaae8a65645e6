"""`Record`: the base of immutable values. Equal records are one object, so `==` is `is`."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakValueDictionary

import attrs

from fdtensor.layouts.signatures import misfit_of

__all__ = ["Record", "fields_of", "integer", "intern", "natural"]

R = TypeVar("R", bound="Record")

_existing: WeakValueDictionary[tuple[object, ...], Any] = WeakValueDictionary()
_lock = threading.Lock()


class _Interned(type):
    if not TYPE_CHECKING:  # checkers read the signature of __init__ instead

        def __call__(cls, /, *args: object, **kwargs: object) -> object:
            try:
                record = super().__call__(*args, **kwargs)
            except TypeError as error:
                fault = misfit_of(error, cls.__name__, cls, args, kwargs)
                if fault is None:
                    raise
                raise fault from None
            return intern(record)

    @property
    def __signature__(cls) -> inspect.Signature:
        """That of `__init__`, which `inspect` does not look for behind a metaclass."""
        signature = inspect.signature(cls.__init__)
        return signature.replace(parameters=[*signature.parameters.values()][1:])


class Record(metaclass=_Interned):
    """The base of a frozen attrs record whose `==` and `hash` are those of the object.

    Copies, pickles and `attrs.evolve` come back as the one object that holds the same fields.
    """

    __slots__ = ("__weakref__",)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return _rebuild, (type(self), fields_of(self))

    def __copy__(self: R) -> R:
        return self

    def __deepcopy__(self: R, memo: object) -> R:
        return self

    def _repr_pretty_(self, printer: Any, _cycle: bool) -> None:
        printer.text(repr(self))  # hypothesis would print the fields instead


def intern(record: R) -> R:
    """The one record that equals `record`: itself, or the one made before it."""
    with _lock:
        return _existing.setdefault((type(record), fields_of(record)), record)


def fields_of(record: Record) -> tuple[object, ...]:
    """The fields of a record, in order."""
    return _reader(type(record))(record)


@functools.cache
def _reader(kind: type) -> Callable[[object], tuple[object, ...]]:
    """The function that reads all fields of a record of this kind."""
    names = [field.name for field in attrs.fields(kind)]
    if len(names) > 1:
        return attrgetter(*names)
    return lambda record: tuple([getattr(record, name) for name in names])


def _rebuild(kind: type[Record], values: tuple[object, ...]) -> object:
    return getattr(kind, "_make", kind)(*values)


def natural(value: object) -> int | None:
    """`value` as an int, 0 or more; None for anything else."""
    try:
        number = integer(value)
    except (TypeError, AttributeError):
        return None
    return number if number >= 0 else None


def integer(value: Any) -> int:
    """`value` as an int; raises TypeError for a bool and for whatever is not an integer."""
    if isinstance(value, bool):
        raise TypeError(f"{value!r} is a bool, not an int")
    return value.__index__()
