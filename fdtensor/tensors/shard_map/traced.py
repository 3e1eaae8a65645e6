"""`mapped_in_trace`: a function of local tensors inside of a function that is traced."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Generator, Sequence
from math import prod
from typing import Any

import attrs
import torch

from fdtensor.layouts.callsite import user_line
from fdtensor.layouts.errors import LayoutError, TraceError
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import Replicate
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.layouts.torch_private import only_batched_ops, transforms_around
from fdtensor.layouts.tree import flatten, paths, unflatten
from fdtensor.ops.batching import batching
from fdtensor.ops.decompositions.control_flow import unrolled
from fdtensor.ops.pins import axis_of_map, constrain, stacked_axes
from fdtensor.ops.randomness import drawn_again
from fdtensor.programs.closed_over import given_nothing
from fdtensor.tensors.calls.inlined import as_records, as_tensors
from fdtensor.tensors.dtensor import is_dtensor
from fdtensor.tensors.shard_map.arguments import OPEN, no_tensor_result, prefixed
from fdtensor.tensors.shard_map.fresh import (
    WritesAround,
    is_of_shared,
    own_of_each,
    with_fresh_tensors,
)
from fdtensor.tensors.shard_map.moves import LocalCollective
from fdtensor.tensors.shard_map.places import Call, Table, at
from fdtensor.tensors.shard_map.stacked import carried, joined, numbered, ranks_of, stacked
from fdtensor.tensors.traced_dtensor import TracedDTensor

__all__ = ["mapped_in_trace"]


@attrs.define(eq=False)
class TracedPlace:
    """The place of any rank: what runs there runs on all of them at once."""

    mesh: Mesh
    ranks: tuple[str, ...]
    """The axes along which the ranks are; others cut the dims of maps around."""
    numbers: torch.Tensor
    """The number of each rank, of which a rank sees its own."""
    depth: int
    """How many transforms surround the `vmap` over the ranks."""
    at: int | None = None
    """The dim of the ranks, outside of that."""
    maps: tuple[str | None, ...] = ()
    """The axes that cut the dims before it, which are those of maps around."""
    rank: int = attrs.field(init=False)
    """Any one: what it calls all ranks call."""
    token: torch.Tensor | None = None

    def __attrs_post_init__(self) -> None:
        self.rank = self.mesh.order[0]

    def meet(self, call: Call) -> Table:
        return [call] * self.mesh.size

    def carry(self, move: LocalCollective, tensor: torch.Tensor) -> torch.Tensor:
        assert self.at is not None
        self._refuse_others(move.axes)
        if not self.at:
            return carried(tensor, move, self.mesh, self.ranks)
        x = tensor.movedim(self.at, 0)
        return carried(x, move, self.mesh, self.ranks, self.maps).movedim(0, self.at)

    def _refuse_others(self, axes: Sequence[str]) -> None:
        for axis in axes:
            if axis not in self.ranks:
                raise LayoutError(
                    f"axis {axis!r} cuts the dim of a vmap around shard_map, in which a function "
                    "sees one entry.",
                    hint="Reduce over that dim outside of the vmap, or map without spmd_axis_name.",
                )

    def shifted(self) -> TracedPlace:
        if self.at is not None:
            return attrs.evolve(self, at=self.at + 1, maps=(axis_of_map(), *self.maps))
        return attrs.evolve(self, at=0) if transforms_around() == self.depth else self

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor that each rank has for itself, also where all have the same."""
        return own_of_each(tensor, self.numbers)

    def index(self, axes: Sequence[str]) -> torch.Tensor:
        """The index of a rank along axes, as a tensor."""
        self._refuse_others(axes)
        index: Any = 0
        for axis in axes:
            inner = self.ranks[self.ranks.index(axis) + 1 :]
            stride = prod(map(self.mesh.axis_size, inner))
            size = self.mesh.axis_size(axis)
            index = index * size + self.numbers // stride % size
        return index


def mapped_in_trace(f: Callable[..., Any], mesh: Mesh, ins: Any, outs: Any, args: Any) -> Any:
    """The result of `shard_map` where a function is traced: lines of its program."""
    leaves, spec = flatten(args, is_leaf=is_dtensor)
    where = paths(spec, "args")
    wanted = prefixed(ins, spec, len(leaves), "in_layouts", "the arguments")
    places = [i for i, leaf in enumerate(leaves) if is_dtensor(leaf) or torch.is_tensor(leaf)]
    layouts = [_layout(leaves[i], wanted[i], where[i]) for i in places]
    tensors = [as_tensors(leaves[i]) for i in places]
    known: list[Any] = []
    depth, ranks = transforms_around(), ranks_of(mesh, stacked_axes())

    def one(number: torch.Tensor, *own: torch.Tensor) -> Any:
        arguments = list(leaves)
        for i, tensor in zip(places, own, strict=True):
            arguments[i] = tensor
        with at(TracedPlace(mesh, ranks, number, depth)), given_nothing(), unrolled():
            result, tree = flatten(f(*unflatten(spec, arguments)))
        for leaf, name in zip(result, paths(tree, "result"), strict=True):
            if not isinstance(leaf, torch.Tensor):
                raise no_tensor_result(name, leaf)
        known[:] = [tree]
        return tuple(result)

    results = _over_ranks(one, mesh, ranks, tensors, layouts)
    given = prefixed(outs, known[0], len(results), "out_layouts", "the result")
    out_layouts = [mesh.layout() if layout is OPEN else layout for layout in given]
    full = [joined(x, layout, ranks) for x, layout in zip(results, out_layouts, strict=True)]
    if not any(isinstance(leaf, torch.Tensor) for leaf in leaves):
        types = [
            TensorType(tuple(x.shape), x.dtype, layout)
            for x, layout in zip(full, out_layouts, strict=True)
        ]
        full = as_records(full, mesh, types)
    return unflatten(known[0], full)


