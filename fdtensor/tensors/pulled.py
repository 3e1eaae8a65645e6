"""Cotangents by the graphs of local tensors: what `torch.autograd.grad` of DTensors gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from fdtensor.layouts.errors import FdtensorError
from fdtensor.tensors.owed import Collecting, Owed, at_hand
from fdtensor.tensors.refusals import refuse_many, refuse_no_cotangents, refuse_other_shapes

__all__ = ["OF_AUTOGRAD", "backward_of", "filled", "pulled"]


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
    known = [pair for pair in _parts(ends, cotangents) if pair[0].requires_grad]
    outs, grads = [leaf for leaf, _ in known], [grad for _, grad in known]
    places = [_places(x) for x in starts]
    wanted = [place for own in places for place in own if place is not None]
    given: Sequence[Any] = (None,) * len(wanted)
    if outs and wanted:
        with _asked_for(starts), _heard_of(ends):
            given = torch.autograd.grad(outs, wanted, grads, retain, again, allow_unused=True)
    each = iter(given)
    return [
        _cotangent(x, [None if place is None else next(each) for place in own])
        for x, own in zip(starts, places, strict=True)
    ]


def _parts(
    ends: Sequence[Any], cotangents: Sequence[Any]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The local tensors of DTensors, each with its part of the cotangent."""
    refuse_other_shapes(ends, cotangents)
    parts: list[tuple[torch.Tensor, torch.Tensor]] = []
    for x, ct in zip(ends, cotangents, strict=True):
        moved = ct.redistribute(x.type.cotangent().layout)
        pairs = zip(x.comm.leaves(x.local), x.comm.leaves(moved.local), strict=True)
        # a rank outside of the mesh has a part in the backward only where its graph says so
        parts += [pair for pair in pairs if pair[0].requires_grad or not x.requires_grad]
    return parts


def _ends(name: str, outputs: Any, cotangents: Any) -> tuple[list[Any], list[Any]]:
    """DTensors and their cotangents, 1 where none is given."""
    ends, given = _listed(outputs), _listed(cotangents)
    if not all(map(_is_one, ends)):
        raise FdtensorError(
            "a derivative is taken of DTensors or of tensors of torch, not of both together.",
            hint="Take it once for each, the first time with retain_graph=True.",
        )
    refuse_no_cotangents(name, [x for x in given if x is not None], ends[0].__class__)
    given += [None] * (len(ends) - len(given))
    return ends, [_one(x) if ct is None else ct for x, ct in zip(ends, given, strict=True)]


def _places(x: Any) -> Sequence[Any]:
    """Where the cotangent of each local tensor comes up in the graph; None where it has none."""
    if isinstance(x.held, Owed) and x.held.edges:
        return x.held.edges  # readers may have read terms, or their sum: it comes up in the terms
    leaves = x.comm.leaves(at_hand(x.held))
    return [leaf if leaf.requires_grad else None for leaf in leaves]


@contextmanager
def _asked_for(starts: Sequence[Any]) -> Iterator[None]:
    """Within it readers of these give their whole cotangents, and leave none for later."""
    asked = [x.held.cotangents for x in starts if isinstance(x.held, Collecting)]
    before = [cotangents.is_closed for cotangents in asked]
    for cotangents in asked:
        cotangents.is_closed = True
    try:
        yield
    finally:
        for cotangents, closed in zip(asked, before, strict=True):
            cotangents.is_closed = closed


@contextmanager
def _heard_of(ends: Sequence[Any]) -> Iterator[None]:
    """Within it the ranks of DTensors hear of an error of one: they may wait for what follows."""
    try:
        yield
    except BaseException as error:
        for x in ends:
            error = x.comm.failed([x.type.mesh], error)
        raise error


def _cotangent(x: Any, own: Sequence[Any]) -> Any:
    if all(grad is None for grad in own):
        return None
    if any(grad is None for grad in own):
        leaves = x.comm.leaves(at_hand(x.held))
        own = [torch.zeros_like(a) if g is None else g for a, g in zip(leaves, own, strict=True)]
    return x.__class__(x.comm.value(list(own)), x.type.cotangent(), x.comm)


def backward_of(
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    grad_variables: Any = None,
    inputs: Any = None,
) -> None:
    """Leaves gradients in DTensors that others were computed from, as `torch.autograd.backward`."""
    given = grad_variables if grad_tensors is None else grad_tensors
    ends, cotangents = _ends("gradient", tensors, given)
    pairs = _parts(ends, cotangents)
    outs, grads = [*zip(*pairs, strict=True)] if pairs else ((), ())
    starts = [leaf for x in _listed(inputs) for leaf in x.comm.leaves(x.local)]
    if not all(leaf.is_leaf and leaf.requires_grad for leaf in starts):
        raise FdtensorError(
            "the inputs of a backward are DTensors that were marked by requires_grad_().",
            hint="Give them as a list: inputs=[x].",
        )
    with _heard_of(ends):
        torch.autograd.backward(
            outs, grads, retain_graph, create_graph, inputs=None if inputs is None else starts
        )


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
    ends, cotangents = _ends("grad_outputs", outputs, grad_outputs)
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


def _listed(value: Any) -> list[Any]:
    """The entries of a list or tuple, else one for what is there; none for None."""
    if value is None:
        return []
    if isinstance(value, Mapping):
        return [*value.values()]
    return [*value] if isinstance(value, (list, tuple)) else [value]


def _one(x: Any) -> Any:
    """The cotangent of a tensor of one element."""
    if x.type.numel != 1:
        raise refuse_many(x)
    return _like(x, torch.ones_like)


def _like(x: Any, make: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A cotangent of `x` of local tensors made like its own."""
    local = [make(leaf) for leaf in x.comm.leaves(x.local)]
    return x.__class__(x.comm.value(local), x.type.cotangent(), x.comm)


OF_AUTOGRAD: dict[Any, Callable[..., Any]] = {
    torch.autograd.grad: grad_of,
    torch.autograd.backward: backward_of,
}
"""What functions of autograd are for DTensors."""
