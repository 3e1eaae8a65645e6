"""Derivatives in `shard_map`: one cotangent of a DTensor outside, one for each rank inside.

A DTensor has the cotangent of the full tensor, the same on all replicas. Inside, each rank's copy
has its own. So cotangents of copies are added at the entry, the first copy gets the cotangent at
the exit, and each pending term gets it. All of these but the last two are the identity forward:

    vary        the replicas of a tensor become one tensor a rank     transpose: sum
    unvary      equal tensors of ranks become replicas of one         transpose: keep_first
    as_term     the tensors of ranks become terms of one              transpose: vary
    from_term   the terms of a tensor become one tensor a rank        transpose: unvary
    sum         the sum of the tensors of ranks, on each of them      transpose: vary
    keep_first  the tensor of the first rank, zeros on the others     transpose: unvary
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch

from fdtensor.layouts.layout import Layout
from fdtensor.layouts.placement import Partial, Replicate
from fdtensor.layouts.torch_private import transforms_active
from fdtensor.tensors.shard_map.moves import LocalCollective, Move
from fdtensor.tensors.shard_map.places import Place

__all__ = ["Extreme", "Linear", "Tie", "enter", "is_tracked", "leave", "replicated"]


def replicated(layout: Layout) -> tuple[str, ...]:
    """The axes over which ranks hold the same."""
    pairs = zip(layout.mesh.axes, layout.placements, strict=True)
    return tuple([axis for axis, placement in pairs if isinstance(placement, Replicate)])


def is_tracked(tensor: torch.Tensor) -> bool:
    """Whether a backward may go through this tensor."""
    if transforms_active():
        return True
    return torch.is_grad_enabled() and tensor.requires_grad


def enter(place: Place, tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
    """A rank's block of a DTensor, as a tensor of its own."""
    plain = not transforms_active()
    if not is_tracked(tensor):
        return tensor
    axes = replicated(layout)
    if axes:
        tensor = _AppliedMap.apply("vary", place, axes, tensor)  # type: ignore[assignment]
    if layout.partial:
        tensor = _AppliedMap.apply("from_term", place, tuple(layout.partial), tensor)  # type: ignore[assignment]
    if plain:
        if place.token is None:
            place.token = tensor.new_zeros(0).requires_grad_()
        tensor, place.token = Tie.apply(tensor, place.token)  # type: ignore[misc]
    return tensor


def leave(
    place: Place,
    tensors: Sequence[torch.Tensor],
    layouts: Sequence[Layout],
    tracked: Sequence[bool],
) -> tuple[torch.Tensor, ...]:
    """The blocks of DTensors; `tracked` says of each whether a rank tracks it."""
    blocks = []
    for tensor, layout, is_wanted in zip(tensors, layouts, tracked, strict=True):
        if is_wanted:
            axes, pending = replicated(layout), tuple(layout.partial)
            if pending:
                tensor = _AppliedMap.apply("as_term", place, pending, tensor)
            if axes:
                tensor = _AppliedMap.apply("unvary", place, axes, tensor)
            if place.token is not None:
                tensor, place.token = Tie.apply(tensor, place.token)  # type: ignore[misc]
        blocks.append(tensor)
    return tuple(blocks)


def _is_first(place: Place, axes: Iterable[str]) -> bool:
    """Whether this is the first of the ranks along `axes`."""
    coord = place.mesh.coord(place.rank) or ()
    return place.mesh.coset(tuple(axes), coord)[0] == place.rank


LinearMap = Literal["vary", "sum", "unvary", "keep_first", "as_term", "from_term"]
"""The linear maps of the table above."""

_TRANSPOSES: dict[LinearMap, LinearMap] = {
    "vary": "sum",
    "sum": "vary",
    "unvary": "keep_first",
    "keep_first": "unvary",
    "as_term": "vary",
    "from_term": "unvary",
}


