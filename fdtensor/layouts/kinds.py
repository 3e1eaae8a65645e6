"""Which builtin a value is, whatever it holds: `isinstance` as a type checker follows it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeGuard

__all__ = ["is_dict", "is_iterable", "is_list", "is_mapping", "is_tuple"]


def is_tuple(value: object) -> TypeGuard[tuple[object, ...]]:
    """Whether a value is a tuple."""
    return isinstance(value, tuple)


def is_list(value: object) -> TypeGuard[list[object]]:
    """Whether a value is a list."""
    return isinstance(value, list)


def is_dict(value: object) -> TypeGuard[dict[str, object]]:
    """Whether a value is a dict, as JSON has them: its keys are texts."""
    return isinstance(value, dict)


def is_mapping(value: object) -> TypeGuard[Mapping[object, object]]:
    """Whether a value is a mapping."""
    return isinstance(value, Mapping)


def is_iterable(value: object) -> TypeGuard[Iterable[object]]:
    """Whether a value can be iterated over."""
    return isinstance(value, Iterable)
