"""Ops by name, and the tensors among their arguments: `on` registers a rule for many ops."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch

from fdtensor.layouts.torch_private import OpOverload
from fdtensor.ops.graph import Full
from fdtensor.ops.notation.core import rule

__all__ = ["on", "overloads", "tensors"]


def overloads(names: str) -> list[OpOverload]:
    """The overloads of aten with these names, such as `exp` for `exp.default`, or `add.Tensor`."""
    full = [name if "." in name else f"{name}.default" for name in names.split()]
    return [operator.attrgetter(name)(torch.ops.aten) for name in full]


def on(
    names: str, of: Callable[[Any], Callable[..., Any]] | None = None, **options: Any
) -> Callable[[Callable[..., Iterable[Any]]], Callable[..., Iterable[Any]]]:
    """`rule` for the overloads with these names; `of(op)` is the `local` of each."""

    def register(rows: Callable[..., Iterable[Any]]) -> Callable[..., Iterable[Any]]:
        for op in overloads(names):
            rule(op, **({"local": of(op)} if of else {}), **options)(rows)
        return rows

    return register


def tensors(args: tuple[Any, ...]) -> list[Full]:
    """The tensors among the arguments of an op, those of lists too, in order."""
    fulls = []
    for arg in args:
        if isinstance(arg, Full):
            fulls.append(arg)
        elif isinstance(arg, tuple):
            fulls += tensors(arg)
    return fulls
