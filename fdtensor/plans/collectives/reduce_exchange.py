"""`ReduceExchange`: terms meet at owners that follow no layout, who send on what they add up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import attrs
import torch

from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import ReduceOp
from fdtensor.layouts.remembered import remembered
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.plans.boxes import pack_into, packed
from fdtensor.plans.collectives.base import (
    Axes,
    Blocks,
    Collective,
    OnRank,
    Step,
    World,
    axes_fact,
    local_numel,
)
from fdtensor.plans.collectives.course import Course, Mail, course, ended, share_of
from fdtensor.plans.collectives.exchange import members, taking_part
from fdtensor.plans.counts import Count, per_rank
from fdtensor.plans.meetings import busy_turns, received_and_sent, reduced_axes, talking_axes
from fdtensor.plans.wire import from_wire, to_wire

__all__ = ["ReduceExchange", "by_meetings"]


@attrs.frozen(eq=False)
class ReduceExchange(Collective):
    """The terms of each piece meet at a rank that holds one and wants the sum, and go on from it.

    `any pending terms  ->  any blocks, or new pending terms`

    Two uneven all-to-alls. It receives the fewest bytes where owners that cut the destination as a
    layout can would not all hold a term.

    >>> mesh = Mesh(x=2, y=2)
    >>> x = TensorType((4, 6), torch.float32, mesh.layout("x", partial={"y": "sum"}))
    >>> print(plan(x, mesh.layout("y")))
    f32[4@x,6]{sum:y} -> f32[4@y,6] on Mesh(x=2, y=2)
      reduce_exchange[axes=(x,y) reduce_op=sum]  f32[4@y,6]  48 B
    1 step, 48 B received per rank
    """

    axes: Axes | None
    reduce_op: ReduceOp | None = None

    name = "reduce_exchange"

    def facts(self) -> list[str]:
        op = [] if self.reduce_op is None else [f"reduce_op={self.reduce_op}"]
        return [*axes_fact(self.axes or ()), *op]

    # --- bytes --------------------------------------------------------------------------------

    def senders(self, step: Step) -> Mesh:
        return _everyone(step.src.mesh, step.dst.mesh)

    def received(self, step: Step) -> Count:
        return per_rank(step.dst.mesh, [self.received_at(step, r) for r in step.dst.mesh.order])

    def received_at(self, step: Step, rank: int) -> int:
        return received_and_sent(step.src, step.dst)[0][rank] * step.src.dtype.itemsize

    def sent(self, step: Step) -> Count:
        mesh = self.senders(step)
        return per_rank(mesh, [self.sent_at(step, rank) for rank in mesh.order])

    def sent_at(self, step: Step, rank: int) -> int:
        return received_and_sent(step.src, step.dst)[1][rank] * step.src.dtype.itemsize

    # --- time and memory ----------------------------------------------------------------------

    @property
    def kind(self) -> str:
        return "exchange"

    def link(self) -> Axes | None:
        return self.axes

    def messages(self, step: Step) -> int:
        turns = sum(busy_turns(step.src, step.dst))
        return turns * (len(taking_part((step,), step.src.mesh.order[0])) - 1)

    def copied(self, step: Step, moved: int) -> int:
        return 2 * step.dst.local_nbytes(step.dst.mesh.order[0]) + 6 * moved

    def keeps_operands(self, steps: Sequence[Step]) -> bool:
        del steps
        return True

    def working_numel(self, step: Step, rank: int, owned: bool) -> int:
        return local_numel(step.dst, rank) + share_of(step.src, step.dst, rank).buffered

    # --- blocks -------------------------------------------------------------------------------

    def simulate(self, step: Step, blocks: Blocks) -> tuple[dict[int, torch.Tensor], Counter[int]]:
        device, ranks = next(iter(blocks.values())).device, self.senders(step).order
        courses = {r: self._course(step, r, blocks.get(r), device) for r in ranks}
        received: Counter[int] = Counter()
        arrived = _brought({rank: next(steps) for rank, steps in courses.items()}, received)
        mail = {rank: steps.send(arrived[rank]) for rank, steps in courses.items()}
        arrived = _brought(mail, received)
        after = {rank: ended(steps, arrived[rank]) for rank, steps in courses.items()}
        return {rank: after[rank] for rank in step.dst.mesh.order}, received

    def on_rank(self, step: Step, world: World) -> OnRank:
        src, dst, rank = step.src, step.dst, world.rank
        holds, inside = (type.mesh.position(rank) is not None for type in (src, dst))
        if not holds and not inside:
            return lambda value, owned: value
        bring = _by_all_to_all(world, taking_part((step,), rank), src.dtype)
        share, (to_owners, onwards) = share_of(src, dst, rank), busy_turns(src, dst)
        first, last = share.takes_numel, share.gets_numel

        def perform(value: torch.Tensor, owned: bool) -> torch.Tensor:
            del owned
            steps = self._course(step, rank, value if holds else None, world.device)
            mail, arrived = next(steps), {}
            unread: Sequence[torch.Tensor] = ()
            if to_owners:
                arrived, unread = bring(mail, first, unread)
            mail, arrived = steps.send(arrived), {}  # freed before the next is packed
            if onwards:
                arrived, unread = bring(mail, last, unread)
            out = ended(steps, arrived)
            # others wait for a call of which nothing comes here, so a record has to read it
            return torch.cat([out.reshape(-1), *unread]).view(out.shape) if unread else out

        return perform

    def _course(
        self, step: Step, rank: int, value: torch.Tensor | None, device: torch.device
    ) -> Course:
        return course(step.src, step.dst, self.reduce_op, rank, value, device)


def _brought(
    mail: Mapping[int, Mail], received: Counter[int]
) -> dict[int, dict[int, torch.Tensor]]:
    """What each rank gets of the mail of all, by sender; counted in bytes."""
    arrived: dict[int, dict[int, torch.Tensor]] = {rank: {} for rank in mail}
    for rank, outgoing in mail.items():
        for peer, parts in outgoing.items():
            post = torch.cat([packed(*part).reshape(-1) for part in parts])
            arrived[peer][rank] = post
            received[peer] += post.nbytes
    return arrived


def by_meetings(src: TensorType, dst: TensorType) -> Step:
    """The step in which terms meet at owners, one by one; see `few_enough` for which types."""
    reduced = reduced_axes(src, dst)
    op = src.layout.partial[reduced[0]] if reduced else None
    return Step(ReduceExchange(talking_axes(src, dst), op), src, dst)


@remembered(4096)
def _everyone(src: Mesh, dst: Mesh) -> Mesh:
    """The mesh of all ranks that send: of two meshes a line of the ranks of both."""
    return src if src is dst else Mesh.from_ranks(members((src, dst)), ("ranks",))


Bring = Callable[
    [Mail, Mapping[int, int], Sequence[torch.Tensor]],
    tuple[dict[int, torch.Tensor], Sequence[torch.Tensor]],
]
"""Brings mail, for so many elements from each rank: what came, and the call if nothing did."""


def _by_all_to_all(world: World, ranks: tuple[int, ...], dtype: torch.dtype) -> Bring:
    """One uneven all-to-all of packed parts among `ranks`."""
    send, group = world.collective("all_to_all_single"), world.group(ranks)

    def bring(
        mail: Mail, expected: Mapping[int, int], unread: Sequence[torch.Tensor]
    ) -> tuple[dict[int, torch.Tensor], Sequence[torch.Tensor]]:
        rows = [mail.get(peer, ()) for peer in ranks]
        sizes = [sum(part.numel for part, _ in row) for row in rows]
        out_sizes = [expected.get(peer, 0) for peer in ranks]
        parts = [part for row in rows for part in row]
        if world.records:  # what is recorded is best not written to
            none = torch.empty(0, dtype=dtype, device=world.device)
            wire = torch.cat([none, *unread, *[packed(*part).reshape(-1) for part in parts]])
        else:
            wire = torch.empty(sum(sizes), dtype=dtype, device=world.device)
            slots = torch.split_with_sizes(wire, [part.numel for part, _ in parts])
            for slot, (part, views) in zip(slots, parts, strict=True):
                pack_into(slot.view(part.shape), part, views)
        buffer = from_wire(send(to_wire(wire), out_sizes, sizes, group), dtype)
        if world.records and not any(out_sizes):
            return {}, (buffer,)
        pairs = zip(ranks, torch.split_with_sizes(buffer, out_sizes), strict=True)
        return {peer: slot for peer, slot in pairs if len(slot)}, ()

    return bring