class _AppliedMap(torch.autograd.Function):
    """A linear map of a rank's tensor over `axes`, and the transpose of it for cotangents."""

    @staticmethod
    def forward(map_: LinearMap, place: Place, axes: tuple[str, ...], tensor: torch.Tensor) -> Any:
        if map_ == "sum":
            return place.carry(Move(axes, Partial("sum"), Replicate()), tensor)
        if map_ == "keep_first" and not _is_first(place, axes):
            return torch.zeros_like(tensor)
        return tensor.view_as(tensor)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.map, ctx.place, ctx.axes, _ = inputs

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        transpose = _TRANSPOSES[ctx.map]
        return None, None, None, _AppliedMap.apply(transpose, ctx.place, ctx.axes, grad)

    @staticmethod
    def jvp(ctx: Any, _map: None, _place: None, _axes: None, tangent: torch.Tensor) -> Any:  # type: ignore[override]
        return _AppliedMap.apply(ctx.map, ctx.place, ctx.axes, tangent)

    @staticmethod
    def vmap(  # type: ignore[override]
        info: Any, in_dims: Any, map_: LinearMap, place: Place, axes: Any, tensor: torch.Tensor
    ) -> Any:
        return _AppliedMap.apply(map_, place, axes, tensor), in_dims[3]


# --- named collectives ------------------------------------------------------------------------


class Linear(torch.autograd.Function):
    """A collective that is linear: its transpose is one too."""

    @staticmethod
    def forward(place: Place, move: LocalCollective, x: torch.Tensor) -> torch.Tensor:
        return place.carry(move, x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.place, ctx.move, _ = inputs

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return None, None, Linear.apply(ctx.place, ctx.move.transposed(), grad)

    @staticmethod
    def jvp(ctx: Any, _place: None, _move: None, tangent: torch.Tensor) -> Any:  # type: ignore[override]
        return Linear.apply(ctx.place, ctx.move, tangent)

    @staticmethod
    def vmap(info: Any, in_dims: Any, place: Place, move: LocalCollective, x: torch.Tensor) -> Any:  # type: ignore[override]
        return Linear.apply(place.shifted(), move.shifted(), _in_front(x, in_dims[2])), 0


class Extreme(torch.autograd.Function):
    """A maximum or minimum over ranks; those that have it share the cotangent."""

    @staticmethod
    def forward(place: Place, move: Move, x: torch.Tensor) -> torch.Tensor:
        return place.carry(move, x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.place, move, x = inputs
        ctx.total = Move(move.axes, Partial("sum"), Replicate())
        ctx.save_for_backward(x, output)
        ctx.save_for_forward(x, output)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        share = _share(ctx, grad.dtype)
        return None, None, Linear.apply(ctx.place, ctx.total, grad) * share

    @staticmethod
    def jvp(ctx: Any, _place: None, _move: None, tangent: torch.Tensor) -> Any:  # type: ignore[override]
        return Linear.apply(ctx.place, ctx.total, tangent * _share(ctx, tangent.dtype))

    @staticmethod
    def vmap(info: Any, in_dims: Any, place: Place, move: Move, x: torch.Tensor) -> Any:  # type: ignore[override]
        return Extreme.apply(place.shifted(), move, _in_front(x, in_dims[2])), 0


def _in_front(x: torch.Tensor, dim: int) -> torch.Tensor:
    return x.movedim(dim, 0) if dim else x


def _share(ctx: Any, dtype: torch.dtype) -> torch.Tensor:
    """The part of the cotangent for each rank: equal among those that attain the extreme."""
    x, out = ctx.saved_tensors
    attains = (x == out).to(dtype)
    return attains / Linear.apply(ctx.place, ctx.total, attains)


class Tie(torch.autograd.Function):
    """A tensor and a token, such that the backward of one runs that of the other."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, token: torch.Tensor) -> Any:
        return x.view_as(x), token.view_as(token)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, token: torch.Tensor) -> Any:  # type: ignore[override]
        return grad, token
