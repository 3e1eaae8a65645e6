"""`DTensor`: a tensor spread over a mesh, as a record of a local value, a type and a Comm."""

# pyright: reportIncompatibleMethodOverride=false, reportIncompatibleVariableOverride=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic

import attrs
import torch

from fdtensor.layouts.callsite import user_line
from fdtensor.layouts.display import display
from fdtensor.layouts.errors import CommError, FdtensorError, TraceError
from fdtensor.layouts.free_type import FreeType
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.opaque import opaque
from fdtensor.layouts.signatures import named_arguments
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.layouts.tree import register
from fdtensor.ops.pins import constrain
from fdtensor.ops.transparent import recording
from fdtensor.plans.planner import Plan, plan
from fdtensor.programs.closed_over import full_of
from fdtensor.runtime.autograd import shared, tracked
from fdtensor.runtime.comm import Comm, Value
from fdtensor.runtime.interpreter import run
from fdtensor.tensors.refusals import refuse_many, unchanging
from fdtensor.tensors.tensor_like import TensorLike

__all__ = ["DTensor", "TracedDTensor", "full_in_trace", "is_dtensor", "traced_of"]

_STATIC = {"pytree_node": False}

if TYPE_CHECKING:  # `spmd(f)` takes a DTensor where `f` itself says that it takes a tensor
    from torch import Tensor as _LikeTensor
else:
    _LikeTensor = TensorLike


