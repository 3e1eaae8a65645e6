"""Derivatives in `shard_map`: one cotangent of a DTensor outside, one for each rank inside.

A DTensor has the cotangent of the full tensor, the same on all replicas. Inside, each rank's copy
has its own. So at the entry cotangents of copies are added, at the exit the first copy gets it, and
every pending term has it. What these do is the identity, but for cotangents:

    _Enter   transpose _Sum     the replicas of a tensor, as a tensor of each rank
    _Leave   transpose _Keep    the equal tensors of ranks, as replicas of one
    _Term    transpose _Enter   the tensors of ranks, as terms of one
    _Use     transpose _Leave   the terms of a tensor, as a tensor of each rank
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from fdtensor.layouts.layout import Layout
from fdtensor.layouts.placement import Partial, Replicate
from fdtensor.tensors.shard_map.moves import Move, Turn
from fdtensor.tensors.shard_map.places import Place

__all__ = ["Extreme", "Linear", "Tie", "enter", "followed", "leave", "replicated"]


def replicated(layout: Layout) -> tuple[str, ...]:
    """The axes over which ranks hold the same."""
    pairs = zip(layout.mesh.axes, layout.placements, strict=True)
    return tuple([axis for axis, placement in pairs if isinstance(placement, Replicate)])


def followed(tensor: torch.Tensor) -> bool:
    """Whether a backward may go through this tensor."""
    if torch._C._are_functorch_transforms_active():
        return True
    return torch.is_grad_enabled() and tensor.requires_grad


def enter(place: Place, tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
    """A rank's block of a DTensor, as a tensor of its own."""
    plain = not torch._C._are_functorch_transforms_active()
    if not followed(tensor):
        return tensor
    axes = replicated(layout)
    if axes:
        tensor = _Enter.apply(place, axes, tensor)  # type: ignore[assignment]
    if layout.partial:
        tensor = _Use.apply(_first(place, layout.partial), tensor)  # type: ignore[assignment]
    if plain:
        if place.token is None:
            place.token = tensor.new_zeros(0).requires_grad_()
        tensor, place.token = Tie.apply(tensor, place.token)  # type: ignore[misc]
    return tensor


def leave(
    place: Place, tensors: Sequence[torch.Tensor], layouts: Sequence[Layout], some: Sequence[bool]
) -> tuple[torch.Tensor, ...]:
    """The blocks of DTensors; `some` says which of them any rank tracks."""
    out = []
    for tensor, layout, one in zip(tensors, layouts, some, strict=True):
        if one:
            axes, pending = replicated(layout), tuple(layout.partial)
            if pending:
                tensor = _Term.apply(place, pending, tensor)
            if axes:
                tensor = _Leave.apply(_first(place, axes), tensor)
            if place.token is not None:
                tensor, place.token = Tie.apply(tensor, place.token)  # type: ignore[misc]
        out.append(tensor)
    return tuple(out)


def _first(place: Place, axes: Iterable[str]) -> bool:
    """Whether this is the first of the ranks along `axes`."""
    coord = place.mesh.coord(place.rank) or ()
    return place.mesh.coset(tuple(axes), coord)[0] == place.rank


class _Identity(torch.autograd.Function):
    """A tensor as it is, with a cotangent that is not."""

    @staticmethod
    def forward(*args: Any) -> Any:
        return args[-1].view_as(args[-1])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.facts = inputs[:-1]


class _Enter(_Identity):
    """The cotangent of the DTensor is the sum of those of the copies on `axes`."""

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return None, None, _Sum.apply(*ctx.facts, grad)

    @staticmethod
    def jvp(ctx: Any, _place: None, _axes: None, tangent: torch.Tensor) -> Any:  # type: ignore[override]
        return _Enter.apply(*ctx.facts, tangent)

    @staticmethod
    def vmap(info: Any, in_dims: Any, place: Place, axes: Any, tensor: Any) -> Any:  # type: ignore[override]
        return _Enter.apply(place, axes, tensor), in_dims[2]


