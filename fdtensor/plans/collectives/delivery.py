"""`Deliver`: one round of an exchange on one rank, by messages or by an uneven all-to-all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from fdtensor.layouts.placement import ReduceOp
from fdtensor.plans.boxes import Views, cut, pack_into, packed
from fdtensor.plans.collectives.base import Work, World
from fdtensor.plans.collectives.rounds import (
    ExchangeRound,
    MessageView,
    copy_kept,
    put_in_place,
    reduce_arrivals,
)
from fdtensor.plans.wire import from_wire, to_wire

__all__ = ["Arrival", "Deliver", "by_all_to_all", "by_messages"]

Arrival = Callable[[], "torch.Tensor | None"]
"""Waits for a round, and puts what arrives in its place; returns it where nothing reads it."""

Deliver = Callable[[ExchangeRound, torch.Tensor, torch.Tensor], Arrival]
"""A round from a source block into a target block, begun: what is left to do is its result."""


def by_messages(world: World, ranks: tuple[int, ...], reduce_op: ReduceOp | None) -> Deliver:
    """One message for each peer among `ranks`; parts in one piece go from and to their place."""

    def deliver(turn: ExchangeRound, source: torch.Tensor, target: torch.Tensor) -> Arrival:
        news = cut(target, turn.target)
        incoming = [
            news[m.index][0] if m.in_place else target.new_empty(m.part.shape) for m in turn.recvs
        ]
        olds = cut(source, turn.source) if turn.source.parts else ()
        parts: dict[int, torch.Tensor] = {}  # a part may go to several peers
        for message in turn.sends:
            if message.index not in parts:
                parts[message.index] = packed(message.part, olds[message.index])
        outgoing = [parts[message.index] for message in turn.sends]
        peers = turn.receivers, outgoing, turn.senders, incoming
        arriving, leaving = world.messages(ranks, *peers)
        copy_kept(turn, olds, news)  # while the rest is under way

        def arrive() -> None:
            reduce_arrivals(turn, reduce_op, olds, news, map(_waited, arriving, incoming))
            for work in leaving:
                work.wait()

        return arrive

    return deliver


def by_all_to_all(world: World, ranks: tuple[int, ...], reduce_op: ReduceOp | None) -> Deliver:
    """One uneven all-to-all of packed messages among `ranks`, in their order."""
    place = {peer: i for i, peer in enumerate(ranks)}
    send, group = world.begun("all_to_all_single"), world.group(ranks)

    def deliver(turn: ExchangeRound, source: torch.Tensor, target: torch.Tensor) -> Arrival:
        olds = cut(source, turn.source) if turn.source.parts else ()
        out_sizes = _sizes(turn.recvs, place)
        wire = to_wire(_side_by_side(world, place, turn, olds, target))
        sent = send(wire, out_sizes, _sizes(turn.sends, place), group)

        def arrive() -> torch.Tensor | None:
            buffer = from_wire(sent(), target.dtype)
            slots = torch.split_with_sizes(buffer, out_sizes)
            arrived = [slots[place[m.peer]].view(m.part.shape) for m in turn.recvs]
            news = cut(target, turn.target)
            put_in_place(turn, news, arrived)
            copy_kept(turn, olds, news)
            reduce_arrivals(turn, reduce_op, olds, news, arrived)
            return buffer if world.records and not any(out_sizes) else None

        return arrive

    return deliver


def _sizes(messages: Sequence[MessageView], place: Mapping[int, int]) -> list[int]:
    """How many elements go to, or come from, each rank."""
    counts = [0] * len(place)
    for message in messages:
        counts[place[message.peer]] = message.part.numel
    return counts


def _side_by_side(
    world: World,
    place: Mapping[int, int],
    turn: ExchangeRound,
    olds: Sequence[Views],
    like: torch.Tensor,
) -> torch.Tensor:
    """The messages to all ranks, one after the other."""
    if world.records:  # what is recorded is best not written to
        parts = [like.new_empty(0)] * len(place)
        for message in turn.sends:
            part = packed(message.part, olds[message.index])
            parts[place[message.peer]] = part.reshape(-1)
        return torch.cat(parts)
    in_sizes = _sizes(turn.sends, place)
    sending = like.new_empty(sum(in_sizes))
    slots = torch.split_with_sizes(sending, in_sizes)
    for message in turn.sends:
        slot = slots[place[message.peer]].view(message.part.shape)
        pack_into(slot, message.part, olds[message.index])
    return sending


def _waited(work: Work, tensor: torch.Tensor) -> torch.Tensor:
    work.wait()
    return tensor
