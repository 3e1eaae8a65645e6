"""The closed set of operations that a plan is made of, and `Step`: one of them between two types.

`[A] [B]` are blocks on two ranks, `+[A]` is a pending term, `0` an identity element.

    Slice           [A B] [A B]       ->  [A] [B]           local
    Mask            [A] [A]           ->  +[A] +[0]         local
    Pad             [A] [B]           ->  +[A 0] +[0 B]     local
    Scale           +[A] +[B]         ->  +[2A] +[2B]       local: a sum becomes an average
    AllGather       [A] [B]           ->  [A B] [A B]
    AllToAll        [A B] [C D]       ->  [A / C] [B / D]
    AllReduce       +[A] +[B]         ->  [A+B] [A+B]
    ReduceScatter   +[A B] +[C D]     ->  [A+C] [B+D]
    Broadcast       [A] .             ->  [A] [A]
    Exchange        any blocks        ->  any blocks        each piece comes from one holder,
                                                            pending terms go to one owner
"""

from __future__ import annotations

from typing import Literal

import attrs

from fdtensor.layouts.placement import ReduceOp
from fdtensor.layouts.record import Record
from fdtensor.layouts.tensor_type import TensorType

__all__ = [
    "AllGather",
    "AllReduce",
    "AllToAll",
    "Broadcast",
    "Collective",
    "Exchange",
    "Mask",
    "Pad",
    "ReduceScatter",
    "Scale",
    "Slice",
    "Step",
    "Way",
    "is_local",
]

Way = Literal["peer_to_peer", "all_to_all"]
"""How an exchange runs: a message for each pair of ranks, or one uneven all-to-all."""

Axes = tuple[str, ...]
Dims = tuple[int, ...]


@attrs.frozen(eq=False)
class Slice(Record):
    """Each rank keeps its block of dim `dims[i]` along `axes[i]`; outer cuts first."""

    axes: Axes
    dims: Dims

    def __str__(self) -> str:
        return f"slice[{_axes(self.axes)}{_dims(self.dims)}]"


@attrs.frozen(eq=False)
class Mask(Record):
    """A replicated value becomes pending terms along `axes`.

    The first rank keeps it and the others hold identity elements; for avg, max, min, band and bor
    every rank keeps it.
    """

    axes: Axes
    reduce_op: ReduceOp

    def __str__(self) -> str:
        return f"mask[{_axes(self.axes)} reduce_op={self.reduce_op}]"


@attrs.frozen(eq=False)
class Pad(Record):
    """Blocks along `axes` become pending terms: identity elements all around the block."""

    axes: Axes
    dims: Dims
    reduce_op: ReduceOp

    def __str__(self) -> str:
        return f"pad[{_axes(self.axes)}{_dims(self.dims)} reduce_op={self.reduce_op}]"


@attrs.frozen(eq=False)
class Scale(Record):
    """Terms of a sum along `axes` become terms of an average, or back, by a power of two."""

    axes: Axes
    reduce_op: ReduceOp
    """What is pending afterwards."""

    def __str__(self) -> str:
        return f"scale[{_axes(self.axes)} reduce_op={self.reduce_op}]"


@attrs.frozen(eq=False)
class AllGather(Record):
    """Every rank gets the blocks that even cuts of `dims[i]` along `axes[i]` made."""

    axes: Axes
    dims: Dims

    def __str__(self) -> str:
        return f"all_gather[{_axes(self.axes)}{_dims(self.dims)}]"


@attrs.frozen(eq=False)
class AllToAll(Record):
    """Even blocks of `src_dim` along `axes` become even blocks of `dst_dim`."""

    axes: Axes
    src_dim: int
    dst_dim: int

    def __str__(self) -> str:
        return f"all_to_all[{_axes(self.axes)} dim={self.src_dim}->{self.dst_dim}]"


@attrs.frozen(eq=False)
class AllReduce(Record):
    """Every rank gets the reduction of the terms along `axes`."""

    axes: Axes
    reduce_op: ReduceOp

    def __str__(self) -> str:
        return f"all_reduce[{_axes(self.axes)} reduce_op={self.reduce_op}]"


@attrs.frozen(eq=False)
class ReduceScatter(Record):
    """Each rank gets its even block of the reduced terms, along `axes[i]` of `dims[i]`."""

    axes: Axes
    dims: Dims
    reduce_op: ReduceOp

    def __str__(self) -> str:
        return f"reduce_scatter[{_axes(self.axes)}{_dims(self.dims)} reduce_op={self.reduce_op}]"


@attrs.frozen(eq=False)
class Broadcast(Record):
    """Every rank of another mesh gets what `root` holds."""

    root: int

    def __str__(self) -> str:
        return f"broadcast[root={self.root}]"


@attrs.frozen(eq=False)
class Exchange(Record):
    """Each rank gets the pieces of its new block from their holders, one message a pair of ranks.

    With a `reduce_op`, the terms of each element go to its owner, who reduces them in the order of
    their coordinates. `axes` are those along which ranks talk; None when the meshes differ.
    `pieces` is how many rounds the messages are cut into, to keep buffers small.
    """

    axes: Axes | None
    reduce_op: ReduceOp | None = None
    way: Way = "peer_to_peer"
    pieces: int = 1

    def __str__(self) -> str:
        parts = [] if self.axes is None else [_axes(self.axes)]
        if self.reduce_op is not None:
            parts.append(f"reduce_op={self.reduce_op}")
        parts.append(f"way={self.way}")
        if self.pieces > 1:
            parts.append(f"pieces={self.pieces}")
        return f"exchange[{' '.join(parts)}]"


Local = Slice | Mask | Pad | Scale
"""What needs no traffic."""

Collective = (
    Slice
    | Mask
    | Pad
    | Scale
    | AllGather
    | AllToAll
    | AllReduce
    | ReduceScatter
    | Broadcast
    | Exchange
)
"""One operation, as data."""


@attrs.frozen(eq=False)
class Step(Record):
    """A collective that takes a tensor of type `src` to type `dst`."""

    collective: Collective
    src: TensorType
    dst: TensorType

    def __str__(self) -> str:
        return f"{self.collective}  {self.dst}"


def is_local(step: Step) -> bool:
    """Whether a step needs no traffic."""
    return isinstance(step.collective, Local)


def _axes(axes: Axes) -> str:
    if not axes:
        return ""
    return f"axis={axes[0]}" if len(axes) == 1 else f"axes=({','.join(axes)})"


def _dims(dims: Dims) -> str:
    if not dims:
        return ""
    return f" dim={dims[0]}" if len(set(dims)) == 1 else f" dims=({','.join(map(str, dims))})"
