"""`named_arguments`: a function that says which argument is missing, or was not meant to be there.

Python says so too, but not what was meant, and not as an error of this library.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from fdtensor.layouts.errors import ArgumentError, FdtensorError
from fdtensor.layouts.words import near

__all__ = ["misfit_of", "named_arguments"]

F = TypeVar("F", bound=Callable[..., Any])


def named_arguments(f: F) -> F:
    """The function, which raises `ArgumentError` for arguments that do not fit its signature."""

    @functools.wraps(f)
    def checked(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        try:
            return f(*args, **kwargs)
        except TypeError as error:
            fault = misfit_of(error, f.__name__, f, args, kwargs)
            if fault is None:
                raise
        raise fault

    return checked  # type: ignore[return-value]


def misfit_of(
    error: TypeError, name: str, f: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> ArgumentError | None:
    """The error for a call that did not begin; None where the error comes from inside of it."""
    trace = error.__traceback__
    if isinstance(error, FdtensorError) or trace is None or trace.tb_next is not None:
        return None
    parameters = list(inspect.signature(f).parameters.values())
    by_place = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    given = {p.name for p, _ in zip(by_place, args, strict=False)}
    known = [p.name for p in parameters]
    extra = [n for n in kwargs if n not in known]
    needed = [p for p in parameters if p.default is p.empty and "VAR" not in p.kind.name]
    missing = [p.name for p in needed if p.name not in given and p.name not in kwargs]
    if extra:
        sentence = f"{name} has no argument {extra[0]!r}."
    elif missing:
        sentence = f"{name} lacks {', '.join(map(repr, missing))}."
    elif len(args) > len(by_place):
        most = f"{len(by_place)} argument{'s' * (len(by_place) != 1)}"
        sentence = f"{name} takes {most} without a name, not {len(args)}."
    else:
        sentence = f"{name} is given an argument twice."
    meant = near(extra[0], known) if extra else ""
    return ArgumentError(sentence, hint=f"{meant}Write {name}({_written(parameters)}).")


def _written(parameters: Sequence[inspect.Parameter]) -> str:
    """Parameters as they are written in a call."""
    texts: list[str] = []
    for p in parameters:
        if p.name == "self":
            continue
        if p.kind is p.VAR_POSITIONAL:
            texts.append(f"*{p.name}")
        elif p.kind is p.VAR_KEYWORD:
            texts.append(f"**{p.name}")
        else:
            texts.append(f"{p.name}=..." if p.kind is p.KEYWORD_ONLY else p.name)
    return ", ".join(texts)
