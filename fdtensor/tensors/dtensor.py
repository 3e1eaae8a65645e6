"""`DTensor`: a tensor spread over a mesh, as a record of a local value, a type and a Comm."""

# pyright: reportIncompatibleMethodOverride=false, reportIncompatibleVariableOverride=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import attrs
import torch

from fdtensor.layouts.callsite import warn_user
from fdtensor.layouts.display import display
from fdtensor.layouts.errors import CommError, FdtensorError
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.opaque import opaque
from fdtensor.layouts.signatures import named_arguments
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.layouts.torch_private import see_untracked
from fdtensor.layouts.tree import register
from fdtensor.ops.transparent import recording
from fdtensor.plans.planner import Plan, plan
from fdtensor.runtime.autograd import shared, tracked
from fdtensor.runtime.comm import Comm, Value
from fdtensor.runtime.cotangents import collecting
from fdtensor.runtime.interpreter import run
from fdtensor.tensors.owed import Collecting, Owed, StandIn, at_hand
from fdtensor.tensors.pulled import backward_of
from fdtensor.tensors.refusals import (
    refuse_clipping,
    refuse_of_torch_alone,
    refuse_untracked,
    unchanging,
)
from fdtensor.tensors.tensor_like import TensorLike
from fdtensor.tensors.torch_transforms import ToldByTorch, asked_by_clipping

__all__ = ["DTensor", "due", "in_traces", "is_dtensor", "read_by_call", "settled"]

T = TypeVar("T", bound=Callable[[Any], Any])

_TRACED: list[Callable[[Any], Any]] = []

if TYPE_CHECKING:  # `spmd(f)` takes a DTensor where `f` itself says that it takes a tensor
    from torch import Tensor as _LikeTensor
else:
    _LikeTensor = TensorLike


@unchanging
@attrs.frozen(eq=False, repr=False, init=False)
class DTensor(Generic[Value], _LikeTensor, metaclass=ToldByTorch):  # type: ignore[misc]
    """A distributed tensor: a plain record and a pytree node, no tensor subclass.

    `local` is this rank's block, or on a simulated mesh the tuple of all ranks' blocks. Making one
    by hand checks nothing: `distribute` and `from_local` do. To autograd, `local` has the cotangent
    of the tensor: its block of it, the same on all replicas and for every pending term. A result of
    `call` may owe a sum over some axes, and prints so; what needs it whole reduces it, once.

    >>> mesh = Mesh(x=2)
    >>> x = distribute(torch.arange(4), mesh.layout("x"), SimulatedComm(mesh))
    >>> print(x.type)
    i64[4@x]
    >>> x.local
    (tensor([0, 1]), tensor([2, 3]))
    >>> x.redistribute(mesh.layout()).full()
    tensor([0, 1, 2, 3])
    """

    held: Value | StandIn = attrs.field(alias="local")
    type: TensorType
    comm: Comm[Value]

    def __init__(self, local: Value | StandIn, type: TensorType, comm: Comm[Value]) -> None:
        for_held, for_type, for_comm = _SLOTS  # in less time than attrs takes
        for_held(self, local)
        for_type(self, type)
        for_comm(self, comm)

    @property
    def local(self) -> Value:
        """This rank's block, or on a simulated mesh the tuple of all ranks' blocks.

        Where `call` has left a sum pending it is reduced first, once: by all ranks of the mesh.
        """
        held: Any = self.held
        return held.local(self.comm) if isinstance(held, StandIn) else held

    @property
    def shape(self) -> torch.Size:
        """The shape of the full tensor."""
        return torch.Size(self.type.shape)

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
        return plan(due(self).type, to, cost=self.comm.cost)

    @opaque
    @named_arguments
    def redistribute(
        self, to: Layout | TensorType, *, max_bytes: int | None = None
    ) -> DTensor[Value]:
        """The same tensor under another layout, on this mesh or another one. Differentiable.

        Collective over the ranks of both meshes, and so is its backward: all ranks run it, also one
        that has left and whose result does not depend on its empty tensor. Always a new local
        tensor. Ops of DTensors read it beside `local`: the gradient by a tensor in between is
        `torch.autograd.grad(loss, x)` of DTensors, not of their local tensors.
        """
        if recording():
            return _TRACED[0](self).redistribute(to)
        path, moved = _moved(self, to, max_bytes)
        cotangents = collecting(path, self.comm.leaves(moved), self.comm)
        local = moved if cotangents is None else Collecting(moved, cotangents)
        return DTensor(local, path.dst, self.comm)

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
            return _TRACED[0](self).full()
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
        return self.comm.leaves(_moved(self, whole)[1])[0]

    @opaque
    def to_local(self) -> Value:
        """`local` as a value of its own, with the derivatives of the terms: undoes `from_local`."""
        return shared(self.local, self.type, self.comm, back=True)

    @opaque
    def detach(self) -> DTensor[Value]:
        """The same values, cut off from autograd."""
        if recording():
            return _TRACED[0](self).detach()
        x, comm = due(self), self.comm
        local = comm.value([leaf.detach() for leaf in comm.leaves(x.local)])
        return DTensor(local if x is self else Owed(local, x.type), self.type, comm)

    @opaque
    def requires_grad_(self, requires_grad: bool = True) -> DTensor[Value]:
        """Marks the local tensors for autograd, in place, and returns this."""
        for leaf in self.comm.leaves(self.local):
            leaf.requires_grad_(requires_grad)
        return self

    @property
    def requires_grad(self) -> bool:
        """Whether a derivative with respect to it may be asked for."""
        return any(leaf.requires_grad for leaf in self.comm.leaves(at_hand(self.held)))

    @property
    def grad(self) -> DTensor[Value] | None:
        """The gradient that a backward left in the local tensors, or None; that of a leaf alone."""
        if asked_by_clipping():
            raise refuse_clipping(self)
        is_due = due(self) is not self
        leaves = self.comm.leaves(at_hand(self.held) if is_due else self.local)
        if not all(leaf.is_leaf or leaf.retains_grad for leaf in leaves):
            warn_user(
                f"this DTensor ({self.type}) is no leaf of autograd, so that no backward leaves a "
                ".grad in it; write w = distribute(t, layout, comm).requires_grad_() for one of t "
                "that requires none, or w = w.detach().requires_grad_(), and compute with w",
                UserWarning,
            )
            return None
        if is_due:
            return None
        grads: list[Any] = [leaf.grad for leaf in leaves]
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
        inputs: Sequence[DTensor[Any]] | DTensor[Any] | None = None,
    ) -> None:
        """Leaves gradients in the tensors that it was computed from, as for one process.

        `gradient` is its cotangent, 1 where it has one element; with `inputs`, these alone get
        gradients. Collective, as the forward was.
        """
        backward_of([self], [gradient], retain_graph, create_graph, inputs=inputs)

    def __repr__(self) -> str:
        refuse_of_torch_alone(self)
        x = due(self)
        owed = "" if x is self else f", owes the sum over {', '.join(x.layout.partial)}"
        return f"DTensor({self.type} on {self.mesh!r}{owed})"

    def __reduce__(self) -> Any:
        return DTensor, (self.local, self.type, self.comm)

    def _repr_html_(self) -> str:
        return display("html", self)


