"""`remembered` and `while_alive`: results that are kept, of which there are never too many.

What follows from types, plans and programs is worked out once. A process that meets new ones for
days does not grow for it: after `MOST` new results all are forgotten, and those that are still
wanted are worked out again. What follows from a program does not keep the program, nor its tensors.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar
from weakref import ref

__all__ = ["MOST", "forget", "remembered", "while_alive"]

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

MOST = 1 << 17
"""How many results are kept at most, of all functions together: about 50 MB of them."""

_functions: list[Any] = []
_new = itertools.count(1)


def remembered(most: int) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """The function that keeps its last results, `most` at most: a pure one of hashable arguments.

    As fast as `functools.lru_cache`, which it is.
    """

    def decorate(f: Callable[P, R]) -> Callable[P, R]:
        def worked_out(*args: P.args, **kwargs: P.kwargs) -> R:
            if next(_new) > MOST:
                forget()
            return f(*args, **kwargs)

        kept: Any = functools.lru_cache(most)(functools.wraps(f)(worked_out))
        kept.__wrapped__ = f
        _functions.append(kept)
        return kept

    return decorate


def while_alive(
    most: int,
) -> Callable[[Callable[Concatenate[T, P], R]], Callable[Concatenate[T, P], R]]:
    """`remembered` of a function that is not to keep its first argument, and what that holds."""

    def decorate(f: Callable[Concatenate[T, P], R]) -> Callable[Concatenate[T, P], R]:
        @remembered(most)
        def of(first: ref[Any], *args: P.args, **kwargs: P.kwargs) -> R:
            return f(first(), *args, **kwargs)  # type: ignore[arg-type]

        @functools.wraps(f)
        def recalled(first: T, /, *args: P.args, **kwargs: P.kwargs) -> R:
            return of(ref(first), *args, **kwargs)

        return recalled

    return decorate


def forget() -> None:
    """Drops all results that `remembered` keeps."""
    global _new
    _new = itertools.count(1)
    for kept in _functions:
        kept.cache_clear()
