"""`each`: one generator of rows for many ops that differ in their other arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from fdtensor.layouts.torch_private import schema_of
from fdtensor.ops.notation.core import rule

__all__ = ["each"]


def each(*ops: Any, **options: Any) -> Callable[[Callable[..., Iterable[Any]]], Any]:
    """Registers the decorated generator for each op.

    It is called with the op and with a dict of its arguments, by the names in its schema.
    """

    def register(rows: Callable[..., Iterable[Any]]) -> Any:
        for op in ops:
            names = [argument.name for argument in schema_of(op).arguments]

            @functools.wraps(rows)
            def of_one(*args: Any, op: Any = op, names: Any = names, **kwargs: Any) -> Any:
                return rows(op, {**dict(zip(names[: len(args)], args, strict=True)), **kwargs})

            rule(op, **options)(of_one)
        return rows

    return register
