"""`Even`: one call of a process group among ranks along axes, whose blocks have the same size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from math import prod
from typing import ClassVar

import attrs
import torch

from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import ReduceOp, Shard
from fdtensor.layouts.remembered import remembered
from fdtensor.plans.collectives.base import Axes, Blocks, Collective, OnRank, Step, World, peers
from fdtensor.plans.local_tensors import copied, plain
from fdtensor.plans.normal_type import NormalType
from fdtensor.plans.reductions import divide, reduced
from fdtensor.plans.tiling import Tiling, join, split
from fdtensor.plans.wire import from_wire, in_order, reduces_as, to_wire

OnRanks = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]

__all__ = ["Call", "Even", "ascending", "bundled", "is_even"]


@attrs.frozen(eq=False)
class Call:
    """An even collective on one rank."""

    count: int
    """The ranks that take part."""
    group: str
    before: Tiling | None
    """How what a rank gives is cut into blocks, one after the other; None for a block as it is."""
    after: Tiling | None
    """How what arrives is put together; None for a block as it is."""
    length: int
    """The rows of what a rank gives, or 0 where there are no blocks of it."""

    def packed(self, block: torch.Tensor) -> torch.Tensor:
        """The tensor that a rank gives, contiguous."""
        block = plain(block)
        return block.contiguous() if self.before is None else split(block, self.before)

    def unpacked(self, arrived: torch.Tensor) -> torch.Tensor:
        """The new block."""
        return arrived if self.after is None else join(arrived, self.after)


class Even(Collective):
    """A collective among the ranks along `axes`, whose blocks have the same size."""

    __slots__ = ()

    axes: Axes

    funcol: ClassVar[str]
    """The functional collective that it is."""
    in_place: ClassVar[str] = ""
    """The one that overwrites its input, where there is one."""
    gives_one: ClassVar[bool]
    """Whether a rank gives one block, or one for each rank."""
    gets_one: ClassVar[bool]
    """Whether a rank gets one block, or one from each rank."""

    def reduction(self) -> ReduceOp | None:
        """The reduction of the blocks that meet; None where they are put together."""
        return None

    def tilings(self, step: Step, rank: int) -> tuple[Tiling | None, Tiling | None]:
        """How blocks lie in what a rank has before and after, where it has several."""
        raise NotImplementedError

    def arguments(self, call: Call, wire_op: str) -> tuple[object, ...]:
        """Those of the functional collective, after what a rank gives.

        `wire_op` is the reduction of what travels, empty where there is none.
        """
        raise NotImplementedError

    def as_exchanges(self, step: Step) -> tuple[Step, ...]:
        """The same by exchanges, for a backend that lacks the reduction."""
        raise NotImplementedError

    def arrivals(self, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Of what ranks give in one call, what each gets; ranks that get the same share it."""
        reduce_op, count = self.reduction(), len(given)
        if reduce_op is not None:
            total = reduced(given, reduce_op)
            return [total] * count if self.gives_one else [copied(t) for t in total.chunk(count)]
        if self.gives_one:
            return [torch.cat(list(given))] * count
        columns = zip(*[tensor.chunk(count) for tensor in given], strict=True)
        return [torch.cat(parts) for parts in columns]

    def link(self) -> Axes:
        return self.axes

    def working_numel(self, step: Step, rank: int, owned: bool) -> int:
        if self.wire_op(step, "gloo") is not None:
            return self.working_at_once(step, rank, owned)
        return self.working_in_exchanges(step, rank)

    def working_at_once(self, step: Step, rank: int, owned: bool) -> int:
        """As `working_numel`, where the collective itself runs and no exchanges in its place."""
        raise NotImplementedError

    def working_in_exchanges(self, step: Step, rank: int) -> int:
        """As `working_numel` of `as_exchanges`, without a look at each message."""
        raise NotImplementedError

    def working_together(self, steps: Sequence[Step], rank: int) -> int:
        if self.wire_op(steps[0], "gloo") is None:
            return super().working_together(steps, rank)
        given = sum(step.src.local_nbytes(rank) for step in steps)
        got = sum(step.dst.local_nbytes(rank) for step in steps)
        cut = [step for step in steps if _even(step).tilings(step, rank)[0] is not None]
        packed = sum(step.src.local_nbytes(rank) for step in cut)
        if in_order(steps[0].src.dtype, self.reduction()):
            return max(packed + given, 3 * given)  # what is joined, its keys, and what flips them
        # what is given is joined and travels; where several blocks arrive, each is copied from them
        return max(packed + given, given + got, got if self.gets_one else 2 * got)

    def messages(self, step: Step) -> int:
        return peers(step.src.mesh, self.axes)

    def call(self, step: Step, rank: int, group: Callable[[tuple[int, ...]], str]) -> Call:
        """The call of a rank of the mesh."""
        coord = step.src.mesh.coord(rank)
        assert coord is not None
        ranks = tuple(sorted(step.src.mesh.coset(self.axes, coord)))
        return self.call_among(step, rank, len(ranks), group(ranks))

    def call_among(self, step: Step, rank: int, count: int, group: str) -> Call:
        """The call of a rank among `count` in a process group."""
        before, after = self.tilings(step, rank)
        length = 0 if before is None else before.blocks[0]
        return Call(count, group, before, after, length)

    def wire_op(self, step: Step, backend: str) -> str | None:
        """The reduction of what travels, empty for none; None where the backend lacks it."""
        reduce_op = self.reduction()
        return "" if reduce_op is None else reduces_as(step.src.dtype, reduce_op, backend)

    def on_rank(self, step: Step, world: World) -> OnRank:
        if step.src.mesh.position(world.rank) is None:
            return lambda value, owned: value
        wire_op = self.wire_op(step, world.backend)
        if wire_op is None:
            return _one_by_one([s.collective.on_rank(s, world) for s in self.as_exchanges(step)])
        call = self.call(step, world.rank, world.group)
        send = world.collective(self.funcol)
        overwrite = world.collective(self.in_place) if self.in_place and not world.records else None
        arguments = self.arguments(call, wire_op)
        reduce_op = self.reduction()

        def run(value: torch.Tensor, owned: bool) -> torch.Tensor:
            wire = to_wire(call.packed(value), reduce_op)
            if overwrite is not None and (owned or wire.data_ptr() != value.data_ptr()):
                overwrite(wire, *arguments)
            else:
                wire = send(wire, *arguments)
            out = call.unpacked(from_wire(wire, value.dtype, reduce_op))
            return divide(out, call.count) if reduce_op == "avg" else out

        return run

    def simulate(self, step: Step, blocks: Blocks) -> tuple[dict[int, torch.Tensor], Counter[int]]:
        received: Counter[int] = Counter()
        after: dict[int, torch.Tensor] = {}
        for ranks in map(sorted, step.src.mesh.cosets(self.axes)):
            calls = [self.call_among(step, rank, len(ranks), "") for rank in ranks]
            pairs = zip(ranks, calls, strict=True)
            given = [call.packed(blocks[rank]) for rank, call in pairs]
            news: dict[int, torch.Tensor] = {}
            for rank, call, arrived in zip(ranks, calls, self.arrivals(given), strict=True):
                received[rank] += self.arriving(given[0], len(ranks))
                if id(arrived) not in news:
                    news[id(arrived)] = call.unpacked(arrived)
                after[rank] = news[id(arrived)]
        return after, received

    def arriving(self, given: torch.Tensor, count: int) -> int:
        """The bytes that come to a rank from the others, where each of `count` gives as much."""
        return (given.nbytes if self.gives_one else given.nbytes // count) * (count - 1)


def is_even(type: NormalType, dims: Sequence[int]) -> bool:
    """Whether every rank has a block of the same size in these dims, by plain shards."""
    return all(
        all(isinstance(placement, Shard) for _, _, placement in type.cuts[d])
        and type.shape[d] % prod(count for _, count, _ in type.cuts[d]) == 0
        for d in dims
    )


@remembered(1024)
def ascending(mesh: Mesh) -> bool:
    """Whether ranks count up along the mesh, as they do in a process group."""
    return isinstance(mesh.order, range) or list(mesh.order) == sorted(mesh.order)


def bundled(steps: Sequence[Step], world: World) -> OnRanks | None:
    """Even collectives of one bundle as one call of what they give, side by side.

    Returns a function from the blocks of this rank to its new ones; None where the backend lacks
    the reduction.
    """
    kind = steps[0].collective
    assert isinstance(kind, Even)
    wire_op = kind.wire_op(steps[0], world.backend)
    if wire_op is None:
        return None
    calls = [_even(step).call(step, world.rank, world.group) for step in steps]
    shapes = [step.dst.local_shape(world.rank) for step in steps]
    count, reduce_op = calls[0].count, kind.reduction()
    send = world.collective(kind.funcol)

    def run(blocks: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        given = [call.packed(block) for call, block in zip(calls, blocks, strict=True)]
        if kind.gives_one:
            row = torch.cat([x.reshape(-1) for x in given])
            sizes = [x.numel() for x in given]
        else:
            row = torch.cat([x.reshape(count, -1) for x in given], 1).reshape(-1)
            sizes = [x.numel() // count for x in given]
        arguments = kind.arguments(attrs.evolve(calls[0], length=row.shape[0]), wire_op)
        wire, dtype = to_wire(row, reduce_op), row.dtype
        del row
        wire = send(wire, *arguments)
        arrived = from_wire(wire, dtype, reduce_op)
        if kind.gets_one:
            parts = torch.split_with_sizes(arrived, sizes)
        else:
            columns = torch.split_with_sizes(arrived.view(count, -1), sizes, 1)
            parts = [part.reshape(-1) for part in columns]
        outs: list[torch.Tensor] = []
        for call, part, shape in zip(calls, parts, shapes, strict=True):
            outs.append(part.view(shape) if call.after is None else call.unpacked(part))
        return [divide(out, count) for out in outs] if reduce_op == "avg" else outs

    return run


def _even(step: Step) -> Even:
    assert isinstance(step.collective, Even)
    return step.collective


def _one_by_one(steps: Sequence[OnRank]) -> OnRank:
    def run(value: torch.Tensor, owned: bool) -> torch.Tensor:
        for step in steps:
            value = step(value, owned)
            owned = True
        return value

    return run