_SLOTS: Any = [DTensor.__dict__[name].__set__ for name in ("held", "type", "comm")]


def _moved(
    x: DTensor[Value], to: Layout | TensorType, max_bytes: int | None = None
) -> tuple[Plan, Value]:
    """The plan to another layout, and the local value there."""
    terms = due(x)
    path = plan(terms.type, to, cost=x.comm.cost, max_bytes=max_bytes)
    return path, run(path, terms.local, x.comm)


def in_traces(traced_of: T) -> T:
    """A decorator: the function that gives what stands for a DTensor where one is traced."""
    _TRACED[:] = [traced_of]
    return traced_of


def due(x: DTensor[Value]) -> DTensor[Value]:
    """The terms of a sum that is still to be taken, as a pending DTensor; else `x`."""
    held = x.held
    if isinstance(held, Owed) and held.is_due:
        return DTensor(held.terms, held.type, x.comm)
    return x


def settled(x: DTensor[Value]) -> DTensor[Value]:
    """The same with a plain local value: no sum is due, and its cotangent is that of the tensor."""
    return DTensor(x.local, x.type, x.comm) if isinstance(x.held, StandIn) else x


def read_by_call(x: DTensor[Value]) -> Value:
    """The local value as `call` reads it, which may leave its cotangent as it comes."""
    return x.held.value if isinstance(x.held, Collecting) else x.local


register(
    DTensor,
    lambda x: ((x.local,), (x.type, x.comm), ("local",)),
    lambda static, children: DTensor(children[0], *static),
)


def is_dtensor(node: Any) -> bool:
    """Whether a node of a pytree is a DTensor, and so a leaf to what computes with DTensors."""
    return isinstance(node, DTensor)


def _refuse_untracked(what: str, args: Sequence[Any]) -> None:
    """Raises where torch would take a DTensor for a value without a derivative."""
    if torch.is_grad_enabled() and not recording():
        for x in args:
            if is_dtensor(x) and x.requires_grad:
                raise refuse_untracked(what, x)


see_untracked(_refuse_untracked)
