"""`begin_exchanges`: several exchanges with one message a pair of ranks for all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import torch

from fdtensor.plans.boxes import Views, cut, packed
from fdtensor.plans.collectives import Exchange, Step
from fdtensor.plans.collectives.exchange import ranks_around, rounds_of, taking_part
from fdtensor.plans.collectives.rounds import ExchangeRound, copy_kept, reduce_arrivals
from fdtensor.plans.local_tensors import empty, flat, plain
from fdtensor.plans.reductions import divide
from fdtensor.runtime.world import ProcessWorld

__all__ = ["begin_exchanges"]


@attrs.frozen(eq=False)
class _Part:
    """One of the exchanges on this rank."""

    index: int
    step: Step
    turn: ExchangeRound
    source: torch.Tensor | None
    """This rank's block; None where it is outside of the source."""

    @property
    def olds(self) -> Sequence[Views]:
        return () if self.source is None else cut(self.source, self.turn.source)


def begin_exchanges(
    steps: Sequence[Step], values: Sequence[torch.Tensor], world: ProcessWorld
) -> Callable[[], list[torch.Tensor]]:
    """Begins exchanges of one round each, which travel together; what is returned waits for them.

    It gives the new local tensors.
    """
    parts = [_part(i, step, values[i], world.rank) for i, step in enumerate(steps)]
    results = list(values)
    mine = [part for part in parts if part is not None]
    if not mine:
        return lambda: results
    # larger elements first, so that each tensor's part of a buffer is aligned for its dtype
    mine.sort(key=lambda part: (-part.step.src.dtype.itemsize, part.index))
    outgoing: dict[int, list[torch.Tensor]] = {}
    sizes: dict[int, int] = {}
    olds = {part.index: part.olds for part in mine}
    for part in mine:
        for message in part.turn.sends:
            block = packed(message.part, olds[part.index][message.index])
            outgoing.setdefault(message.peer, []).append(_bytes(block))
        for message in part.turn.recvs:
            nbytes = message.part.numel * part.step.src.dtype.itemsize
            sizes[message.peer] = sizes.get(message.peer, 0) + nbytes
    joined = {peer: torch.cat(blocks) for peer, blocks in outgoing.items()}
    arrive = _post(steps, joined, sizes, world)

    def finish() -> list[torch.Tensor]:
        arrived = arrive()
        starts = dict.fromkeys(arrived, 0)
        for part in mine:
            results[part.index] = _placed(part, olds[part.index], arrived, starts, world)
        return results

    return finish


def _part(index: int, step: Step, value: torch.Tensor, rank: int) -> _Part | None:
    """None for a rank outside both meshes."""
    holds = step.src.mesh.position(rank) is not None
    if not holds and step.dst.mesh.position(rank) is None:
        return None
    (turn,) = rounds_of(step, rank)
    return _Part(index, step, turn, flat(plain(value)) if holds else None)


def _placed(
    part: _Part,
    olds: Sequence[Views],
    arrived: dict[int, torch.Tensor],
    starts: dict[int, int],
    world: ProcessWorld,
) -> torch.Tensor:
    """The new block of one exchange, from the bytes of each peer, read on from `starts`."""
    step, turn = part.step, part.turn
    exchange = step.collective
    assert isinstance(exchange, Exchange)
    out = empty(step.dst, world.rank, world.device)
    news = cut(flat(out), turn.target)
    terms = []
    for message in turn.recvs:
        start, nbytes = starts[message.peer], message.part.numel * out.dtype.itemsize
        starts[message.peer] += nbytes
        term = arrived[message.peer][start : start + nbytes].view(out.dtype)
        terms.append(term.view(message.part.shape))
        if message.in_place:
            news[message.index][0].copy_(terms[-1])
    copy_kept(turn, olds, news)
    reduce_arrivals(turn, exchange.reduce_op, olds, news, terms)
    inside = step.dst.mesh.position(world.rank) is not None
    if inside and exchange.reduce_op == "avg":
        divide(out, step.moves.terms)
    return out


def _post(
    steps: Sequence[Step],
    outgoing: dict[int, torch.Tensor],
    sizes: dict[int, int],
    world: ProcessWorld,
) -> Callable[[], dict[int, torch.Tensor]]:
    """Sends bytes to each peer, by one collective for the group; waits for those from each."""
    if world.backend == "gloo":
        incoming = {
            peer: torch.empty(size, dtype=torch.uint8, device=world.device)
            for peer, size in sizes.items()
        }
        ways = list(outgoing), list(outgoing.values()), list(incoming), list(incoming.values())
        arriving, leaving = world.messages(ranks_around(tuple(steps)), *ways)

        def messages() -> dict[int, torch.Tensor]:
            for work in (*arriving, *leaving):
                work.wait()
            return incoming

        return messages
    ranks = taking_part(tuple(steps), world.rank)
    nothing = torch.empty(0, dtype=torch.uint8, device=world.device)
    sending = torch.cat([nothing, *(outgoing[r] for r in ranks if r in outgoing)])
    out_sizes = [sizes.get(rank, 0) for rank in ranks]
    in_sizes = [outgoing[rank].numel() if rank in outgoing else 0 for rank in ranks]
    sent = world.begun("all_to_all_single")(sending, out_sizes, in_sizes, world.group(ranks))

    def parts() -> dict[int, torch.Tensor]:
        # a copy for each, since a part of a buffer need not be aligned for its dtype
        pairs = zip(ranks, sent().split(out_sizes), strict=True)
        return {rank: part.clone() for rank, part in pairs if rank in sizes}

    return parts


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor; one of a single element may have any strides."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
