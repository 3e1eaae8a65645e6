"""Derivatives of what a plan does: autograd, twice and forward, and the transforms of `torch.func`.

A plan is a linear map of the full tensor, and its transpose is the backward. Cotangents have the
type of what they belong to, with Replicate for Partial: replicas share one, that of the tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from fdtensor.layouts.tensor_type import TensorType
from fdtensor.layouts.torch_private import forward_active, transforms_active
from fdtensor.plans.fused import Fused, batched, fuse
from fdtensor.plans.planner import Plan, plan

__all__ = ["differentiable", "plans_of", "shared", "spread", "tracked", "zeros"]

Leaves = Sequence[Any]
"""The tensors of some values, one value after the other; among cotangents None stands for zeros."""

Go = Callable[[Any, Sequence[Any], Any, bool], list[Any]]
"""Runs plans on values, on a Comm: as `run` and `run_fused` do, or what these have admitted."""


def tracked(values: Sequence[object]) -> bool:
    """Whether a derivative of what is computed from these values may be asked for."""
    transformed = transforms_active() or forward_active()
    if not transformed and not torch.is_grad_enabled():
        return False
    for value in values:
        for leaf in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(leaf, torch.Tensor) and (transformed or leaf.requires_grad):
                return True
    return False


def spread(tensor: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
    """The tensor as `count` replicas, whose one cotangent is that of the tensor."""
    if count == 1 or not tracked([tensor]):
        return (tensor,) * count
    return _Spread.apply(tensor, count)  # type: ignore[return-value]


def zeros(like: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Zeros that are a part of the graph of `like`, whatever its values."""
    nothing = like.narrow(0, 0, 0) if like.dim() else like.expand(0)
    return nothing.sum(dtype=like.dtype).expand(tuple(shape)).clone()


def differentiable(moves: Plan | Fused, values: Sequence[Any], comm: Any, go: Go) -> list[Any]:
    """The values after their plans, with derivatives."""
    out: Any = _Run.apply(moves, comm, go, *_leaves(values, comm))
    return _values(_targets(moves), out, comm)


def shared(value: Any, type: TensorType, comm: Any, back: bool = False) -> Any:
    """The value, where the cotangent of an average becomes that of its terms: a part of it.

    With `back` the other way: that of the terms becomes that of the average.
    """
    count = 1
    for axis, op in type.layout.partial.items():
        count *= type.mesh.axis_size(axis) if op == "avg" else 1
    if count == 1 or not tracked([value]):
        return value
    return comm.value([_Shared.apply(leaf, count, back) for leaf in comm.leaves(value)])


class _Run(torch.autograd.Function):
    """A plan, or several, on the leaves of their values."""

    @staticmethod
    def forward(moves: Plan | Fused, comm: Any, go: Go, *leaves: Any) -> tuple[Any, ...]:
        out, given = _applied(moves, leaves, comm, go, admitted=True), set(map(id, leaves))
        # what a rank in neither mesh gets back may not be its input itself
        return tuple(
            [leaf.clone() if leaf is not None and id(leaf) in given else leaf for leaf in out]
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.moves, ctx.comm, ctx.go, *leaves = inputs
        ctx.shapes = [leaf.shape if isinstance(leaf, torch.Tensor) else None for leaf in leaves]
        # with all ranks here, a replica that nobody uses has no cotangent of its own
        if any(ctx.comm.width(type) > 1 for type in (*_sources(ctx.moves), *_targets(ctx.moves))):
            ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # type: ignore[override]
        back, cotangents = ctx.moves.transpose(), getattr(ctx, "cotangents", None)
        left = {} if cotangents is None else cotangents.taken()
        out: Sequence[Any] = [None] * len(ctx.shapes)
        if cotangents is None or any(grad is not None for grad in grads):
            known = _replicated(_sources(back), grads, ctx.comm)
            out = _applied(back, known, ctx.comm, ctx.go)
        for type, leaves in left.items():
            path = plan(type, back.dst, cost=ctx.comm.cost)
            part = _applied(path, leaves, ctx.comm, ctx.go)
            out = [b if a is None else a + b for a, b in zip(out, part, strict=True)]
        return None, None, None, *map(_shaped, out, ctx.shapes)

    @staticmethod
    def jvp(ctx: Any, _moves: None, _comm: None, _go: None, *tangents: Any) -> Any:  # type: ignore[override]
        ctx.moves.transpose()  # refuses what is not linear
        known = _materialized(_sources(ctx.moves), tangents, ctx.comm)
        return _applied(ctx.moves, known, ctx.comm, ctx.go)

    @staticmethod
    def vmap(  # type: ignore[override]
        info: Any, in_dims: Any, moves: Plan | Fused, comm: Any, go: Go, *leaves: Any
    ) -> Any:
        size = info.batch_size
        stacked = [_stacked(leaf, d, size) for leaf, d in zip(leaves, in_dims[3:], strict=True)]
        wide = [batched(p, size) for p in plans_of(moves)]
        out = _applied(wide[0] if isinstance(moves, Plan) else fuse(wide), stacked, comm, go)
        out = tuple([_wide(leaf, size) for leaf in out])
        return out, tuple([0 if isinstance(leaf, torch.Tensor) else None for leaf in out])


class _Spread(torch.autograd.Function):
    """A tensor as replicas: all of them have its cotangent, so that of any one is taken."""

    @staticmethod
    def forward(tensor: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
        return tuple([tensor.view_as(tensor) for _ in range(count)])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.count = inputs[1]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # type: ignore[override]
        return next((grad for grad in grads if grad is not None), None), None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, _count: None) -> Any:  # type: ignore[override]
        return tuple([copy.view_as(copy) for copy in spread(tangent, ctx.count)])

    @staticmethod
    def vmap(info: Any, in_dims: Any, tensor: torch.Tensor, count: int) -> Any:  # type: ignore[override]
        return spread(tensor, count), (in_dims[0],) * count


class _Shared(torch.autograd.Function):
    """A term of an average, whose cotangent is a part of that of the average."""

    @staticmethod
    def forward(leaf: torch.Tensor, count: int, back: bool) -> torch.Tensor:
        return leaf.view_as(leaf)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, ctx.count, ctx.back = inputs

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return grad * ctx.count if ctx.back else grad / ctx.count, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, _count: None, _back: None) -> Any:  # type: ignore[override]
        return tangent.view_as(tangent)

    @staticmethod
    def vmap(info: Any, in_dims: Any, leaf: torch.Tensor, count: int, back: bool) -> Any:  # type: ignore[override]
        return _Shared.apply(leaf, count, back), in_dims[0]


