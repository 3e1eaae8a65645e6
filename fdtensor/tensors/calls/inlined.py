"""`inlined`: a function of DTensors that is called inside of a traced function, as a part of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch

from fdtensor.layouts.free_type import FreeType
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.layouts.tree import flatten, unflatten
from fdtensor.ops.pins import constrain
from fdtensor.ops.random_key import is_key, with_random_key
from fdtensor.ops.randomness import Numbers
from fdtensor.programs.options import Options
from fdtensor.programs.out_layouts import asked_layouts, resolved
from fdtensor.programs.tracer import type_of
from fdtensor.tensors.dtensor import DTensor, is_dtensor
from fdtensor.tensors.traced_dtensor import TracedDTensor, full_in_trace

__all__ = ["as_records", "as_tensors", "inlined"]


def inlined(f: Callable[..., Any], options: Options, args: Any, kwargs: dict[str, Any]) -> Any:
    """The result of `f` inside of a function that is traced, whose program it becomes a part of.

    Layouts are chosen, and options taken, for the whole; `out_layouts` pins those that it names.
    Beside tensors of the function, a DTensor is one of them; by itself it stays a DTensor.
    """
    leaves, spec = flatten((args, kwargs), is_leaf=is_dtensor)
    known = [leaf for leaf in leaves if isinstance(leaf, DTensor)]
    args, kwargs = unflatten(spec, [as_tensors(leaf) for leaf in leaves])
    with _drawing(f, kwargs) as (g, kwargs):
        result = g(*args, **kwargs)
    if options.out_layouts is not None:
        types = [type_of(leaf) for leaf in leaves]
        result = _pinned(result, resolved(options.out_layouts, f, spec, types))
    if not known or any(isinstance(leaf, torch.Tensor) for leaf in leaves):
        return result
    return as_records(result, known[0].mesh)


def as_tensors(tree: Any) -> Any:
    """A pytree with the full tensors that stand for its DTensors in the traced function."""
    leaves, spec = flatten(tree, is_leaf=is_dtensor)
    return unflatten(
        spec, [full_in_trace(leaf) if isinstance(leaf, DTensor) else leaf for leaf in leaves]
    )


def as_records(tree: Any, mesh: Mesh, types: Sequence[TensorType | FreeType | None] = ()) -> Any:
    """A pytree with DTensors for its tensors, of these types where they are known."""
    leaves, spec = flatten(tree)
    known = [*types, *[None] * len(leaves)][: len(leaves)]
    return unflatten(
        spec,
        [
            TracedDTensor(leaf, mesh, type) if isinstance(leaf, torch.Tensor) else leaf
            for leaf, type in zip(leaves, known, strict=True)
        ],
    )


def _pinned(result: Any, out_layouts: Any) -> Any:
    """The result, with the layouts that are asked of its tensors."""
    leaves, spec = flatten(result, is_leaf=is_dtensor)
    pairs = zip(leaves, asked_layouts(spec, out_layouts), strict=True)
    return unflatten(
        spec,
        [
            constrain(as_tensors(leaf), layout) if isinstance(layout, Layout) else leaf
            for leaf, layout in pairs
        ],
    )


@contextlib.contextmanager
def _drawing(f: Callable[..., Any], kwargs: dict[str, Any]) -> Generator[Any]:
    """The function with its arguments, whose random ops draw from `kwargs["key"]` if it has one."""
    if "key" not in kwargs or not is_key(f, kwargs["key"]):
        yield f, kwargs
        return
    key = kwargs["key"]
    with Numbers.active[-1].apart():
        tensor = key if isinstance(key, torch.Tensor) else key.tensor(torch.device("cpu"))
        yield with_random_key(f), {**kwargs, "key": tensor}
