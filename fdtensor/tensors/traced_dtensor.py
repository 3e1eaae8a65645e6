"""`TracedDTensor`: what stands for a DTensor in a function that is being traced."""

# pyright: reportIncompatibleMethodOverride=false, reportIncompatibleVariableOverride=false

from __future__ import annotations

from typing import Any

import torch

from fdtensor.layouts.callsite import user_line
from fdtensor.layouts.errors import TraceError
from fdtensor.layouts.free_type import FreeType
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.ops.pins import constrain
from fdtensor.ops.saved_as import saved_as
from fdtensor.programs.closed_over import full_of
from fdtensor.programs.failure_hints import INSIDE
from fdtensor.tensors.dtensor import DTensor, in_traces

__all__ = ["TracedDTensor", "full_in_trace", "traced_of"]


class TracedDTensor(DTensor[Any]):
    """A DTensor of a function that is being traced: a full tensor without values.

    `redistribute` pins its layout there, and `full` pins it to be the same on all ranks. Where the
    layout is still to be chosen, its type is free. It has no local tensors.
    """

    __slots__ = ("_mesh", "traced")
    traced: torch.Tensor
    _mesh: Mesh

    def __init__(
        self, full: torch.Tensor, mesh: Mesh, type: TensorType | FreeType | None = None
    ) -> None:
        if type is None or (tuple(full.shape), full.dtype) != (type.shape, type.dtype):
            type = FreeType(full.shape, full.dtype)
        for name, value in (("traced", full), ("_mesh", mesh), ("type", type)):
            object.__setattr__(self, name, value)

    @property
    def held(self) -> Any:
        raise _no_place("local tensors", self.type)

    @property
    def local(self) -> Any:
        raise _no_place("local tensors", self.type)

    @property
    def comm(self) -> Any:
        raise _no_place("Comm", self.type)

    @property
    def mesh(self) -> Mesh:
        return self._mesh

    @property
    def device(self) -> torch.device:
        return self.traced.device

    @property
    def requires_grad(self) -> bool:
        return self.traced.requires_grad

    def redistribute(self, to: Layout | TensorType, **_: Any) -> TracedDTensor:
        layout = to.layout if isinstance(to, TensorType) else to
        pinned = constrain(self.traced, layout)
        return TracedDTensor(pinned, self._mesh, TensorType(self.shape, self.dtype, layout))

    def saved_as(self, layout: Layout) -> TracedDTensor:
        return TracedDTensor(saved_as(self.traced, layout), self._mesh, self.type)

    def full(self) -> torch.Tensor:
        return constrain(self.traced, self._mesh.layout())

    def detach(self) -> TracedDTensor:
        return TracedDTensor(self.traced.detach(), self._mesh, self.type)

    def requires_grad_(self, requires_grad: bool = True) -> TracedDTensor:
        self.traced.requires_grad_(requires_grad)
        return self

    def backward(self, *_: Any, **__: Any) -> None:
        raise _no_place("backward", self.type)

    def __repr__(self) -> str:
        return f"DTensor({self.type} {INSIDE})"

    def _repr_html_(self) -> None:
        return None


@in_traces
def traced_of(x: DTensor[Any]) -> TracedDTensor:
    """What stands for a DTensor in the function that is traced, which closes over it."""
    return x if isinstance(x, TracedDTensor) else TracedDTensor(full_of(x), x.mesh, x.type)


def full_in_trace(x: DTensor[Any]) -> torch.Tensor:
    """The full tensor that stands for a DTensor in the function that is traced."""
    return x.traced if isinstance(x, TracedDTensor) else full_of(x)


def _no_place(what: str, type: object) -> TraceError:
    return TraceError(
        f"a DTensor of a function that is traced has no {what}.",
        x=type,
        line=user_line() or "not known",
        hint="Compute with it as a whole; shard_map has a function of local tensors.",
    )
