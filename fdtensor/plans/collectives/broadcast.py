"""`Broadcast`: every rank of another mesh gets what one rank holds."""

from __future__ import annotations

from collections import Counter

import attrs
import torch

from fdtensor.plans.collectives.base import Blocks, Change, Collective, OnRank, Step, World
from fdtensor.plans.local_tensors import copied, empty, plain
from fdtensor.plans.wire import from_wire, to_wire

__all__ = ["Broadcast"]


@attrs.frozen(eq=False)
class Broadcast(Collective):
    """Every rank of another mesh gets what `root` holds.

    `[A] .  ->  [A] [A]`

    >>> mesh, more = Mesh(x=1), Mesh(x=2)
    >>> x = TensorType((4, 6), torch.float32, mesh.layout())
    >>> print(plan(x, more.layout()))
    f32[4,6] on Mesh(x=1) -> f32[4,6] on Mesh(x=2)
      exchange[way=peer_to_peer]  f32[4,6]  96 B
    1 step, 96 B received per rank
    """

    root: int

    name = "broadcast"
    change = ("mesh", "mesh")

    @classmethod
    def between(cls, change: Change) -> Broadcast | None:
        src, dst = change.src, change.dst
        whole = not dst.cut_axes and not dst.partial and not src.partial
        if src.mesh.size == 1 and dst.mesh.size > 2 and whole:
            return cls(src.mesh.order[0])
        return None

    def facts(self) -> list[str]:
        return [f"root={self.root}"]

    def messages(self, step: Step) -> int:
        return 1

    def copied(self, step: Step, moved: int) -> int:
        return 0

    def simulate(self, step: Step, blocks: Blocks) -> tuple[dict[int, torch.Tensor], Counter[int]]:
        whole, ranks = blocks[self.root], step.dst.mesh.order
        received = Counter({rank: whole.nbytes for rank in ranks if rank != self.root})
        return {rank: copied(whole) for rank in ranks}, received

    def on_rank(self, step: Step, world: World) -> OnRank:
        dst, rank = step.dst, world.rank
        ranks = tuple(sorted({*step.src.mesh.order, *dst.mesh.order}))
        if rank not in ranks:
            return lambda value, owned: value
        arguments = ranks.index(self.root), world.group(ranks)
        give, overwrite = world.collective("broadcast"), world.collective("broadcast_")
        if rank != self.root:

            def receive(value: torch.Tensor, owned: bool) -> torch.Tensor:
                out = torch.empty(dst.shape, dtype=dst.dtype, device=world.device)
                overwrite(to_wire(out), *arguments)
                return out

            return receive

        def send(value: torch.Tensor, owned: bool) -> torch.Tensor:
            wire = to_wire(plain(value).contiguous())
            if dst.mesh.position(rank) is not None:
                return from_wire(give(wire, *arguments), dst.dtype)
            overwrite(wire, *arguments)  # the root's own is only read
            return empty(dst, rank, world.device)

        return send
