"""`wanted_layouts`: the layouts that the outputs of a function must have, by `out_layouts`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import optree

from fdtensor.layouts.errors import ValueTreeError
from fdtensor.layouts.expected import refuse_no_layouts
from fdtensor.layouts.free_type import FreeType
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.layouts.tree import broadcast_prefix, flatten, mismatches, unflatten
from fdtensor.ops.graph import Full, Graph
from fdtensor.programs.arguments import arguments_of
from fdtensor.programs.ends import Tied, Wanted, numbered
from fdtensor.programs.options import Like
from fdtensor.programs.recording import TENSOR

__all__ = ["as_arguments", "asked_layouts", "resolved", "wanted_layouts"]


def wanted_layouts(
    graph: Graph,
    spec: optree.PyTreeSpec,
    types: Sequence[TensorType | FreeType | None],
    out_tree: optree.PyTreeSpec,
    statics: Sequence[object],
    out_layouts: object,
    eager: bool = False,
) -> list[Wanted]:
    """The layout that each output must have, or None where it is chosen."""
    tensors = [i for i, leaf in enumerate(statics) if leaf is TENSOR]
    asked: list[Layout | Tied | Like | None] = [None] * len(statics)
    if out_layouts is not None:
        asked = _of_leaves(out_tree, out_layouts)
    outs = iter(graph.outs)
    fulls = [graph.types[next(outs).index] if leaf is TENSOR else None for leaf in statics]
    like = as_arguments(fulls, out_tree, types, spec, eager)
    wants: list[Wanted] = []
    for v, i in zip(graph.outs, tensors, strict=True):
        wanted = like[i] if asked[i] is None else asked[i]
        if isinstance(wanted, Like):  # like no argument
            wanted = None
        if isinstance(wanted, Layout):
            full = graph.types[v.index]
            TensorType(full.shape, full.dtype, wanted)  # raises where it cannot be
        wants.append(wanted)
    return wants


def resolved(
    out_layouts: object,
    f: Callable[..., Any],
    spec: optree.PyTreeSpec,
    types: Sequence[TensorType | FreeType | None],
) -> object:
    """`out_layouts` with the layouts of an argument in place of each `like`.

    Raises `TraceError` where there is no such argument.
    """
    leaves, tree = flatten(out_layouts)
    if not any(isinstance(leaf, Like) for leaf in leaves):
        return out_layouts
    arguments = arguments_of(f, spec, layouts_of(types))
    told = "out_layouts is like"
    return unflatten(
        tree,
        [
            arguments.of(x.argument, told) if isinstance(x, Like) and x.argument is not None else x
            for x in leaves
        ],
    )


def layouts_of(types: Sequence[TensorType | FreeType | None]) -> list[Wanted]:
    """The layouts of arguments for results that are like them; `Tied` for free ones."""
    return [
        t.cotangent().layout if isinstance(t, TensorType) else None if i is None else Tied(i)
        for t, i in zip(types, numbered(types), strict=True)
    ]


def asked_layouts(out_tree: optree.PyTreeSpec, out_layouts: object) -> list[Layout | None]:
    """A layout, or None, for each leaf of a result."""
    return [x if isinstance(x, Layout) else None for x in _of_leaves(out_tree, out_layouts)]


def _of_leaves(
    out_tree: optree.PyTreeSpec, out_layouts: object
) -> list[Layout | Tied | Like | None]:
    """A layout, None or `like(None)` for each leaf of a result."""

    def leaf(x: object) -> bool:
        return x is None or isinstance(x, (Layout, Tied, Like))

    whole = unflatten(out_tree, [0] * out_tree.num_leaves)
    refuse_no_layouts(out_layouts, leaf, "out_layouts")
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
    types: Sequence[TensorType | FreeType | None],
    spec: optree.PyTreeSpec,
    eager: bool = False,
) -> list[Wanted]:
    """The layout of an argument for each leaf of the result, where one has the same shapes.

    First for dicts, lists and tuples of the same structure, then for single tensors. Where as many
    parts of the result as of the arguments look alike, each has that in its place, else the first.
    `fulls` are the leaves of the result, `types` those of the arguments, each with its structure.
    In one op of many (`eager`) single tensors follow the operands: of replicated ones they are so.
    """
    known = layouts_of(types)
    arguments = [
        (part, start) for part, start in _parts(spec) if part.num_leaves and not part.is_leaf()
    ]
    layouts: list[Wanted] = [None] * len(fulls)
    alike: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    done: set[int] = set()
    for part, start in _parts(out_tree):
        leaves = range(start, start + part.num_leaves)
        if part.is_leaf() or not done.isdisjoint(leaves):
            continue
        theirs = [
            first
            for tree, first in arguments
            if tree == part and all(_alike(types[first + k - start], fulls[k]) for k in leaves)
        ]
        if theirs:
            alike.setdefault(tuple(theirs), []).append((start, part.num_leaves))
            done |= {*leaves}
    for theirs, own in alike.items():
        for (start, count), first in zip(own, _in_place(theirs, own), strict=True):
            layouts[start : start + count] = known[first : first + count]
    if eager:
        given = [*dict.fromkeys(t.layout for t in types if isinstance(t, TensorType))]
        replicated = len(given) == 1 and given[0] is given[0].mesh.layout()
        return [given[0] if replicated and x is None else x for x in layouts]
    alone = [k for k, full in enumerate(fulls) if layouts[k] is None and full is not None]
    for k, want in zip(alone, _of_single(fulls, alone, types, known), strict=True):
        layouts[k] = want
    return layouts


def _in_place(theirs: Sequence[int], own: Sequence[object]) -> Sequence[int]:
    """For each of its own what is in its place, if there are as many, else the first."""
    return theirs if len(theirs) == len(own) else [theirs[0]] * len(own)


def _of_single(
    fulls: Sequence[Full | None],
    alone: Sequence[int],
    types: Sequence[TensorType | FreeType | None],
    known: Sequence[Wanted],
) -> Iterator[Wanted]:
    """The layout of the arguments that have the shape and dtype of each of these results.

    Where all of them have one: so a result that is an argument of the next step, such as the state
    of a simulation, stays. Of free ones each has one of its own.
    """
    for k in alone:
        alike = [i for i, t in enumerate(types) if t is not None and _alike(t, fulls[k])]
        pending = any(isinstance(t := types[i], TensorType) and t.layout.partial for i in alike)
        layouts = [*dict.fromkeys(known[i] for i in alike)]
        same = [j for j in alone if fulls[j] == fulls[k]]
        if all(isinstance(x, Tied) for x in layouts) and len(layouts) == len(same):
            yield layouts[same.index(k)]
        else:
            yield layouts[0] if len(layouts) == 1 and not pending else None


def _alike(type: TensorType | FreeType | None, full: Full | None) -> bool:
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
