"""`Local`: a step without traffic, in which each rank keeps, copies or fills what it holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

import attrs
import torch

from fdtensor.layouts.blocks import Box, intersect, locate
from fdtensor.layouts.remembered import remembered
from fdtensor.plans.boxes import Boxes, boxes_in, cut
from fdtensor.plans.collectives.base import Blocks, Collective, OnRank, Step, World
from fdtensor.plans.counts import Count, constant
from fdtensor.plans.local_tensors import empty

__all__ = ["Common", "Local", "common", "copy_common", "is_local", "local_step"]


class Local(Collective):
    """A step that needs no traffic."""

    __slots__ = ()

    def on_block(self, step: Step, rank: int, block: torch.Tensor) -> torch.Tensor:
        """The new block of a rank that is in both meshes; never an alias of `block`."""
        raise NotImplementedError

    def received(self, step: Step) -> Count:
        return constant(step.dst.mesh, 0)

    def received_at(self, step: Step, rank: int) -> int:
        return 0

    def received_by_all(self, step: Step) -> int:
        return 0

    def sent(self, step: Step) -> Count:
        return constant(step.src.mesh, 0)

    def sent_at(self, step: Step, rank: int) -> int:
        return 0

    def simulate(self, step: Step, blocks: Blocks) -> tuple[dict[int, torch.Tensor], Counter[int]]:
        nothing = next(iter(blocks.values())).new_empty(0)
        done: dict[Hashable, torch.Tensor] = {}
        after: dict[int, torch.Tensor] = {}
        for rank in step.dst.mesh.order:
            block = blocks.get(rank, nothing)
            key = id(block), self.depends_on(step, rank) if rank in blocks else rank
            if key not in done:
                done[key] = local_step(step, rank, block)
            after[rank] = done[key]
        return after, Counter()

    def depends_on(self, step: Step, rank: int) -> Hashable:
        """What the new block of a rank in both meshes depends on, beside the old one."""
        del step
        return rank

    def on_rank(self, step: Step, world: World) -> OnRank:
        rank, dst = world.rank, step.dst
        if step.src.mesh.position(rank) is not None:
            return lambda value, owned: local_step(step, rank, value)
        if dst.mesh.position(rank) is not None:
            return lambda value, owned: empty(dst, rank, world.device)
        return lambda value, owned: value


def is_local(step: Step) -> bool:
    """Whether a step needs no traffic."""
    return isinstance(step.collective, Local)


def local_step(step: Step, rank: int, block: torch.Tensor) -> torch.Tensor:
    """The block of `rank` after a step that needs no traffic; never an alias of `block`.

    A rank in neither mesh gets `block` back.
    """
    before, after = step.src.mesh.position(rank), step.dst.mesh.position(rank)
    if before is None or after is None:
        outside = before is None and after is None
        return block if outside else empty(step.dst, rank, block)
    assert isinstance(step.collective, Local), f"{step.collective} is not local"
    return step.collective.on_block(step, rank, block)


@attrs.frozen(eq=False)
class Common:
    """The elements that a rank holds before and after a local step: a part of either block."""

    shape: tuple[int, ...]
    """That of its new block."""
    boxes: tuple[Boxes, Boxes] | None
    """None where there is nothing."""

    @property
    def whole(self) -> bool:
        """Whether it is all of the new block."""
        return self.boxes is not None and self.boxes[1].places == (((),),)


@remembered(8192)
def common(step: Step, rank: int) -> Common:
    """The elements that a rank in both meshes holds before and after a step."""
    src, dst = step.src, step.dst
    before, after = src.mesh.coord(rank), dst.mesh.coord(rank)
    assert before is not None
    assert after is not None
    old, new = src.box(before), dst.box(after)
    both = tuple([intersect(a, b) for a, b in zip(old, new, strict=True)])
    shape = dst.local_shape(rank)
    if not all(both):
        return Common(shape, None)
    olds: Box = tuple(map(locate, old, both))
    news: Box = tuple(map(locate, new, both))
    return Common(shape, (boxes_in([olds], src.local_shape(rank)), boxes_in([news], shape)))


def copy_common(shared: Common, block: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """`out` with what both blocks have in common, copied from `block`."""
    if shared.boxes is not None:
        (olds,), (news,) = cut(block, shared.boxes[0]), cut(out, shared.boxes[1])
        for source, target in zip(olds, news, strict=True):
            target.copy_(source)
    return out
