"""`recorded`: a function of pytrees as a graph, and the structure of its result."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import optree
import torch

from fdtensor.layouts.errors import TraceError
from fdtensor.layouts.free_type import FreeType
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.layouts.tree import argument, flatten, paths, unflatten
from fdtensor.ops.graph import Full, Graph
from fdtensor.ops.recorder import record
from fdtensor.ops.rewrite import rewritten

__all__ = ["TENSOR", "filled", "name_of", "recorded"]

TENSOR = object()
"""The mark, among the leaves of a result, of a tensor that the program computes."""


def name_of(f: Callable[..., Any]) -> str:
    """The name of a function, for readers of its program."""
    if isinstance(f, functools.partial):
        return name_of(f.func)
    return getattr(f, "__name__", None) or getattr(f, "_name", None) or type(f).__name__


def filled(
    leaves: Sequence[Any],
    types: Sequence[TensorType | FreeType | None],
    tensors: Iterable[torch.Tensor],
) -> list[Any]:
    """The leaves of arguments, tensors for those with types: one for an object that comes twice."""
    tensors = iter(tensors)
    known: dict[int, torch.Tensor] = {}
    full: list[Any] = []
    for leaf, type in zip(leaves, types, strict=True):
        if type is None:
            full.append(leaf)
        elif leaf is None or leaf is type:  # equal types, one object, stand for any two tensors
            full.append(next(tensors))
        else:
            full.append(known.setdefault(id(leaf), next(tensors)))
    return full


def recorded(
    f: Callable[..., Any],
    spec: optree.PyTreeSpec,
    leaves: Sequence[Any],
    types: Sequence[TensorType | FreeType | None],
    device: str | torch.device = "cpu",
    requires_grad: Sequence[bool] = (),
    checks: bool = False,
) -> tuple[Graph, optree.PyTreeSpec, tuple[Any, ...], tuple[int, ...]]:
    """The graph of a function of pytrees; the structure, leaves and new leaves of its result.

    Among the leaves `TENSOR` stands for each tensor. The new leaves are the numbers of the tensors
    that require grad but depend on no argument: leaves of autograd.
    """
    __tracebackhide__ = True
    result: list[Any] = []

    def flat(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        args, kwargs = unflatten(spec, filled(leaves, types, tensors))
        out, tree = flatten(f(*args, **kwargs))
        results = [o for o in out if isinstance(o, torch.Tensor)]
        taken = {id(t) for t in tensors}
        new = [o.requires_grad and o.is_leaf and id(o) not in taken for o in results]
        statics = tuple(TENSOR if isinstance(o, torch.Tensor) else o for o in out)
        result[:] = [tree, statics, tuple(i for i, is_new in enumerate(new) if is_new)]
        return results

    fulls = [Full(t.shape, t.dtype) for t in types if t is not None]
    record_these = functools.partial(
        record, device=device, requires_grad=requires_grad, checks=checks, of_caller=True
    )
    try:
        graph = rewritten(record_these(flat, fulls))
    except (RuntimeError, TypeError, IndexError, AttributeError) as error:
        nested = _raised_below(error, "/torch/nested/")
        if isinstance(error, AttributeError) and not nested:
            raise
        if nested:
            raise TraceError(
                f"{name_of(f)} makes nested tensors, and only plain ones are recorded.",
                hint="Write it with the values and the offsets as two tensors, or padded.",
            ) from error
        raise _failure(f, spec, types, error) from error
    return graph, *result


def _failure(
    f: Callable[..., Any],
    spec: optree.PyTreeSpec,
    types: Sequence[TensorType | FreeType | None],
    error: Exception,
) -> TraceError:
    """The error for a function that fails on full tensors of these types."""
    names = map(argument, paths(spec, "args"))
    facts = {name: t for name, t in zip(names, types, strict=True) if t is not None}
    return TraceError(
        f"{name_of(f)} fails on these types: {str(error).splitlines()[0].rstrip('.')}.",
        **facts,
        hint="It gets full tensors of these shapes; see the error above for where it fails.",
    )


def _raised_below(error: BaseException, folder: str) -> bool:
    """Whether an error comes from a file below this folder."""
    frames = traceback.extract_tb(error.__traceback__)
    return any(folder in frame.filename.replace("\\", "/") for frame in frames)
