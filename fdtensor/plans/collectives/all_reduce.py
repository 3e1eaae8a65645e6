"""`AllReduce`: every rank gets the reduction of all terms."""

from __future__ import annotations

from math import prod

import attrs
import torch

from fdtensor.layouts.mesh import Coord
from fdtensor.layouts.placement import ReduceOp
from fdtensor.layouts.remembered import remembered
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.plans.boxes import contiguous
from fdtensor.plans.collectives.base import (
    Axes,
    Bundle,
    Change,
    Step,
    axes_fact,
    local_numel,
    peers,
)
from fdtensor.plans.collectives.even import Call, Even
from fdtensor.plans.collectives.exchange import by_exchange
from fdtensor.plans.counts import Count, numel, summed
from fdtensor.plans.normal_type import normalized
from fdtensor.plans.owners import owners
from fdtensor.plans.wire import in_order

__all__ = ["AllReduce"]


@attrs.frozen(eq=False)
class AllReduce(Even):
    """Every rank gets the reduction of the terms along `axes`.

    `+[A] +[B]  ->  [A+B] [A+B]`

    It receives what a reduce_scatter and an all_gather would.

    >>> mesh = Mesh(x=3)
    >>> x = TensorType((4, 6), torch.float32, mesh.layout(partial={"x": "sum"}))
    >>> print(plan(x, mesh.layout()))
    f32[4,6]{sum:x} -> f32[4,6] on Mesh(x=3)
      all_reduce[axis=x reduce_op=sum]  f32[4,6]  128 B
    1 step, 128 B received per rank
    """

    axes: Axes
    reduce_op: ReduceOp

    name = "all_reduce"
    change = ("partial", "replicate")
    funcol, in_place = "all_reduce", "all_reduce_"
    gives_one, gets_one = True, True
    one_buffer = True

    @classmethod
    def between(cls, change: Change) -> AllReduce | None:
        if change.src.cuts != change.dst.cuts:
            return None
        return cls(change.names, change.src.type.layout.partial[change.names[0]])

    def facts(self) -> list[str]:
        return [*axes_fact(self.axes), f"reduce_op={self.reduce_op}"]

    def reduction(self) -> ReduceOp:
        return self.reduce_op

    def tilings(self, step: Step, rank: int) -> tuple[None, None]:
        return None, None

    def arguments(self, call: Call, wire_op: str) -> tuple[object, ...]:
        return wire_op, call.group

    def as_exchanges(self, step: Step) -> tuple[Step, ...]:
        """To the owners of blocks, and back."""
        owned = owners(step.moves)
        steps = (by_exchange(step.src, owned), by_exchange(owned, step.dst))
        return steps if owned is not step.dst else steps[:1]

    def received(self, step: Step) -> Count:
        return self._around(step) // self._members(step)

    def received_at(self, step: Step, rank: int) -> int:
        count = self._members(step)
        return step.src.local_nbytes(rank) * 2 * (count - 1) // count

    def received_by_all(self, step: Step) -> int:
        # a rank has the mean of them, rounded down
        return summed(step.src.mesh.sizes, self._around(step)) // self._members(step)

    def sent(self, step: Step) -> Count:
        return self.received(step)

    def sent_at(self, step: Step, rank: int) -> int:
        return self.received_at(step, rank)

    def _around(self, step: Step) -> Count:
        """The bytes that all members of each rank's group receive."""
        nbytes = numel(normalized(step.src)) * step.src.dtype.itemsize
        return nbytes * (2 * (self._members(step) - 1))

    def _members(self, step: Step) -> int:
        """The ranks that reduce together."""
        return peers(step.src.mesh, self.axes) + 1

    def arriving(self, given: torch.Tensor, count: int) -> int:
        return given.nbytes * 2 * (count - 1) // count

    def messages(self, step: Step) -> int:
        return 2 * peers(step.src.mesh, self.axes)

    def working_at_once(self, step: Step, rank: int, owned: bool) -> int:
        if in_order(step.src.dtype, self.reduce_op):
            return 3 * local_numel(step.dst, rank)  # keys, what flips them, what they stand for
        return 0 if owned else local_numel(step.dst, rank)

    def working_in_exchanges(self, step: Step, rank: int) -> int:
        owned = owners(step.moves)
        own, whole = local_numel(owned, rank), local_numel(step.dst, rank)
        coord = owned.mesh.coord(rank)
        assert coord is not None
        first = tuple(
            [0 if a in self.axes else i for a, i in zip(owned.mesh.axes, coord, strict=True)]
        )
        # others have the term of the first member in the result itself
        terms = own * (self._members(step) - (coord != first))
        if owned is step.dst:
            return terms
        block = step.dst.local_shape(rank)
        packed = _apart(owned, block, self.axes, first)
        packed -= 0 if _in_one_piece(owned.local_shape(rank), block) else own
        return packed + max(terms, own + whole)

    def copied(self, step: Step, moved: int) -> int:
        return 0

    def bundle(self, step: Step) -> Bundle | None:
        return AllReduce, self.axes, self.reduce_op, step.src.dtype


@remembered(4096)
def _apart(owned: TensorType, block: tuple[int, ...], axes: Axes, coord: Coord) -> int:
    """The elements of the parts of a block, one for each rank, that do not lie in one piece."""
    parts = map(owned.local_shape, owned.mesh.coset(axes, coord))
    return sum(prod(part) for part in parts if not _in_one_piece(part, block))


def _in_one_piece(part: tuple[int, ...], block: tuple[int, ...]) -> bool:
    return contiguous(tuple([((0, size),) for size in part]), block)
