"""Layouts for a pytree: one for all leaves, or a pytree of them that is a prefix of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import optree

from fdtensor.layouts.errors import ValueTreeError
from fdtensor.layouts.expected import refuse_no_layouts
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.placement import Partial, Replicate
from fdtensor.layouts.tree import broadcast_prefix, flatten, mismatches, paths, unflatten

__all__ = ["layout_of_each", "uncut", "whole_without_dims"]


def layout_of_each(
    layouts: Any, spec: optree.PyTreeSpec, is_layout: Callable[[Any], bool] | None = None
) -> list[Any]:
    """The layout of each leaf of a pytree of this structure, or what else `is_layout` takes.

    Raises `ValueTreeError` where `layouts` has another structure, `LayoutError` where it has
    something else than layouts.
    """
    is_layout = is_layout or _is_layout
    skeleton = unflatten(spec, range(spec.num_leaves))
    try:
        return broadcast_prefix(layouts, skeleton, is_layout)
    except ValueError as error:
        refuse_no_layouts(layouts, is_layout, "layouts")
        raise ValueTreeError(
            "the layouts do not have the structure of the tree.",
            **(mismatches(layouts, skeleton, is_layout, "layouts") or {"problem": error}),
            hint="Pass one layout, or a pytree of layouts like the tree or a prefix of it.",
        ) from error


def whole_without_dims(
    layouts: Any, spec: optree.PyTreeSpec, wanted: Sequence[Any], ndims: Sequence[int]
) -> list[Any]:
    """The layouts of leaves, uncut for tensors without dims where one stands for all below it.

    So one layout does for the state of an optimizer, whose `step` has nothing to cut. One that is
    given for that very leaf stays, and its mistake is told.
    """
    if all(ndims):
        return [*wanted]
    own = {*paths(flatten(layouts, is_leaf=_is_layout)[1], "tree")}
    triples = zip(wanted, ndims, paths(spec, "tree"), strict=True)
    return [
        uncut(to) if not n and name not in own and _is_layout(to) else to for to, n, name in triples
    ]


def uncut(layout: Layout) -> Layout:
    """The layout that cuts nothing, pending as this one."""
    kept = [p if isinstance(p, Partial) else Replicate() for p in layout.placements]
    return Layout(layout.mesh, kept)


def _is_layout(node: object) -> bool:
    return isinstance(node, Layout)
