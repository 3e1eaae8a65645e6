"""`parted`: the batch of a pipeline as parts, of which each stage has one at a time."""

from __future__ import annotations

from typing import Any

import attrs
import optree

from fdtensor.layouts.errors import TraceError
from fdtensor.layouts.placement import Ragged, Spans
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.layouts.tree import flatten, paths, unflatten
from fdtensor.plans.cost import CostModel
from fdtensor.programs.options import Options
from fdtensor.programs.program import Program
from fdtensor.programs.tracer import traced, type_of

__all__ = ["is_typed", "parted"]

Split = tuple[Program | None, Program | None]
"""The parts of the inputs of the first stage, and of the targets of the last one."""


def parted(x: Any, target: Any, parts: int, cost: CostModel) -> tuple[Any, Any, Split]:
    """The types of one part of `x` and of `target`, and the programs that split them.

    Raises `TraceError` where they do not split.
    """
    _refuse_several_sizes(x=x, target=target)
    inputs, targets = _of_part(x, parts), _of_part(target, parts)
    return inputs, targets, (_split(x, parts, cost), _split(target, parts, cost))


def is_typed(leaf: object) -> bool:
    """Whether a leaf is a type, or has one."""
    return type_of(leaf) is not None


def _of_part(tree: Any, parts: int) -> Any:
    """The types of one part of a batch."""
    leaves, spec = flatten(tree, is_leaf=is_typed)
    return unflatten(spec, [_part_of(leaf, parts) for leaf in leaves])


def _part_of(leaf: Any, parts: int) -> Any:
    type = type_of(leaf)
    if not isinstance(type, TensorType):
        return leaf
    if not type.ndim or type.shape[0] % parts:
        raise TraceError(
            f"a batch of {type} cannot be split into {parts} parts of one size.",
            hint="Let dim 0 of each tensor of x and target be a multiple of microbatches.",
        )
    if any(isinstance(p, (Ragged, Spans)) and not p.dim for p in type.layout.placements):
        raise TraceError(
            f"a pipeline does not split a batch in ragged shards, as {type} is.",
            layout=type.layout,
            hint="Redistribute x and target to even shards before: x.redistribute(layout).",
        )
    return attrs.evolve(type, shape=(type.shape[0] // parts, *type.shape[1:]))


def _refuse_several_sizes(**trees: Any) -> None:
    """Raises `TraceError` where not all tensors have as many rows: which ones belong together?"""
    counts: dict[str, int] = {}
    for name, tree in trees.items():
        leaves, spec = flatten(tree, is_leaf=is_typed)
        for path, leaf in zip(paths(spec, name), leaves, strict=True):
            type = type_of(leaf)
            if isinstance(type, TensorType) and type.ndim:
                counts[path] = type.shape[0]
    if len(set(counts.values())) > 1:
        raise TraceError(
            "the tensors of a batch have several numbers of rows.",
            **{name: f"{count} rows" for name, count in counts.items()},
            hint="Dim 0 of all tensors of x and target is the batch, which is split into parts. "
            "Give what is the same for all parts among the parameters.",
        )


def _split(tree: Any, parts: int, cost: CostModel) -> Program | None:
    """The program that takes the tensors of a batch to those of part 0, of part 1, and so on.

    Part i has every `parts`-th row from row i on: no row moves where ranks hold as many of each.
    """
    leaves = flatten(tree, is_leaf=is_typed)[0]
    types = [t for t in map(type_of, leaves) if isinstance(t, TensorType)]
    if not types:
        return None

    def split(tensors: list[Any]) -> list[Any]:
        each = [t.unflatten(0, (t.shape[0] // parts, parts)).unbind(1) for t in tensors]
        return [part for several in zip(*each, strict=True) for part in several]

    spec: optree.PyTreeSpec = flatten((([0] * len(types),), {}))[1]
    options = Options(out_layouts=[t.layout for t in types] * parts)
    return traced(split, spec, [None] * len(types), types, options, cost=cost).program
