"""`course`: what one rank does where terms meet, up to each of the two times that mail is brought.

Whoever brings the mail drives it: the simulator for all ranks in turn, an all-to-all for one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Mapping, Sequence

import attrs
import torch

from fdtensor.layouts.blocks import locate
from fdtensor.layouts.placement import ReduceOp
from fdtensor.layouts.remembered import remembered
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.plans.boxes import Boxes, Part, Views, boxes_in, cut
from fdtensor.plans.local_tensors import empty, flat, plain
from fdtensor.plans.meetings import Meeting, added_axes, meetings
from fdtensor.plans.normal_type import normalized
from fdtensor.plans.reductions import accumulate, divide, identity

__all__ = ["Course", "Mail", "RankShare", "course", "ended", "share_of"]

Mail = Mapping[int, Sequence[tuple[Part, Views]]]
"""The parts that go to each rank."""

Course = Generator[Mail, Mapping[int, torch.Tensor], torch.Tensor]
"""Gives what it sends, is sent what came from each rank, packed, and ends with the new block."""

Parts = Mapping[int, Sequence[int]]
"""The parts, by number, for or from each rank."""


@attrs.frozen(eq=False)
class RankShare:
    """The share of one rank: parts of its old and new block, and where they go."""

    source: Boxes
    """The terms that it gives."""
    target: Boxes
    """What it adds up, and after that what it gets."""
    terms: Sequence[Sequence[tuple[int, int]]]
    """Of each part that it adds up, by term: the sender, and the number of its own part."""
    gives: Parts
    """Parts of the source for owners."""
    takes: Parts
    """Parts of the target, of which a term comes."""
    sends: Parts
    """Parts of the target for those that want them."""
    gets: Parts
    """Parts of the target that owners send."""

    @property
    def buffered(self) -> int:
        """The most elements that are packed at once, of what goes and what comes."""
        first = _numel(self.source, self.gives) + _numel(self.target, self.takes)
        return max(first, _numel(self.target, self.sends) + _numel(self.target, self.gets))

    @property
    def takes_numel(self) -> dict[int, int]:
        """The elements that come first, from each rank."""
        return _by_peer(self.target, self.takes)

    @property
    def gets_numel(self) -> dict[int, int]:
        """The elements that come last, from each rank."""
        return _by_peer(self.target, self.gets)


def _numel(boxes: Boxes, mail: Parts) -> int:
    return sum(_by_peer(boxes, mail).values())


def _by_peer(boxes: Boxes, mail: Parts) -> dict[int, int]:
    return {peer: sum(boxes.parts[i].numel for i in row) for peer, row in mail.items()}


@remembered(8192)
def share_of(src_type: TensorType, dst_type: TensorType, rank: int) -> RankShare:
    """The share of a rank in all meetings between two types."""
    met = meetings(src_type, dst_type)
    given = [m for m in met if rank in m.senders]
    owned = [m for m in met if rank == m.owner]
    wanted = [m for m in met if rank in m.places and rank != m.owner]
    number = {m: i for i, m in enumerate(given)}
    return RankShare(
        _boxes(src_type, rank, given),
        _boxes(dst_type, rank, [*owned, *wanted]),
        [[(r, number[m] if r == rank else -1) for r in m.senders] for m in owned],
        _numbered([[m.owner] for m in given], rank),
        _numbered([m.senders for m in owned], rank),
        _numbered([m.places for m in owned], rank),
        _numbered([*[()] * len(owned), *[(m.owner,) for m in wanted]], rank),
    )


def _numbered(peers: Sequence[Sequence[int]], rank: int) -> Parts:
    """For each other rank the numbers of the parts, whose peers these are."""
    parts: defaultdict[int, list[int]] = defaultdict(list)
    for number, row in enumerate(peers):
        for peer in row:
            if peer != rank:
                parts[peer].append(number)
    return dict(parts)


def _boxes(type: TensorType, rank: int, met: Sequence[Meeting]) -> Boxes:
    """The pieces of these meetings in the block of a rank."""
    coord = type.mesh.coord(rank)
    if coord is None:
        return boxes_in([], ())
    block = normalized(type).box(coord)
    # not merged where intervals touch, so that both blocks of a rank have a piece in the same runs
    pieces = [
        tuple(locate(held, part) for held, part in zip(block, m.box, strict=True)) for m in met
    ]
    return boxes_in(pieces, type.local_shape(rank) or (1,))


def course(
    src: TensorType,
    dst: TensorType,
    op: ReduceOp | None,
    rank: int,
    value: torch.Tensor | None,
    device: torch.device,
) -> Course:
    """The course of one rank, which gives `value`, None for a rank outside of the source."""
    share = share_of(src, dst, rank)
    olds = [] if value is None else cut(flat(plain(value)), share.source)
    out = _fresh(src, dst, rank, device if value is None else value.device)
    news = cut(flat(out), share.target) if share.target.parts else []
    _add_up(share, op, rank, olds, news, (yield _mail(share.gives, share.source, olds)))
    _put(share, news, (yield _mail(share.sends, share.target, news)))
    return out


def _add_up(
    share: RankShare,
    op: ReduceOp | None,
    rank: int,
    olds: Sequence[Views],
    news: Sequence[Views],
    arrived: Mapping[int, torch.Tensor],
) -> None:
    """Puts the terms of each part that the rank owns into its place, in their order."""
    slots = {peer: iter(_unpacked(share.target, share.takes, arrived, peer)) for peer in arrived}
    # the parts that it owns come first, those that it gets have no terms
    for views, part, terms in zip(news, share.target.parts, share.terms, strict=False):
        for k, (sender, number) in enumerate(terms):
            if sender == rank:
                _add(op, k, views, olds[number])
            else:
                term = next(slots[sender])
                _add(op, k, views, [term[run] if run else term for run in part.runs])
        if op == "avg":
            for view in views:
                divide(view, len(terms))


def _put(share: RankShare, news: Sequence[Views], arrived: Mapping[int, torch.Tensor]) -> None:
    """Puts what owners have sent into its place."""
    for owner, numbers in share.gets.items():
        results = _unpacked(share.target, share.gets, arrived, owner)
        for i, result in zip(numbers, results, strict=True):
            for run, place in zip(share.target.parts[i].runs, news[i], strict=True):
                place.copy_(result[run] if run else result)


def ended(steps: Course, arrived: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """The new block, for the last that came."""
    try:
        steps.send(arrived)
    except StopIteration as end:
        return end.value
    raise AssertionError("a course ends when mail has come twice")


def _mail(mail: Parts, boxes: Boxes, views: Sequence[Views]) -> Mail:
    return {peer: [(boxes.parts[i], views[i]) for i in numbers] for peer, numbers in mail.items()}


def _unpacked(
    boxes: Boxes, mail: Parts, arrived: Mapping[int, torch.Tensor], peer: int
) -> list[torch.Tensor]:
    """What came from one rank, as the parts that it is of."""
    parts = [boxes.parts[i] for i in mail[peer]]
    pieces = torch.split_with_sizes(arrived[peer], [part.numel for part in parts])
    return [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)]


def _add(op: ReduceOp | None, number: int, targets: Views, sources: Views) -> None:
    """Puts term `number` into its place, or adds it to what is there."""
    for target, source in zip(targets, sources, strict=True):
        if number == 0:
            target.copy_(source)
        else:
            assert op is not None
            accumulate(op, target, source)


def _fresh(src: TensorType, dst: TensorType, rank: int, device: torch.device) -> torch.Tensor:
    """A new block: identity elements where terms are new, of which a rank may get none."""
    added = added_axes(src, dst)
    if not added or dst.mesh.coord(rank) is None:
        return empty(dst, rank, device)
    like = torch.empty(0, dtype=dst.dtype, device=device)
    return identity(dst.layout.partial[added[0]], dst.local_shape(rank), like)