def plans_of(moves: Plan | Fused) -> tuple[Plan, ...]:
    """The plans themselves."""
    return (moves,) if isinstance(moves, Plan) else moves.plans


def _sources(moves: Plan | Fused) -> list[TensorType]:
    return [p.src for p in plans_of(moves)]


def _targets(moves: Plan | Fused) -> list[TensorType]:
    return [p.dst for p in plans_of(moves)]


# --- leaves ----------------------------------------------------------------------------------


def _applied(
    moves: Plan | Fused, leaves: Leaves, comm: Any, go: Go, admitted: bool = False
) -> tuple[Any, ...]:
    return _leaves(go(moves, _values(_sources(moves), leaves, comm), comm, admitted), comm)


def _leaves(values: Sequence[Any], comm: Any) -> tuple[Any, ...]:
    return tuple([leaf for value in values for leaf in comm.leaves(value)])


def _values(types: Sequence[TensorType], leaves: Leaves, comm: Any) -> list[Any]:
    """The leaves as one value for each type."""
    return [comm.value(part) for _, part in _parts(types, leaves, comm)]


def _parts(
    types: Sequence[TensorType], leaves: Leaves, comm: Any
) -> Iterator[tuple[TensorType, Leaves]]:
    start = 0
    for type in types:
        stop = start + comm.width(type)
        yield type, leaves[start:stop]
        start = stop


def _replicated(types: Sequence[TensorType], grads: Leaves, comm: Any) -> Leaves:
    """The cotangents, where a replica that nobody used has that of one that somebody used."""
    if all(grad is not None for grad in grads):
        return grads
    out: list[Any] = []
    for type, part in _parts(types, grads, comm):
        filled = list(part)
        for replicas in _replicas(type) if len(part) == type.mesh.size else ():
            known = next((i for i in replicas if part[i] is not None), None)
            missing = [i for i in replicas if part[i] is None]
            if missing and known is not None:
                copies = spread(part[known], 1 + len(missing))
                for i, copy in zip([known, *missing], copies, strict=True):
                    filled[i] = copy
        out += filled
    return _materialized(types, out, comm)


def _replicas(type: TensorType) -> list[list[int]]:
    """The places of the mesh that hold the same block."""
    places: dict[Any, list[int]] = {}
    for i, rank in enumerate(type.mesh.order):
        places.setdefault(type.box(type.mesh.coord(rank) or ()), []).append(i)
    return list(places.values())


def _materialized(types: Sequence[TensorType], leaves: Leaves, comm: Any) -> Leaves:
    """The leaves, with zeros for None."""
    if all(leaf is not None for leaf in leaves):
        return leaves
    device = next((leaf.device for leaf in leaves if leaf is not None), None)
    out: list[Any] = []
    for type, part in _parts(types, leaves, comm):
        if len(part) != type.mesh.size:  # this rank's tensor, or None where it is not in the mesh
            out += part
            continue
        for leaf, rank in zip(part, type.mesh.order, strict=True):
            shape = type.local_shape(rank)
            nil = torch.zeros(shape, dtype=type.dtype, device=device) if leaf is None else leaf
            out.append(nil)
    return out


def _shaped(grad: Any, shape: torch.Size | None) -> Any:
    """The cotangent of an input; for a rank that is not in the source, zeros of any shape."""
    if shape is None or grad is None or grad.shape == shape:
        return None if shape is None else grad
    return zeros(grad, shape)


def _wide(leaf: Any, size: int) -> Any:
    """A result for a whole batch; a rank that leaves gets an empty tensor for each."""
    if not isinstance(leaf, torch.Tensor) or leaf.shape[0] == size:
        return leaf
    return zeros(leaf, (size, *leaf.shape[1:]))


def _stacked(leaf: Any, dim: int | None, size: int) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return leaf.expand(size, *leaf.shape) if dim is None else leaf.movedim(dim, 0)