def _over_ranks(
    one: Callable[..., Any],
    mesh: Mesh,
    ranks: Sequence[str],
    tensors: Sequence[torch.Tensor],
    layouts: Sequence[Layout],
) -> Any:
    """What a function of these tensors gives on all ranks."""
    shared = [layout.placements == (Replicate(),) * mesh.ndim for layout in layouts]
    count = prod(map(mesh.axis_size, ranks))
    seen: list[WritesAround] = []

    def watched(*tensors: torch.Tensor) -> Any:
        seen.append(WritesAround(*tensors))
        with seen[-1]:
            return one(*tensors)

    with _explained(count):
        as_before = drawn_again()
        try:
            return _mapped(watched, mesh, ranks, tensors, layouts, shared)
        except RuntimeError as error:
            if not is_of_shared(error, count):
                raise
            if seen and seen[-1].is_written:
                raise _written_twice() from error
        # a rank that writes to it needs a tensor of its own
        as_before()
        own = with_fresh_tensors(one)
        return _mapped(own, mesh, ranks, tensors, layouts, [False] * len(layouts))


def _mapped(
    one: Callable[..., Any],
    mesh: Mesh,
    ranks: Sequence[str],
    tensors: Sequence[torch.Tensor],
    layouts: Sequence[Layout],
    shared: Sequence[bool],
) -> Any:
    """The same, where ranks share some of the tensors, which all have whole."""
    blocks = [
        constrain(t, layout) if is_shared else stacked(t, layout, ranks)
        for t, layout, is_shared in zip(tensors, layouts, shared, strict=True)
    ]
    dims = (0, *[None if is_shared else 0 for is_shared in shared])
    with only_batched_ops(batching()):
        return torch.func.vmap(one, dims, randomness="different")(numbered(mesh, ranks), *blocks)


def _written_twice() -> TraceError:
    return TraceError(
        "a function in shard_map writes to a tensor from around it, and what differs from rank to "
        "rank to one that is the same on all ranks.",
        line=user_line() or "not known",
        hint="Make the second of what differs, as by torch.zeros_like(x); or return what is "
        "written to the first, and write it outside of shard_map.",
    )


@contextlib.contextmanager
def _explained(ranks: int) -> Generator[None]:
    """A context in which errors of `vmap` say what one program cannot do on all ranks."""
    try:
        yield
    except RuntimeError as error:
        op = re.search(r"([\w:.]+) hit the vmap fallback|not implemented for ([\w:]+)", str(error))
        if op:
            raise TraceError(
                f"{op[1] or op[2]} in shard_map has no batching rule, so that one program cannot "
                "run it on all ranks.",
                line=user_line() or "not known",
                hint="Give it one by torch.library.register_vmap, and rows by @fdtensor.rule; or "
                "call shard_map outside of the traced function.",
            ) from error
        if is_of_shared(error, ranks):
            raise TraceError(
                "a function in shard_map writes what differs from rank to rank to a tensor that is "
                "one for all ranks.",
                line=user_line() or "not known",
                hint="Write to a tensor that the function makes, or to an argument: one from "
                "around it can be an argument in a layout that cuts nothing.",
            ) from error
        if "data-dependent" not in str(error) and "item()" not in str(error):
            raise
        raise TraceError(
            "a function in shard_map asks for the value of a tensor, by if, int() or the like.",
            line=user_line() or "not known",
            hint="Use torch.where: inside of a traced function one program runs on all ranks, and "
            "axis_index is a tensor.",
        ) from error


def _layout(leaf: Any, wanted: Any, where: str) -> Layout:
    """The layout in which an argument goes in."""
    if wanted is not OPEN:
        return wanted
    if isinstance(leaf, TracedDTensor) and isinstance(leaf.type, TensorType):
        return leaf.type.layout
    raise LayoutError(
        f"{where} of shard_map has no layout yet, inside of a function that is traced.",
        hint="Say in_layouts: layouts there are chosen for the whole.",
    )
