"""`Comm`: what a plan runs on. A value is what one rank holds, or what all of them hold."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar, get_args

import torch

from fdtensor.layouts.errors import CommError
from fdtensor.layouts.expected import no_comm, no_mesh
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.remembered import remembered
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.layouts.torch_private import FakeTensor, plain_dispatch
from fdtensor.layouts.words import a_kind, near
from fdtensor.plans.collectives import Step
from fdtensor.plans.cost import CostModel, model_of
from fdtensor.programs.options import Check

__all__ = [
    "Check",
    "Comm",
    "Value",
    "contained",
    "inside",
    "kind_of",
    "misfit",
    "mistakes",
    "other_kind",
    "refuse_no_comm",
    "refuse_no_place",
    "ranks_here",
    "speaker",
]

Value = TypeVar("Value", torch.Tensor, tuple[torch.Tensor, ...])
"""On a real mesh this rank's tensor; on a simulated one every rank's, in the order of the mesh."""


C = TypeVar("C")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


class Comm(Protocol[Value]):
    """Where plans run: values of one kind, and the steps on them.

    `FuncolComm` and `SimulatedComm` are two; any class with these attributes and methods is one.

    >>> comm = connect(Mesh(x=2))
    >>> isinstance(comm, SimulatedComm), comm.rank, comm.mesh
    (True, None, Mesh(x=2))
    """

    mesh: Mesh
    """The ranks that it has."""
    cost: CostModel
    """The cost model of plans and programs."""
    check: Check
    """When ranks agree that they run the same."""
    agreed: set[Any]
    """The digests that its ranks have agreed on."""
    compiled: dict[Any, Any]
    """The functions of local tensors that programs have become on it."""

    @property
    def rank(self) -> int | None:
        """The rank of this process; None where values have the local tensors of all ranks."""
        ...

    @property
    def device(self) -> torch.device | None:
        """Where local tensors lie; None where they may lie anywhere."""
        ...

    def __copy__(self: C) -> C:
        return self  # a place to run on: what is copied stays there

    def __deepcopy__(self: C, memo: object) -> C:
        return self

    def share(self, numbers: Sequence[int], src_rank: int) -> list[int]:
        """The numbers that `src_rank` gives, on all ranks."""
        ...

    def agree(self, about: str, digest: str, mesh: Sequence[Mesh], mistake: str | None) -> None:
        """Raises `CommError` on all ranks of the meshes if digests differ or one has a mistake."""
        ...

    def meet(self, about: str, mesh: Mesh) -> None:
        """Raises `CommError` on all ranks of a mesh if they have not made the same calls so far."""

    def note(self, about: str, numbers: Sequence[int | float], mesh: Mesh) -> None:
        """Notes numbers that must be the same on all ranks of a mesh, for when they compare."""

    def pooled(
        self,
        about: str,  # noqa: ARG002
        numbers: dict[int, list[int]],
        meshes: Sequence[Mesh],  # noqa: ARG002
    ) -> dict[int, list[int]]:
        """The numbers of all ranks of the meshes, by rank; `numbers` has those of ranks here."""
        return numbers

    def watched(self, what: Any, function: F) -> F:  # noqa: ARG002
        """The function, whose calls do `what` on its ranks: those of a plan or a program.

        Where ranks are processes, each call is noted, and its errors are told to the others.
        """
        return function

    def failed(self, meshes: Sequence[Mesh], error: BaseException) -> BaseException:  # noqa: ARG002
        """The error to raise for one on the way to a call; other ranks of the meshes hear of it."""
        return error

    def waited(self, meshes: Sequence[Mesh], wait: Callable[[], T]) -> T:  # noqa: ARG002
        """The result of `wait`, for what a call on these meshes has begun and left under way."""
        return wait()

    def spread(self, groups: Sequence[Sequence[Mesh]], error: BaseException) -> None:
        """Tells the ranks of each group of meshes of an error that only some of them have met."""

    def mistake(self, value: Value, type: TensorType) -> str | None:
        """The misfit of `value` as a tensor of `type`, in a few words; None if it fits."""
        ...

    def each(self, type: TensorType, make: Callable[[int], torch.Tensor]) -> Value:
        """The value that has `make(rank)` on every rank of the type's mesh."""
        ...

    def leaves(self, value: Value) -> tuple[torch.Tensor, ...]:
        """The tensors of a value."""
        ...

    def value(self, leaves: Sequence[torch.Tensor]) -> Value:
        """The value made of these tensors: the inverse of `leaves`."""
        ...

    def width(self, type: TensorType) -> int:
        """How many leaves a value of this type has."""
        ...

    def refuse(self, about: str, mistake: str, meshes: Sequence[Mesh] = ()) -> None:
        """Raises `CommError` on this rank for a value that does not fit.

        The other ranks of the meshes hear of it.
        """
        ...

    def copy(self, value: Value) -> Value:
        """A value that shares no memory with `value`."""
        ...

    def perform(self, step: Step, value: Value, owned: bool = False) -> Value:
        """The value after a step; one that is `owned` may be overwritten."""
        ...

    def perform_together(self, steps: Sequence[Step], values: Sequence[Value]) -> list[Value]:
        """The values after steps of one bundle, with one call for all of them where that helps."""
        ...