@unchanging
@attrs.frozen(eq=False, repr=False)
class DTensor(Generic[Value], _LikeTensor):
    """A distributed tensor: a plain record and a pytree node, no tensor subclass.

    `local` is this rank's block, or on a simulated mesh the tuple of all ranks' blocks. Making one
    by hand checks nothing: `distribute` and `from_local` do. To autograd, `local` has the cotangent
    of the tensor: its block of it, the same on all replicas and for every pending term.

    >>> mesh = Mesh(x=2)
    >>> x = distribute(torch.arange(4), mesh.layout("x"), SimulatedComm(mesh))
    >>> print(x.type)
    i64[4@x]
    >>> x.local
    (tensor([0, 1]), tensor([2, 3]))
    >>> x.redistribute(mesh.layout()).full()
    tensor([0, 1, 2, 3])
    """

    local: Value
    type: TensorType = attrs.field(metadata=_STATIC)
    comm: Comm[Value] = attrs.field(metadata=_STATIC)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the full tensor."""
        return self.type.shape

    @property
    def ndim(self) -> int:
        """How many dims the full tensor has."""
        return len(self.type.shape)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype."""
        return self.type.dtype

    @property
    def layout(self) -> Layout:
        """The layout."""
        return self.type.layout

    @property
    def mesh(self) -> Mesh:
        """The mesh."""
        return self.type.layout.mesh

    @opaque
    def plan_to(self, to: Layout | TensorType) -> Plan:
        """The plan that `redistribute(to)` runs."""
        return plan(self.type, to, cost=self.comm.cost)

    @opaque
    @named_arguments
    def redistribute(
        self, to: Layout | TensorType, *, max_bytes: int | None = None
    ) -> DTensor[Value]:
        """The same tensor under another layout, on this mesh or another one. Differentiable.

        Collective over the ranks of both meshes, and so is its backward: all ranks run it, also one
        that has left and whose result does not depend on its empty tensor. Always a new local
        tensor.
        """
        if recording():
            return traced_of(self).redistribute(to)
        path = plan(self.type, to, cost=self.comm.cost, max_bytes=max_bytes)
        return DTensor(run(path, self.local, self.comm), path.dst, self.comm)

    @opaque
    def full(self) -> torch.Tensor:
        """The full tensor, on every rank of the Comm. Differentiable, collective over them.

        Ranks outside the mesh of the tensor get it too, from those that are in it. A rank may look
        at a tensor alone that all ranks of the Comm hold, as long as no derivative is wanted.
        A loss that every rank computes from it has the gradient of a single process: it is counted
        once, however many ranks compute it. Raises `CommError` on a rank that the Comm does not
        have.
        """
        if recording():
            return traced_of(self).full()
        mesh, everyone = self.mesh, self.comm.mesh
        rank = self.comm.rank
        if rank is not None and everyone.position(rank) is None:
            raise CommError(
                f"rank {rank} asks for a tensor of a Comm that it is not in.",
                comm=everyone,
                tensor=f"{self.type} on {mesh!r}",
                hint="Ask on the ranks of the Comm, or connect a mesh of all ranks that ask.",
            )
        all_in = mesh is everyone or set(mesh.order) == set(everyone.order)
        whole = mesh.layout() if all_in else everyone.layout()
        if self.type.layout is whole and not tracked([self.local]):
            return self.comm.leaves(self.local)[0].clone()
        self.comm.meet("full()", everyone)
        return self.comm.leaves(self.redistribute(whole).local)[0]

    @opaque
    def to_local(self) -> Value:
        """`local` as a value of its own, with the derivatives of the terms: undoes `from_local`."""
        return shared(self.local, self.type, self.comm, back=True)

    @opaque
    def detach(self) -> DTensor[Value]:
        """The same values, cut off from autograd."""
        if recording():
            return traced_of(self).detach()
        comm = self.comm
        local = comm.value([leaf.detach() for leaf in comm.leaves(self.local)])
        return DTensor(local, self.type, comm)

    @opaque
    def requires_grad_(self, requires_grad: bool = True) -> DTensor[Value]:
        """Marks the local tensors for autograd, in place, and returns this."""
        for leaf in self.comm.leaves(self.local):
            leaf.requires_grad_(requires_grad)
        return self

    @property
    def requires_grad(self) -> bool:
        """Whether a derivative with respect to it may be asked for."""
        return any(leaf.requires_grad for leaf in self.comm.leaves(self.local))

    @property
    def grad(self) -> DTensor[Value] | None:
        """The gradient that a backward left in the local tensors, or None."""
        grads: list[Any] = [leaf.grad for leaf in self.comm.leaves(self.local)]
        missing = [grad is None for grad in grads]
        if all(missing):
            return None
        if any(missing):
            raise FdtensorError(
                f"{sum(missing)} of {len(grads)} local tensors of {self.type} have no gradient.",
                hint="Compute the loss with the DTensor, not with some of its local tensors.",
            )
        return DTensor(self.comm.value(grads), self.type.cotangent(), self.comm)

    @opaque
    @named_arguments
    def backward(
        self,
        gradient: DTensor[Value] | None = None,
        *,
        retain_graph: bool | None = None,
        create_graph: bool = False,
    ) -> None:
        """Leaves gradients in the tensors that it was computed from, as for one process.

        `gradient` is its cotangent, 1 where it has one element. Collective, as the forward was.
        """
        whole = self.type.cotangent()
        if gradient is not None:
            cotangents = self.comm.leaves(gradient.redistribute(whole).local)
        elif self.type.numel == 1:
            cotangents = [torch.ones_like(leaf) for leaf in self.comm.leaves(self.local)]
        else:
            raise refuse_many(self)
        pairs = zip(self.comm.leaves(self.local), cotangents, strict=True)
        # a rank outside of the mesh has a part in the backward only where its graph says so
        known = [pair for pair in pairs if pair[0].requires_grad] if self.requires_grad else pairs
        leaves, cotangents = zip(*known, strict=True)
        torch.autograd.backward(leaves, cotangents, retain_graph, create_graph)

    def __repr__(self) -> str:
        return f"DTensor({self.type} on {self.mesh!r})"

    def _repr_html_(self) -> str:
        return display("html", self)


register(DTensor)


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
        return f"DTensor({self.type} inside of a traced function)"

    def _repr_html_(self) -> None:
        return None


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


def is_dtensor(node: Any) -> bool:
    """Whether a node of a pytree is a DTensor, and so a leaf to what computes with DTensors."""
    return isinstance(node, DTensor)
