"""`DTensor`: a tensor spread over a mesh, as a record of a local value, a type and a Comm."""

# pyright: reportIncompatibleMethodOverride=false, reportIncompatibleVariableOverride=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic

import attrs
import torch

from fdtensor.layouts.display import display
from fdtensor.layouts.errors import CommError
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.opaque import opaque
from fdtensor.layouts.signatures import named_arguments
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.layouts.tree import register
from fdtensor.plans.planner import Plan, plan
from fdtensor.runtime.autograd import shared, tracked
from fdtensor.runtime.comm import Comm, Value
from fdtensor.runtime.interpreter import run
from fdtensor.tensors.no_tensor import NoTensor, unchanging

__all__ = ["DTensor", "is_dtensor"]

_STATIC = {"pytree_node": False}

if TYPE_CHECKING:  # `spmd(f)` takes a DTensor where `f` itself says that it takes a tensor
    from torch import Tensor as _LikeTensor
else:
    _LikeTensor = NoTensor


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
        comm = self.comm
        local = comm.value([leaf.detach() for leaf in comm.leaves(self.local)])
        return DTensor(local, self.type, comm)

    @opaque
    def requires_grad_(self, requires_grad: bool = True) -> DTensor[Value]:
        """Marks the local tensors for autograd, in place, and returns this."""
        for leaf in self.comm.leaves(self.local):
            leaf.requires_grad_(requires_grad)
        return self

    def __repr__(self) -> str:
        return f"DTensor({self.type} on {self.mesh!r})"

    def _repr_html_(self) -> str:
        return display("html", self)


register(DTensor)


def is_dtensor(node: Any) -> bool:
    """Whether a node of a pytree is a DTensor, and so a leaf to what computes with DTensors."""
    return node.__class__ is DTensor