def refuse_no_comm(value: object) -> None:
    """Raises `CommError` for what is no Comm: a mesh, a layout, nothing."""
    if not hasattr(value, "agree"):
        raise no_comm(value)


def refuse_no_place(mesh: object, cost: object, check: object) -> None:
    """Raises for a Comm on what is no mesh, with what is no cost model or no way to check."""
    if not isinstance(mesh, Mesh):
        raise no_mesh(mesh)
    model_of(cost)
    if check not in get_args(Check):
        raise CommError(
            f"check={check!r} is no option.",
            hint=f"{near(check, get_args(Check))}Write check= one of "
            f"{', '.join(map(repr, get_args(Check)))}.",
        )


def ranks_here(comm: Comm[Any], mesh: Mesh) -> Sequence[int]:
    """The ranks of `mesh` whose local tensors a value in this process has, in its order."""
    if comm.rank is None:
        return mesh.order
    return (comm.rank,) if mesh.position(comm.rank) is not None else ()


def inside(comm: Comm[Any], mesh: Mesh | None = None) -> bool:
    """Whether this process has a rank of `mesh`, by default the one of the Comm."""
    return comm.rank is None or (mesh or comm.mesh).position(comm.rank) is not None


def speaker(comm: Comm[Any]) -> str:
    """The beginning of a sentence that this process tells the others: `rank 3: `, or nothing."""
    return "" if comm.rank is None else f"rank {comm.rank}: "


_SPEAKER = re.compile(r"rank \d+: ")
"""What `speaker` gives."""


def contained(about: str, meshes: Sequence[Mesh], own: Mesh) -> None:
    """Raises `CommError` where `own`, the mesh of a Comm, lacks a rank of one of the meshes."""
    for mesh in meshes:
        if mesh is own:
            continue
        outside = [rank for rank in mesh.order if own.position(rank) is None]
        if outside:
            raise CommError(
                f"{about} uses rank {outside[0]}, which this Comm does not have.",
                needed=mesh,
                comm=own,
                hint="Make the Comm of a mesh that contains all ranks of both meshes.",
            )


def misfit(about: str, mistake: str) -> CommError:
    """The error for a local tensor that does not fit its type, or for one that a rank tells of."""
    hint = (
        "Give every rank a tensor of the shape, dtype and device that its type says: "
        "type.local_shape(rank), type.dtype."
    )
    if _SPEAKER.match(mistake):
        hint = "Look at what that rank raises; the others stop with it."
    return CommError(f"{about} cannot start: {mistake}.", hint=hint)


def mistakes(local: object, type: TensorType, rank: int, device: torch.device) -> str | None:
    """The misfit of a local tensor of `type` on `rank`; None where it fits."""
    expected = _expected(type, rank)
    if expected is None:
        return None
    if not isinstance(local, torch.Tensor):
        return f"rank {rank} has {kind_of(local)}, expected a tensor of shape {expected}"
    if other_kind(local):
        return f"rank {rank} has {other_kind(local)}, expected a plain tensor"
    if local.shape != expected:
        return f"rank {rank} has shape {tuple(local.shape)}, expected {expected}"
    if local.dtype != type.dtype:
        return f"rank {rank} has dtype {local.dtype}, expected {type.dtype}"
    if local.device != device and not _on(local.device, device):
        return f"rank {rank} has device {local.device}, expected {device}"
    if local.layout != torch.strided:
        return f"rank {rank} has a {local.layout} tensor, expected a strided one"
    return None


def other_kind(tensor: torch.Tensor) -> str | None:
    """The kind of a tensor without a block of plain memory: `a nested tensor`, `a MaskedTensor`."""
    if tensor.is_nested:
        return "a nested tensor"
    kind: Any = type(tensor)
    plain = kind.__torch_dispatch__ is plain_dispatch
    return None if plain or isinstance(tensor, FakeTensor) else f"a {kind.__name__}"


@remembered(8192)
def _expected(type: TensorType, rank: int) -> tuple[int, ...] | None:
    """The shape that a rank's local tensor must have; None for a rank outside."""
    return None if type.mesh.position(rank) is None else type.local_shape(rank)


def _on(place: torch.device, device: torch.device) -> bool:
    """Whether a tensor on `place` is on `device`, which may leave open which of its kind."""
    return place.type == device.type and device.index is None


def kind_of(value: object) -> str:
    """What a value is, in a few words."""
    return "None" if value is None else a_kind(value)
