"""Cotangents by the graphs of local tensors: what `torch.autograd.grad` of DTensors gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch

from fdtensor.layouts.errors import FdtensorError
from fdtensor.tensors.refusals import refuse_many

__all__ = ["filled", "grad_of", "pulled"]


def pulled(
    ends: Sequence[Any],
    cotangents: Sequence[Any],
    starts: Sequence[Any],
    *,
    retain: bool = True,
    again: bool = False,
) -> list[Any]:
    """The cotangents of `starts`, DTensors; None for one that `ends` do not depend on.

    `retain` keeps the graphs, and `again` gives cotangents with derivatives of their own.
    """
    outs: list[torch.Tensor] = []
    grads: list[torch.Tensor] = []
    for end, cotangent in zip(ends, cotangents, strict=True):
        moved = cotangent.redistribute(end.type.cotangent().layout)
        pairs = zip(end.comm.leaves(end.local), end.comm.leaves(moved.local), strict=True)
        known = [pair for pair in pairs if pair[0].requires_grad]
        outs += [leaf for leaf, _ in known]
        grads += [grad for _, grad in known]
    wanted = [leaf for x in starts for leaf in x.comm.leaves(x.local) if leaf.requires_grad]
    given: tuple[Any, ...] = (None,) * len(wanted)
    if outs and wanted:
        given = torch.autograd.grad(outs, wanted, grads, retain, again, allow_unused=True)
    by_leaf = dict(zip(map(id, wanted), given, strict=True))
    return [_cotangent(x, by_leaf) for x in starts]


def _cotangent(x: Any, by_leaf: Mapping[int, Any]) -> Any:
    leaves = x.comm.leaves(x.local)
    own = [by_leaf.get(id(leaf)) for leaf in leaves]
    if all(grad is None for grad in own):
        return None
    local = [torch.zeros_like(a) if g is None else g for a, g in zip(leaves, own, strict=True)]
    return attrs.evolve(x, local=x.comm.value(local), type=x.type.cotangent())


def grad_of(
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,  # noqa: ARG001  (torch ignores it too)
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> Any:
    """The sum of gradients of DTensors by others, as `torch.autograd.grad` gives it."""
    if is_grads_batched:
        raise FdtensorError(
            "torch.autograd.grad of DTensors takes no batch of cotangents.",
            hint="Write fd.vmap around the way back of fd.vjp.",
        )
    ends = [outputs] if _is_one(outputs) else list(outputs)
    given = [grad_outputs] if grad_outputs is None or _is_one(grad_outputs) else [*grad_outputs]
    given += [None] * (len(ends) - len(given))
    cotangents = [_one(x) if ct is None else ct for x, ct in zip(ends, given, strict=True)]
    named = inputs if isinstance(inputs, Mapping) else None
    each: Any = inputs if named is None else named.values()
    starts: list[Any] = [inputs] if _is_one(inputs) else list(each)
    retain = create_graph if retain_graph is None else retain_graph
    grads = pulled(ends, cotangents, starts, retain=retain, again=create_graph)
    if materialize_grads:
        grads = filled(starts, grads)
    unused = [i for i, grad in enumerate(grads) if grad is None]
    if unused and not allow_unused:
        raise FdtensorError(
            f"input {unused[0]} has no part in the outputs, or requires no grad.",
            input=starts[unused[0]].type,
            hint="Mark it by x.requires_grad_() before, or pass allow_unused=True.",
        )
    return tuple(grads) if named is None else dict(zip(named, grads, strict=True))


def filled(starts: Sequence[Any], grads: Sequence[Any]) -> list[Any]:
    """The cotangents, with zeros in place of None."""
    pairs = zip(starts, grads, strict=True)
    return [_like(x, torch.zeros_like) if grad is None else grad for x, grad in pairs]


def _is_one(value: Any) -> bool:
    return hasattr(value, "comm")


def _one(x: Any) -> Any:
    """The cotangent of a tensor of one element."""
    if x.type.numel != 1:
        raise refuse_many(x)
    return _like(x, torch.ones_like)


def _like(x: Any, make: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A cotangent of `x` of local tensors made like its own."""
    local = [make(leaf) for leaf in x.comm.leaves(x.local)]
    return attrs.evolve(x, local=x.comm.value(local), type=x.type.cotangent())
