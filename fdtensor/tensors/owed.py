"""`Owed` and `Collecting`: what a DTensor holds in place of a local value, between two ops.

What `call` leaves pending is reduced where it is first needed whole: a product of cut matrices that
is then redistributed to blocks takes one reduce_scatter, and not an all_reduce before it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from fdtensor.layouts.tensor_type import TensorType
from fdtensor.layouts.torch_private import transforms_active
from fdtensor.plans.planner import plan
from fdtensor.runtime.cotangents import Cotangents
from fdtensor.runtime.interpreter import run

__all__ = ["STAND_INS", "Collecting", "Owed", "StandIn", "at_hand"]


class StandIn:
    """What a DTensor holds in place of a plain local value."""

    __slots__ = ()

    def local(self, comm: Any) -> Any:
        """The local value for anybody: to autograd it has the cotangent of the tensor."""
        raise NotImplementedError

    @property
    def at_hand(self) -> Any:
        """The tensors that are there, which moves nothing: terms while a sum is due."""
        raise NotImplementedError

    @property
    def requires_grad(self) -> bool:
        """Whether a derivative by one of these tensors is wanted."""
        tensors = self.at_hand
        some = tensors if isinstance(tensors, tuple) else (tensors,)
        return any(tensor.requires_grad for tensor in some)


class Collecting(StandIn):
    """A value that `redistribute` gave to several ranks, and what collects its cotangents.

    Ops of DTensors, as `call` runs them, leave theirs as they come; all others are one more reader.
    """

    __slots__ = ("_seen", "cotangents", "value")

    def __init__(self, value: Any, cotangents: Cotangents) -> None:
        self.value, self.cotangents = value, cotangents
        self._seen: Any = None

    def local(self, comm: Any) -> Any:
        if self._seen is not None:
            return self._seen
        with torch.enable_grad():  # others read it later
            seen = comm.value([leaf.view_as(leaf) for leaf in comm.leaves(self.value)])
        if _is_for_all():
            self._seen = seen
        return seen

    @property
    def at_hand(self) -> Any:
        return self.value


class Owed(StandIn):
    """The terms of a sum that ranks hold, until it is reduced; then the sum, for all who ask."""

    __slots__ = ("_sum", "edges", "terms", "type")

    def __init__(self, terms: Any, type: TensorType) -> None:
        self.terms: Any = terms
        """The local value: one term on each rank."""
        self.type = type
        """The type of the terms, pending along the axes of the sum."""
        self.edges: tuple[GradientEdge | None, ...] = ()
        """Where the terms were in the graph of autograd, once the sum is taken."""
        self._sum: Any = None

    @property
    def known(self) -> tuple[Any, TensorType]:
        """The terms or, once it is taken, the sum; and the type of that."""
        return (self.terms, self.type) if self._sum is None else (self._sum, self.of_sum)

    @property
    def at_hand(self) -> Any:
        return self.known[0]

    @property
    def is_due(self) -> bool:
        """Whether the sum is not yet taken."""
        return self._sum is None

    @property
    def of_sum(self) -> TensorType:
        """The type of the sum: the same on all ranks along the axes of which it was pending."""
        return self.type.cotangent()

    def local(self, comm: Any) -> Any:
        """The local value of the sum. The first call reduces it: all ranks of the mesh make it."""
        if self._sum is not None:
            return self._sum
        path = plan(self.type, self.of_sum, cost=comm.cost)
        tracked = any(leaf.requires_grad for leaf in comm.leaves(self.terms))
        with torch.set_grad_enabled(tracked or torch.is_grad_enabled()):  # others read it later
            value = run(path, self.terms, comm)
        if _is_for_all():
            if tracked:
                self.edges = tuple(map(_edge, comm.leaves(self.terms)))
            self._sum, self.terms = value, None
        return value


STAND_INS: frozenset[type] = frozenset({Collecting, Owed})
"""What a DTensor may hold that is no plain local value."""


def at_hand(held: Any) -> Any:
    """What a DTensor holds as tensors: terms while a sum is due, else the local value."""
    return held.at_hand if isinstance(held, StandIn) else held


def _is_for_all() -> bool:
    """Whether a tensor that is made now may be kept for readers in other modes of torch."""
    return not (transforms_active() or torch.is_inference_mode_enabled())


def _edge(leaf: torch.Tensor) -> GradientEdge | None:
    return get_gradient_edge(leaf) if leaf.requires_grad else None
