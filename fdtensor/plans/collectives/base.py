"""`Collective`: what each operation of a plan answers; `Step`: one of them between two types."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, ClassVar, Protocol

import attrs
import torch

from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.record import Record
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.plans.counts import Count, per_rank, summed, to_receive, to_send
from fdtensor.plans.movement import Movement, movement
from fdtensor.plans.normal_type import NormalType
from fdtensor.plans.routes import route

__all__ = [
    "Axes",
    "Begin",
    "Blocks",
    "Bundle",
    "Change",
    "Collective",
    "Dims",
    "OnRank",
    "Step",
    "Work",
    "World",
]

Axes = tuple[str, ...]
Dims = tuple[int, ...]

Blocks = Mapping[int, torch.Tensor]
"""The local tensors of ranks."""

OnRank = Callable[[torch.Tensor, bool], torch.Tensor]
"""A step on one rank: its new local tensor for its old one, which it may overwrite if True."""

Begin = Callable[[torch.Tensor], Callable[[], torch.Tensor]]
"""A step on one rank that is begun with the old local tensor; what it returns waits for the new."""


Bundle = tuple[Any, ...]
"""The key of steps that travel as one: a kind of collective, then axes, dtypes and the like."""


class Work(Protocol):
    """A message on its way."""

    def wait(self) -> object:
        """Returns when it has arrived, or has been read from its tensor."""
        ...


class World(Protocol):
    """How one rank reaches the others: by process groups, or by recorded calls of these."""

    @property
    def rank(self) -> int: ...

    @property
    def backend(self) -> str: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def records(self) -> bool:
        """Whether calls are recorded, which asks for new tensors, and for calls alone."""
        ...

    def group(self, ranks: tuple[int, ...]) -> str:
        """The name of the process group of these ascending ranks."""
        ...

    def collective(self, name: str) -> Callable[..., torch.Tensor]:
        """The functional collective of this name, with its wait."""
        ...

    def begun(self, name: str) -> Callable[..., Callable[[], torch.Tensor]]:
        """The functional collective of this name; what a call returns waits for its result."""
        ...

    def messages(
        self,
        ranks: tuple[int, ...],
        receivers: Sequence[int],
        outgoing: Sequence[torch.Tensor],
        senders: Sequence[int],
        incoming: Sequence[torch.Tensor],
        /,
    ) -> tuple[Sequence[Work], Sequence[Work]]:
        """Starts a message to each receiver and from each sender; returns what to wait for.

        All of them are among `ranks`, ascending.
        """
        ...


@attrs.frozen(eq=False)
class Change:
    """The difference of two types, where all axes that change do so alike."""

    src: NormalType
    dst: NormalType
    axes: tuple[int, ...]
    """Those that change, by index; none between two meshes."""

    @property
    def names(self) -> Axes:
        """The names of the axes that change."""
        return tuple(self.src.mesh.axes[axis] for axis in self.axes)


class Collective(Record):
    """One operation, as data. A file each says what it does and what it costs.

    Its blocks, bytes and seconds follow from it and from the types of its step.

    >>> mesh = Mesh(x=2)
    >>> x = TensorType((4, 6), torch.float32, mesh.layout("x"))
    >>> (step,) = plan(x, mesh.layout()).steps
    >>> isinstance(step.collective, fd.plans.Collective), step.collective.name
    (True, 'all_gather')
    """

    __slots__ = ()

    name: ClassVar[str]
    """The name in print and in counts."""
    change: ClassVar[tuple[str, str] | None] = None
    """Between which kinds of placement it goes, as in `("shard", "replicate")`."""
    is_part: ClassVar[bool] = False
    """Whether a written-out program takes its block as a view of the old one."""
    one_buffer: ClassVar[bool] = False
    """Whether the blocks of steps that travel together are views of one tensor that arrives."""

    @classmethod
    def between(cls, change: Change) -> Collective | None:
        """The one of this kind that makes a change, or None where it cannot."""
        del change
        return None

    def __str__(self) -> str:
        return f"{self.name}[{' '.join(self.facts())}]"

    def facts(self) -> list[str]:
        """Its fields as they are printed."""
        return []

    # --- bytes, which are those of the pieces that move unless a file says otherwise ----------

    def received(self, step: Step) -> Count:
        """The bytes each rank of `step.dst.mesh` receives, as an array that broadcasts over it."""
        return to_receive(step.moves) * step.src.dtype.itemsize

    def received_at(self, step: Step, rank: int) -> int:
        """The bytes that a rank of `step.dst.mesh` receives, message by message."""
        messages = route(step.moves, rank).recvs
        return sum(message.numel for message in messages) * step.src.dtype.itemsize

    def received_by_all(self, step: Step) -> int:
        """The bytes that all ranks together receive."""
        return summed(step.dst.mesh.sizes, self.received(step))

    def senders(self, step: Step) -> Mesh:
        """The mesh of the ranks that send."""
        return step.src.mesh

    def sent(self, step: Step) -> Count:
        """The bytes each rank of `senders` sends, as an array that broadcasts over that mesh."""
        if step.moves.same_mesh:
            return to_send(step.moves) * step.src.dtype.itemsize
        mesh = self.senders(step)
        return per_rank(mesh, [self.sent_at(step, rank) for rank in mesh.order])

    def sent_at(self, step: Step, rank: int) -> int:
        """The bytes that a rank of `senders` sends, message by message."""
        messages = route(step.moves, rank).sends
        return sum(message.numel for message in messages) * step.src.dtype.itemsize

    # --- memory and time ----------------------------------------------------------------------

    def working_numel(self, step: Step, rank: int, owned: bool) -> int:
        """The elements of output and buffers while it runs; `owned`: the input is not kept."""
        del owned
        return local_numel(step.dst, rank)

    def working_together(self, steps: Sequence[Step], rank: int) -> int:
        """The bytes of outputs and buffers while steps of this kind travel as one."""
        return sum(
            step.collective.working_numel(step, rank, owned=False) * step.src.dtype.itemsize
            for step in steps
        )

    def keeps_operands(self, steps: Sequence[Step]) -> bool:
        """Whether the blocks that steps of a line send are held until the results are waited for.

        Else they are copied first, as what is packed, or as the sum that becomes the result.
        """
        del steps
        return False

    @property
    def kind(self) -> str:
        """The kind of traffic by which a cost model prices it."""
        return self.name

    def link(self) -> Axes | None:
        """The axes along which ranks talk; None for all of both meshes."""
        return None

    def messages(self, step: Step) -> int:
        """How many messages a rank waits for, one after the other."""
        del step
        return 0

    def copied(self, step: Step, moved: int) -> int:
        """About how many bytes a rank reads and writes beside the traffic, of `moved` received."""
        del moved
        return 2 * step.dst.local_nbytes(step.dst.mesh.order[0])

    def bundle(self, step: Step) -> Bundle | None:
        """The key that steps share if they travel as one; None for a step that travels alone."""
        del step
        return None

    # --- blocks -------------------------------------------------------------------------------

    def simulate(self, step: Step, blocks: Blocks) -> tuple[dict[int, torch.Tensor], Counter[int]]:
        """The blocks of all ranks afterwards, and the bytes that each received.

        Ranks that get the same may share a tensor.
        """
        raise NotImplementedError

    def on_rank(self, step: Step, world: World) -> OnRank:
        """The step on one rank, ready to be called. A rank outside gets its value back."""
        raise NotImplementedError


@attrs.frozen(eq=False)
class Step(Record):
    """A collective that takes a tensor of type `src` to type `dst`.

    >>> mesh = Mesh(x=2)
    >>> x = TensorType((4, 6), torch.float32, mesh.layout("x"))
    >>> (step,) = plan(x, mesh.layout()).steps
    >>> print(step.collective, step.src, step.dst)
    all_gather[axis=x dim=0] f32[4@x,6] f32[4,6]
    """

    collective: Collective
    src: TensorType
    dst: TensorType

    @property
    def moves(self) -> Movement:
        """Between which ranks pieces go."""
        return movement(self.src, self.dst)

    def __str__(self) -> str:
        return f"{self.collective}  {self.dst}"


def local_numel(type: TensorType, rank: int) -> int:
    """The elements that a rank holds; 0 for one outside."""
    return prod(type.local_shape(rank)) if type.mesh.position(rank) is not None else 0


def peers(mesh: Mesh, axes: Sequence[str]) -> int:
    """How many other ranks there are along axes."""
    return prod(mesh.axis_size(axis) for axis in axes) - 1


def axes_fact(axes: Axes) -> list[str]:
    """Axes as they are printed: `axis=tp`, or `axes=(dp,tp)`."""
    if not axes:
        return []
    return [f"axis={axes[0]}" if len(axes) == 1 else f"axes=({','.join(axes)})"]


def dims_fact(dims: Dims) -> list[str]:
    """Dims as they are printed: `dim=0`, or `dims=(0,1)`."""
    if not dims:
        return []
    return [f"dim={dims[0]}" if len(set(dims)) == 1 else f"dims=({','.join(map(str, dims))})"]


# --- changes of placements -------------------------------------------------------------------


def tails(change: Change, cut: NormalType, uncut: NormalType) -> tuple[Axes, Dims] | None:
    """The axes and dims of the cuts that `cut` has beyond those of `uncut`, innermost ones.

    None where a dim is cut otherwise, or where nothing is.
    """
    axes: list[str] = []
    dims: list[int] = []
    for d, (shorter, longer) in enumerate(zip(uncut.cuts, cut.cuts, strict=True)):
        if longer[: len(shorter)] != shorter:
            return None
        rest = longer[len(shorter) :]
        axes += [change.src.mesh.axes[axis] for axis, _, _ in rest]
        dims += [d] * len(rest)
    return (tuple(axes), tuple(dims)) if axes else None
