"""`ProcessWorld`: how a rank of a real mesh reaches the others, on torch's functional collectives.

Collectives are `torch.ops._c10d_functional` with explicit waits, so that no tensor subclass
appears; messages from rank to rank go over the group of all ranks of the Comm.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from fdtensor.layouts.torch_private import functional_collectives
from fdtensor.plans.wire import to_wire
from fdtensor.runtime.control.plane import Plane

__all__ = ["ProcessWorld", "functional", "wait"]

wait = functional_collectives.wait_tensor.default


class _Batch:
    """Works that are waited for once, all together."""

    def __init__(self, works: Sequence[Any]) -> None:
        self.works = works

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        self.works = ()


def functional(name: str) -> Callable[..., torch.Tensor]:
    """The functional collective of this name, with its wait."""
    op = getattr(functional_collectives, name).default

    def waited(*args: Any) -> torch.Tensor:
        return wait(op(*args))

    return waited


@functools.lru_cache(maxsize=1024)
def _places(ranks: tuple[int, ...]) -> dict[int, int]:
    """The place of each rank in the process group of these ranks."""
    return {rank: place for place, rank in enumerate(ranks)}


class ProcessWorld:
    """The processes around this rank."""

    records = False

    def __init__(
        self,
        rank: int,
        device: torch.device,
        backend: str,
        plane: Plane,
    ) -> None:
        self.rank, self.device, self.backend = rank, device, backend
        self.plane = plane
        self.unmet = plane.groups.unmet

    def group(self, ranks: tuple[int, ...]) -> str:
        return self.plane.groups.group(ranks)

    def meet(self, groups: Iterable[str]) -> None:
        """Waits until all ranks of these groups are in the call in which this one is."""
        for group in groups:
            if group in self.unmet:
                self.plane.groups.meet(group)

    def collective(self, name: str) -> Callable[..., torch.Tensor]:
        begin = self.begun(name)
        return lambda *args: begin(*args)()

    def begun(self, name: str) -> Callable[..., Callable[[], torch.Tensor]]:
        op, unmet = getattr(functional_collectives, name).default, self.unmet

        def begin(*args: Any) -> Callable[[], torch.Tensor]:
            if args[-1] in unmet:  # the group
                self.plane.groups.meet(args[-1])
            return functools.partial(wait, op(*args))

        return begin

    def messages(
        self,
        ranks: tuple[int, ...],
        receivers: Sequence[int],
        outgoing: Sequence[torch.Tensor],
        senders: Sequence[int],
        incoming: Sequence[torch.Tensor],
    ) -> tuple[Sequence[Any], Sequence[Any]]:
        """Starts a message to each receiver and from each sender, which are among `ranks`.

        Returns what to wait for, each once: a work for each that arrives, and those that leave.
        """
        if self.backend != "nccl":  # gloo moves bytes of any dtype from rank to rank
            group = self.plane.groups.handle(ranks, (*receivers, *senders))
            place_of, tag = _places(ranks), self.plane.tag
            recv, send = group.recv, group.send
            arriving = [
                recv([tensor], place_of[peer], tag)
                for tensor, peer in zip(incoming, senders, strict=True)
            ]
            leaving = [
                send([tensor], place_of[peer], tag)
                for tensor, peer in zip(outgoing, receivers, strict=True)
            ]
            return arriving, leaving
        batch = [
            dist.P2POp(dist.irecv, to_wire(t), peer)
            for t, peer in zip(incoming, senders, strict=True)
        ]
        batch += [
            dist.P2POp(dist.isend, to_wire(t), peer)
            for t, peer in zip(outgoing, receivers, strict=True)
        ]
        works = _Batch(dist.batch_isend_irecv(batch) if batch else ())
        return [works] * len(incoming), [works]  # waits are on the stream: a rank goes on
