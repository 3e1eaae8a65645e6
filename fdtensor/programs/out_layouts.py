"""`wanted_layouts`: the layouts that the outputs of a function must have, by `out_layouts`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import optree

from fdtensor.layouts.errors import TraceError, ValueTreeError
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.layouts.tree import broadcast_prefix, flatten, mismatches, unflatten
from fdtensor.ops.graph import Full, Graph
from fdtensor.programs.options import Like
from fdtensor.programs.recording import TENSOR

__all__ = ["as_arguments", "asked_layouts", "resolved", "wanted_layouts"]


def wanted_layouts(
    graph: Graph,
    spec: optree.PyTreeSpec,
    types: Sequence[TensorType | None],
    out_tree: optree.PyTreeSpec,
    statics: Sequence[object],
    out_layouts: object,
) -> list[Layout | None]:
    """The layout that each output must have, or None where it is chosen."""
    tensors = [i for i, leaf in enumerate(statics) if leaf is TENSOR]
    asked: list[Layout | Like | None] = [None] * len(statics)
    if out_layouts is not None:
        asked = _of_leaves(out_tree, out_layouts)
    outs = iter(graph.outs)
    fulls = [graph.types[next(outs).index] if leaf is TENSOR else None for leaf in statics]
    like = as_arguments(fulls, out_tree, types, spec)
    wants: list[Layout | None] = []
    for v, i in zip(graph.outs, tensors, strict=True):
        wanted = like[i] if asked[i] is None else asked[i]
        if isinstance(wanted, Like):  # like no argument
            wanted = None
        if wanted is not None:
            full = graph.types[v.index]
            TensorType(full.shape, full.dtype, wanted)  # raises where it cannot be
        wants.append(wanted)
    return wants


def resolved(
    out_layouts: object,
    f: Callable[..., Any],
    spec: optree.PyTreeSpec,
    types: Sequence[TensorType | None],
) -> object:
    """`out_layouts` with the layouts of an argument in place of each `like`.

    Raises `TraceError` where there is no such argument.
    """
    leaves, tree = flatten(out_layouts)
    if not any(isinstance(leaf, Like) for leaf in leaves):
        return out_layouts
    layouts = [None if t is None else t.cotangent().layout for t in types]
    args, kwargs = unflatten(spec, layouts)
    names = _names_of(f, args, kwargs)

    def layout_of(argument: int | str | None) -> Any:
        if argument is None:
            return Like(None)
        try:
            return args[argument] if isinstance(argument, int) else names[argument]
        except (IndexError, KeyError):
            raise TraceError(
                f"out_layouts is like argument {argument!r}, which was not given.",
                positions=f"0 to {len(args) - 1}" if args else "none",
                names=", ".join(map(repr, names)) or "none",
                hint="Give the position or the name of an argument.",
            ) from None

    return unflatten(tree, [layout_of(x.argument) if isinstance(x, Like) else x for x in leaves])


def _names_of(f: Callable[..., Any], args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments of a call by name, where the function has a signature."""
    try:
        return {**inspect.signature(f).bind(*args, **kwargs).arguments, **kwargs}
    except (TypeError, ValueError):
        return dict(kwargs)


def asked_layouts(out_tree: optree.PyTreeSpec, out_layouts: object) -> list[Layout | None]:
    """A layout, or None, for each leaf of a result."""
    return [x if isinstance(x, Layout) else None for x in _of_leaves(out_tree, out_layouts)]


def _of_leaves(out_tree: optree.PyTreeSpec, out_layouts: object) -> list[Layout | Like | None]:
    """A layout, None or `like(None)` for each leaf of a result."""

    def leaf(x: object) -> bool:
        return x is None or isinstance(x, (Layout, Like))

    whole = unflatten(out_tree, [0] * out_tree.num_leaves)
    try:
        return broadcast_prefix(out_layouts, whole, leaf)
    except ValueError as error:
        raise ValueTreeError(
            "out_layouts is no prefix of what the function returns.",
            **mismatches(out_layouts, whole, leaf, "out_layouts"),
            hint="Give one Layout, None or like(0) for all, or a tree of the same structure.",
        ) from error


def as_arguments(
    fulls: Sequence[Full | None],
    out_tree: optree.PyTreeSpec,
    types: Sequence[TensorType | None],
    spec: optree.PyTreeSpec,
) -> list[Layout | None]:
    """The layout of an argument for each leaf of the result, where one has the same shapes.

    First for dicts, lists and tuples of the same structure, then for single tensors.
    `fulls` are the leaves of the result, `types` those of the arguments, each with its structure.
    """
    arguments = [
        (part, types[start : start + part.num_leaves])
        for part, start in _parts(spec)
        if part.num_leaves and not part.is_leaf()
    ]
    layouts: list[Layout | None] = [None] * len(fulls)
    for part, start in _parts(out_tree):
        if part.is_leaf() or any(layouts[start : start + part.num_leaves]):
            continue
        leaves = fulls[start : start + part.num_leaves]
        for tree, theirs in arguments:
            if tree == part and all(
                _alike(t, full) for t, full in zip(theirs, leaves, strict=True)
            ):
                for i, t in enumerate(theirs):
                    layouts[start + i] = None if t is None else t.cotangent().layout
                break
    return [
        layout if layout is not None or full is None else _of_one_argument(full, types)
        for layout, full in zip(layouts, fulls, strict=True)
    ]


def _of_one_argument(full: Full, types: Sequence[TensorType | None]) -> Layout | None:
    """The layout of the arguments that have this shape and dtype, where all of them have one.

    So a result that is an argument of the next step, such as the state of a simulation, stays.
    """
    layouts = {t.layout for t in types if _alike(t, full) and t is not None}
    layout = layouts.pop() if len(layouts) == 1 else None
    return None if layout is None or layout.partial else layout


def _alike(type: TensorType | None, full: Full | None) -> bool:
    if type is None or full is None:
        return type is None and full is None
    return type.shape == full.shape and type.dtype == full.dtype


def _parts(spec: optree.PyTreeSpec, start: int = 0) -> list[tuple[optree.PyTreeSpec, int]]:
    """Every subtree, outermost first, with the number of its first leaf."""
    parts = [(spec, start)]
    for child in spec.children():
        parts += _parts(child, start)
        start += child.num_leaves
    return parts
