"""`Exchange`: each piece goes straight from the one who sends it to those who want it."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from math import prod
from typing import Literal

import attrs
import torch

from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import ReduceOp
from fdtensor.layouts.remembered import remembered
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.plans.boxes import cut, packed
from fdtensor.plans.collectives.base import (
    Axes,
    Begin,
    Blocks,
    Bundle,
    Collective,
    OnRank,
    Step,
    World,
    axes_fact,
    local_numel,
    peers,
)
from fdtensor.plans.collectives.buffers import most_buffered
from fdtensor.plans.collectives.delivery import Arrival, by_all_to_all, by_messages
from fdtensor.plans.collectives.rounds import (
    ExchangeRound,
    copy_kept,
    put_in_place,
    reduce_arrivals,
    rounds,
)
from fdtensor.plans.local_tensors import empty, flat, plain
from fdtensor.plans.movement import Movement, movement
from fdtensor.plans.normal_type import normalized
from fdtensor.plans.reductions import divide
from fdtensor.plans.routes import route

__all__ = ["Exchange", "Way", "by_exchange", "members", "rounds_of", "taking_part"]

Way = Literal["peer_to_peer", "all_to_all"]
"""How an exchange runs: a message for each pair of ranks, or one uneven all-to-all."""


@attrs.frozen(eq=False)
class Exchange(Collective):
    """Each rank gets the pieces of its new block from their holders, one message a pair of ranks.

    `any blocks  ->  any blocks`

    With a `reduce_op`, the terms of each element go to its owner, who reduces them in the order of
    their coordinates. `axes` are those along which ranks talk; None when the meshes differ.
    `pieces` is how many rounds the messages are cut into, to keep buffers small.

    >>> mesh = Mesh(x=2)
    >>> x = TensorType((5, 6), torch.float32, mesh.layout("x"))
    >>> print(plan(x, mesh.layout(None, "x")))
    f32[5@x,6] -> f32[5,6@x] on Mesh(x=2)
      exchange[axis=x way=all_to_all]  f32[5,6@x]  36 B
    1 step, 36 B received per rank
    """

    axes: Axes | None
    reduce_op: ReduceOp | None = None
    way: Way = "peer_to_peer"
    pieces: int = 1

    name = "exchange"

    def facts(self) -> list[str]:
        facts = axes_fact(self.axes or ())
        if self.reduce_op is not None:
            facts.append(f"reduce_op={self.reduce_op}")
        facts.append(f"way={self.way}")
        return [*facts, f"pieces={self.pieces}"] if self.pieces > 1 else facts

    # --- time and memory ----------------------------------------------------------------------

    @property
    def kind(self) -> str:
        return "peer_to_peer" if self.way == "peer_to_peer" else "exchange"

    def link(self) -> Axes | None:
        return self.axes

    def messages(self, step: Step) -> int:
        if self.way == "peer_to_peer":
            return _senders(step.moves) * self.pieces
        if self.axes is None:
            return (max(step.src.mesh.size, step.dst.mesh.size) - 1) * self.pieces
        return peers(step.src.mesh, self.axes) * self.pieces

    def copied(self, step: Step, moved: int) -> int:
        out = step.dst.local_nbytes(step.dst.mesh.order[0])
        copies = 2 if self.way == "all_to_all" or not _in_place(step) else 0
        return 2 * out + (copies + (self.reduce_op is not None)) * 2 * moved

    def keeps_operands(self, steps: Sequence[Step]) -> bool:
        del steps
        return True

    def working_numel(self, step: Step, rank: int, owned: bool) -> int:
        way = route(step.moves, rank)
        inside = step.src.mesh.position(rank) is not None
        src_shape = (step.src.local_shape(rank) or (1,)) if inside else ()
        packed = self.way == "all_to_all"
        return local_numel(step.dst, rank) + most_buffered(way, self.pieces, src_shape, packed)

    def bundle(self, step: Step) -> Bundle | None:
        return (Exchange, self.axes, self.reduce_op, self.way) if self.pieces == 1 else None

    # --- blocks -------------------------------------------------------------------------------

    def simulate(self, step: Step, blocks: Blocks) -> tuple[dict[int, torch.Tensor], Counter[int]]:
        before = {rank: flat(block) for rank, block in blocks.items()}
        like = next(iter(blocks.values()))
        after = {rank: empty(step.dst, rank, like) for rank in step.dst.mesh.order}
        received: Counter[int] = Counter()
        todo = {rank: rounds_of(step, rank) for rank in {*before, *after}}
        for i in range(self.pieces):
            post: dict[int, dict[int, torch.Tensor]] = {rank: {} for rank in after}
            for rank, block in before.items():
                olds = cut(block, todo[rank][i].source)
                for message in todo[rank][i].sends:
                    part = packed(message.part, olds[message.index])
                    post[message.peer][rank] = part
                    received[message.peer] += part.nbytes
            for rank, out in after.items():
                turn = todo[rank][i]
                assert set(turn.senders) == set(post[rank]), "both sides know the messages"
                olds = cut(before[rank], turn.source) if rank in before else []
                news = cut(flat(out), turn.target)
                copy_kept(turn, olds, news)
                arrived = [post[rank][peer] for peer in turn.senders]
                put_in_place(turn, news, arrived)
                reduce_arrivals(turn, self.reduce_op, olds, news, arrived)
        if self.reduce_op == "avg":
            for out in after.values():
                divide(out, step.moves.terms)
        return after, received

    def on_rank(self, step: Step, world: World) -> OnRank:
        begin = self.begun(step, world)
        return lambda value, owned: begin(value)()

    def begun(self, step: Step, world: World) -> Begin:
        """The step on one rank, of which the first messages are on their way when it is begun."""
        dst, rank = step.dst, world.rank
        holds, inside = (type.mesh.position(rank) is not None for type in (step.src, dst))
        if not holds and not inside:
            return lambda value: lambda: value
        todo = rounds_of(step, rank)
        shape = dst.local_shape(rank) if inside else (0,) * len(dst.shape)
        divisor = step.moves.terms if inside and self.reduce_op == "avg" else 1
        if self.way == "peer_to_peer" and not world.records:
            deliver = by_messages(world, ranks_around((step,)), self.reduce_op)
        else:
            deliver = by_all_to_all(world, taking_part((step,), rank), self.reduce_op)

        def begin(value: torch.Tensor) -> Callable[[], torch.Tensor]:
            if not inside:
                out = empty(dst, rank, world.device)
            elif holds:
                out = value.new_empty(shape)
            else:
                out = torch.empty(shape, dtype=dst.dtype, device=world.device)
            target = flat(out)
            source = flat(plain(value)) if holds else target
            return functools.partial(finish, source, out, [deliver(todo[0], source, target)])

        def finish(source: torch.Tensor, out: torch.Tensor, coming: list[Arrival]) -> torch.Tensor:
            for turn in (*todo[1:], None):
                unread = coming.pop()()  # popped, so that its buffers are freed before the next
                if unread is not None:  # others wait for this call, which nothing here reads
                    out = torch.cat([out.reshape(-1), unread]).view(out.shape)
                if turn is not None:
                    coming.append(deliver(turn, source, flat(out)))
            return divide(out, divisor) if divisor > 1 else out

        return begin


def by_exchange(
    src: TensorType, dst: TensorType, way: Way = "peer_to_peer", pieces: int = 1
) -> Step:
    """The exchange from `src` to `dst`, which reduces the partial axes that `dst` does not have."""
    moves = movement(src, dst)
    names = src.mesh.axes
    axes = None if moves.axes is None else tuple(names[a] for a in moves.axes)
    reduce_op = src.layout.partial[names[moves.reduced[0]]] if moves.reduced else None
    return Step(Exchange(axes, reduce_op, way, pieces), src, dst)


def rounds_of(step: Step, rank: int) -> tuple[ExchangeRound, ...]:
    """The rounds of an exchange on one rank."""
    exchange = step.collective
    assert isinstance(exchange, Exchange)
    return rounds(step.moves, rank, exchange.pieces, exchange.reduce_op is not None)


@remembered(4096)
def members(meshes: tuple[Mesh, ...]) -> tuple[int, ...]:
    """The ranks of all meshes, ascending."""
    return tuple(sorted({rank for mesh in meshes for rank in mesh.order}))


@remembered(4096)
def ranks_around(steps: tuple[Step, ...]) -> tuple[int, ...]:
    """The ranks of all meshes of these steps, ascending."""
    return members(_meshes(steps))


def _meshes(steps: tuple[Step, ...]) -> tuple[Mesh, ...]:
    return tuple(dict.fromkeys(m for step in steps for m in (step.src.mesh, step.dst.mesh)))


@remembered(4096)
def taking_part(steps: tuple[Step, ...], rank: int) -> tuple[int, ...]:
    """The ranks, ascending, that take part in an all-to-all of these exchanges with `rank`.

    On one mesh the coset of all axes that exchange, else every rank of the meshes.
    """
    meshes = _meshes(steps)
    if len(meshes) > 1:
        return members(meshes)
    mesh = next(iter(meshes))
    axes = {axis for step in steps for axis in step.collective.link() or ()}
    coord = mesh.coord(rank)
    assert coord is not None
    return tuple(sorted(mesh.coset([axis for axis in mesh.axes if axis in axes], coord)))


def _senders(moves: Movement) -> int:
    """About how many ranks send to one: blocks that meet its own, times the terms."""
    paired = {a for a, _ in moves.pairs}
    met = moves.terms
    for d, size in enumerate(moves.dst.shape):
        ways = prod(n for axis, n, _ in moves.assigned.cuts[d] if axis not in paired)
        block = -(-size // prod(n for _, n, _ in moves.dst.cuts[d]))
        part = -(-size // prod(n for _, n, _ in moves.assigned.cuts[d]))
        met *= max(1, min(ways, -(-block // max(1, part))))
    return max(1, met - 1)


def _in_place(step: Step) -> bool:
    """Whether messages lie in one piece in the blocks that they come from and go to."""
    a, b = normalized(step.src), normalized(step.dst)
    first = next((d for d, size in enumerate(a.shape) if size > 1), 0)
    return all(a.cuts[d] == b.cuts[d] for d in range(len(a.shape)) if d != first)