class _Term(_Identity):
    """A term of a sum over `axes`, which has the cotangent of the sum."""

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return None, None, _Enter.apply(*ctx.facts, grad)

    @staticmethod
    def jvp(ctx: Any, _place: None, _axes: None, tangent: torch.Tensor) -> Any:  # type: ignore[override]
        return _Term.apply(*ctx.facts, tangent)

    @staticmethod
    def vmap(info: Any, in_dims: Any, place: Place, axes: Any, tensor: Any) -> Any:  # type: ignore[override]
        return _Term.apply(place, axes, tensor), in_dims[2]


class _Sum(_Identity):
    """The sum over `axes`, as replicas: what `_Enter` does to cotangents."""

    @staticmethod
    def forward(place: Place, axes: tuple[str, ...], grad: torch.Tensor) -> Any:  # type: ignore[override]
        return place.carry(Move(axes, Partial("sum"), Replicate()), grad)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return None, None, _Enter.apply(*ctx.facts, grad)

    @staticmethod
    def jvp(ctx: Any, _place: None, _axes: None, tangent: torch.Tensor) -> Any:  # type: ignore[override]
        return _Sum.apply(*ctx.facts, tangent)

    @staticmethod
    def vmap(info: Any, in_dims: Any, place: Place, axes: Any, grad: Any) -> Any:  # type: ignore[override]
        return _Sum.apply(place, axes, grad), in_dims[2]


class _Leave(_Identity):
    """The first of the copies gets the cotangent."""

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return None, _Keep.apply(*ctx.facts, grad)

    @staticmethod
    def jvp(ctx: Any, _first: None, tangent: torch.Tensor) -> Any:  # type: ignore[override]
        return _Leave.apply(*ctx.facts, tangent)

    @staticmethod
    def vmap(info: Any, in_dims: Any, first: bool, tensor: torch.Tensor) -> Any:  # type: ignore[override]
        return _Leave.apply(first, tensor), in_dims[1]


class _Use(_Identity):
    """A term, whose cotangent is that of the sum: the same for all terms."""

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return None, _Leave.apply(*ctx.facts, grad)

    @staticmethod
    def jvp(ctx: Any, _first: None, tangent: torch.Tensor) -> Any:  # type: ignore[override]
        return _Use.apply(*ctx.facts, tangent)

    @staticmethod
    def vmap(info: Any, in_dims: Any, first: bool, tensor: torch.Tensor) -> Any:  # type: ignore[override]
        return _Use.apply(first, tensor), in_dims[1]


class _Keep(_Identity):
    """The tensor on the first of the ranks, else zeros: what `_Leave` does to cotangents."""

    @staticmethod
    def forward(first: bool, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return grad.view_as(grad) if first else torch.zeros_like(grad)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return None, _Leave.apply(*ctx.facts, grad)

    @staticmethod
    def jvp(ctx: Any, _first: None, tangent: torch.Tensor) -> Any:  # type: ignore[override]
        return _Keep.apply(*ctx.facts, tangent)

    @staticmethod
    def vmap(info: Any, in_dims: Any, first: bool, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return _Keep.apply(first, grad), in_dims[1]


# --- named collectives ------------------------------------------------------------------------


class Linear(torch.autograd.Function):
    """A move, whose transpose is a move."""

    @staticmethod
    def forward(place: Place, move: Turn, x: torch.Tensor) -> torch.Tensor:
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
    def vmap(info: Any, in_dims: Any, place: Place, move: Turn, x: torch.Tensor) -> Any:  # type: ignore[override]
        return Linear.apply(place, move.shifted(), x.movedim(in_dims[2], 0)), 0


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
        return Extreme.apply(place, move, x.movedim(in_dims[2], 0)), 0


def _share(ctx: Any, dtype: torch.dtype) -> torch.Tensor:
    x, out = ctx.saved_tensors
    found = (x == out).to(dtype)
    return found / Linear.apply(ctx.place, ctx.total, found)


class Tie(torch.autograd.Function):
    """A tensor and a token, such that the backward of one runs that of the other."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, token: torch.Tensor) -> Any:
        return x.view_as(x), token.view_as(token)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, token: torch.Tensor) -> Any:  # type: ignore[override]
        return grad, token
