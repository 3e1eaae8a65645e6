"""Arguments of a function in `shard_map`: DTensors on its mesh, in the layouts that it wants."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fdtensor.layouts.errors import LayoutError, ValueTreeError
from fdtensor.layouts.expected import no_layout
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.tree import broadcast_prefix, flatten, mismatches, paths, unflatten
from fdtensor.runtime.comm import Comm
from fdtensor.tensors.connect import redistribute
from fdtensor.tensors.dtensor import is_dtensor

__all__ = [
    "OPEN",
    "checked",
    "laid_out",
    "no_tensor_result",
    "opened",
    "prefixed",
    "refuse_captured",
]

OPEN: Any = object()
"""Stands for a layout that is left open."""


def checked(
    leaves: Sequence[Any], where: Sequence[str], mesh: Mesh, wanted: Sequence[Any]
) -> Comm[Any]:
    """The Comm of the arguments; raises where they do not fit the mesh or each other.

    Those that are `wanted` in a layout may be on another mesh of the same ranks.
    """
    first = next((leaf for leaf in leaves if is_dtensor(leaf)), None)
    if first is None:
        raise ValueTreeError(
            "shard_map has no DTensor among its arguments, so no Comm to run on.",
            hint="Distribute one of them: distribute(tensor, layout, comm).",
        )
    problems = {}
    for leaf, name, layout in zip(leaves, where, wanted, strict=True):
        if isinstance(leaf, torch.Tensor):
            problems[name] = "a plain tensor: distribute(tensor, layout, comm) makes a DTensor."
        elif is_dtensor(leaf) and not _may_go(leaf.mesh, mesh, layout):
            problems[name] = f"a DTensor on {leaf.mesh!r}: redistribute it to this mesh."
        elif is_dtensor(leaf) and leaf.comm is not first.comm:
            problems[name] = f"a DTensor on another Comm: {leaf.comm!r}."
    if problems:
        raise ValueTreeError(
            f"{len(problems)} of {len(leaves)} arguments cannot go into shard_map on {mesh!r}.",
            **problems,
            hint="Give it DTensors on its mesh and on one Comm, and Python values.",
        )
    return first.comm


def _may_go(own: Mesh, mesh: Mesh, layout: Any) -> bool:
    return own is mesh or (layout is not OPEN and sorted(own.order) == sorted(mesh.order))


def refuse_captured(f: Callable[..., Any]) -> None:
    """Raises for a tensor that `f` closes over and whose derivative would be lost."""
    code = inspect.unwrap(f)
    if not torch.is_grad_enabled() or not inspect.isfunction(code):
        return
    for name, cell in zip(code.__code__.co_freevars, code.__closure__ or (), strict=True):
        try:
            value = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
        if isinstance(value, torch.Tensor) and value.requires_grad:
            raise ValueTreeError(
                f"the function in shard_map closes over {name!r}, a tensor that requires grad.",
                hint="Make it a DTensor and an argument, or detach it.",
            )


def no_tensor_result(where: str, leaf: object) -> ValueTreeError:
    """The error for a result that is no tensor."""
    return ValueTreeError(
        f"{where} is {leaf!r}, which is not a tensor.",
        hint="Let the function return a pytree of tensors.",
    )


def laid_out(leaves: Sequence[Any], wanted: Sequence[Any]) -> list[Any]:
    """The arguments in the layouts that the function wants."""
    out, moving = list(leaves), []
    for i, (leaf, layout) in enumerate(zip(leaves, wanted, strict=True)):
        if is_dtensor(leaf) and layout is not OPEN and layout is not leaf.layout:
            moving.append(i)
    moved = redistribute([out[i] for i in moving], [wanted[i] for i in moving]) if moving else ()
    for i, leaf in zip(moving, moved, strict=True):
        out[i] = leaf
    return out


def opened(layouts: Any, mesh: Mesh, name: str) -> Any:
    """A pytree of layouts on the mesh, with a mark for each None."""
    leaves, spec = flatten(layouts, is_leaf=lambda node: node is None)
    for leaf, where in zip(leaves, paths(spec, name), strict=True):
        if leaf is not None and not isinstance(leaf, Layout):
            raise no_layout(leaf, where)
        if leaf is not None and leaf.mesh is not mesh:
            raise LayoutError(
                f"{where} is a layout on another mesh than that of shard_map.",
                layout=leaf.mesh,
                mesh=mesh,
                hint="Make all layouts on the mesh that shard_map gets.",
            )
    return unflatten(spec, [OPEN if leaf is None else leaf for leaf in leaves])


def prefixed(prefix: Any, spec: Any, count: int, name: str, what: str) -> list[Any]:
    """The layout for each leaf of a tree."""
    skeleton = unflatten(spec, range(count))
    try:
        return broadcast_prefix(prefix, skeleton, _is_layout)
    except ValueError as error:
        raise ValueTreeError(
            f"{name} does not have the structure of {what}.",
            **(mismatches(prefix, skeleton, _is_layout, name) or {"problem": error}),
            hint="Give one layout for all, or a pytree of layouts like it or a prefix of it; "
            "arguments are a tuple.",
        ) from error


def _is_layout(node: object) -> bool:
    return isinstance(node, Layout) or node is OPEN
