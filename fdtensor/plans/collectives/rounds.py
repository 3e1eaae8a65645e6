"""`ExchangeRound`: what a rank sends in one round of an exchange, and where arrivals are put."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs
import torch

from fdtensor.layouts.blocks import Box, Intervals, share
from fdtensor.layouts.placement import ReduceOp
from fdtensor.layouts.remembered import remembered
from fdtensor.plans.boxes import Boxes, Part, Views, boxes_in, contiguous
from fdtensor.plans.movement import Movement
from fdtensor.plans.reductions import accumulate
from fdtensor.plans.routes import Message, Route, route

__all__ = [
    "ExchangeRound",
    "MessageView",
    "copy_kept",
    "piece",
    "put_in_place",
    "reduce_arrivals",
    "rounds",
]


@attrs.frozen(eq=False)
class MessageView:
    """A message to or from `peer`, with term number `term` of part number `index` of the boxes."""

    peer: int
    term: int
    index: int
    part: Part
    in_place: bool
    """Whether what arrives can be received where it belongs."""


@attrs.frozen(eq=False)
class ExchangeRound:
    """The part of one rank in one round of an exchange.

    There is at most one message for each peer; those that arrive are in the order of their terms.
    """

    source: Boxes
    target: Boxes
    """The parts of the source and of the destination block."""
    sends: tuple[MessageView, ...]
    recvs: tuple[MessageView, ...]
    kept: tuple[tuple[int, int], ...]
    """Parts of the source, each with the part of the destination block that it goes to."""
    kept_term: int
    """Which term is kept."""

    @property
    def receivers(self) -> list[int]:
        """The peers of what is sent."""
        return [message.peer for message in self.sends]

    @property
    def senders(self) -> list[int]:
        """The peers of what arrives."""
        return [message.peer for message in self.recvs]


@remembered(8192)
def rounds(moves: Movement, rank: int, pieces: int, reduces: bool) -> tuple[ExchangeRound, ...]:
    """The rounds of an exchange on one rank, as many as it has pieces."""
    way, src = route(moves, rank), moves.src.type
    inside = src.mesh.position(rank) is not None
    shapes = (src.local_shape(rank) or (1,)) if inside else (), way.shape or ()
    return tuple([_round(way, i, pieces, reduces, *shapes) for i in range(pieces)])


def _round(
    way: Route,
    i: int,
    pieces: int,
    reduces: bool,
    source: tuple[int, ...],
    target: tuple[int, ...],
) -> ExchangeRound:
    """Round `i` of a rank with blocks of shape `source` and `target`."""
    sends = [m for m in (piece(m, i, pieces) for m in way.sends) if m.numel]
    recvs = [m for m in (piece(m, i, pieces) for m in way.recvs) if m.numel]
    kept: list[tuple[Box, Box]] = []
    if way.kept is not None:
        old, new = way.kept
        if pieces == 1 or (not reduces and i == 0):
            kept = [(old.box, new.box)]
        elif reduces:  # a term is added when the others are
            kept = [_within(way.kept, box) for box in dict.fromkeys(m.box for m in recvs)]
            kept = [pair for pair in kept if all(pair[1])]
    olds = list(dict.fromkeys([*(m.box for m in sends), *(old for old, _ in kept)]))
    news = list(dict.fromkeys([*(m.box for m in recvs), *(new for _, new in kept)]))
    before, after = boxes_in(olds, source), boxes_in(news, target)
    return ExchangeRound(
        before,
        after,
        _views(sends, olds, before, source),
        _views(recvs, news, after, target),
        tuple([(olds.index(old), news.index(new)) for old, new in kept]),
        way.kept[1].term if way.kept else 0,
    )


def piece(message: Message, index: int, count: int) -> Message:
    """Part `index`, of `count`, of a message: a share of its longest dim."""
    if count == 1:
        return message
    return Message(message.peer, share(message.box, index, count), message.term)


def _within(kept: tuple[Message, Message], box: Box) -> tuple[Box, Box]:
    """The kept part of a box of the destination block: where it was and where it goes."""
    before: list[Intervals] = []
    after: list[Intervals] = []
    for olds, news, wanted in zip(kept[0].box, kept[1].box, box, strict=True):
        old: list[tuple[int, int]] = []
        new: list[tuple[int, int]] = []
        for (shift, _), (start, stop) in zip(olds, news, strict=True):
            for ends in wanted:
                low, high = max(ends[0], start), min(ends[1], stop)
                if low < high:
                    old.append((shift + low - start, shift + high - start))
                    new.append((low, high))
        before.append(tuple(old))
        after.append(tuple(new))
    return tuple(before), tuple(after)


def _views(
    messages: Sequence[Message], boxes: Sequence[Box], cut: Boxes, shape: Sequence[int]
) -> tuple[MessageView, ...]:
    index = {box: i for i, box in enumerate(boxes)}
    views: list[MessageView] = []
    for m in messages:
        i = index[m.box]
        in_place = m.term == 0 and contiguous(m.box, shape)
        views.append(MessageView(m.peer, m.term, i, cut.parts[i], in_place))
    return tuple(views)


# --- putting in place ------------------------------------------------------------------------


def copy_kept(round: ExchangeRound, olds: Sequence[Views], news: Sequence[Views]) -> None:
    """Copies what a rank keeps into its new block, unless other terms come before it."""
    if round.kept_term == 0:
        for old, new in round.kept:
            for source, target in zip(olds[old], news[new], strict=True):
                target.copy_(source)


def put_in_place(
    round: ExchangeRound, news: Sequence[Views], arrived: Sequence[torch.Tensor]
) -> None:
    """Copies what could have been received where it belongs."""
    for message, part in zip(round.recvs, arrived, strict=True):
        if message.in_place:
            news[message.index][0].copy_(part)


def reduce_arrivals(
    round: ExchangeRound,
    reduce_op: ReduceOp | None,
    olds: Sequence[Views],
    news: Sequence[Views],
    arrived: Iterable[torch.Tensor],
) -> None:
    """Puts what arrives into the new block, and what is kept there, terms in their order.

    `arrived` are the messages in the order of `round.recvs`, packed; those in place are there
    already. So is, by `copy_kept`, what is kept as first term.
    """
    waiting = round.kept_term > 0
    for message, term in zip(round.recvs, arrived, strict=True):
        if waiting and round.kept_term < message.term:
            _add_kept(round, reduce_op, olds, news)
            waiting = False
        if message.in_place:
            continue
        for run, place in zip(message.part.runs, news[message.index], strict=True):
            values = term[run] if run else term
            if message.term == 0:
                place.copy_(values)
            else:
                assert reduce_op is not None
                accumulate(reduce_op, place, values)
    if waiting:
        _add_kept(round, reduce_op, olds, news)


def _add_kept(
    round: ExchangeRound,
    reduce_op: ReduceOp | None,
    olds: Sequence[Views],
    news: Sequence[Views],
) -> None:
    assert reduce_op is not None
    for old, new in round.kept:
        for source, target in zip(olds[old], news[new], strict=True):
            accumulate(reduce_op, target, source)
