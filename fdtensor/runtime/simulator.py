"""`SimulatedComm`: every rank of a mesh in this process. A value is a tuple of tensors."""

# pyright: reportIncompatibleMethodOverride=false
# what a Comm answers as a property is an attribute here

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import torch

from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import ReduceOp
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.plans.collective import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Exchange,
    ReduceScatter,
    Step,
)
from fdtensor.plans.cost import NCCL, CostModel
from fdtensor.plans.messages import talk
from fdtensor.plans.tiling import join, split, tiling
from fdtensor.runtime.comm import Check, Comm, contained, misfit, mistakes
from fdtensor.runtime.kernel import (
    accumulate,
    copied,
    divide,
    empty,
    flat,
    keep,
    local_step,
    packed,
    settle,
)
from fdtensor.runtime.packing import cut, rounds

__all__ = ["SimulatedComm"]

Tensors = tuple[torch.Tensor, ...]


class SimulatedComm(Comm[tuple[torch.Tensor, ...]]):
    """All ranks of a mesh in one process; it counts what a real mesh would move.

    A value is a tuple with each rank's local tensor, in mesh order. `received` counts the bytes
    that arrived at each rank from others, `calls` the collectives by name. A pickle of it is one
    that has run nothing yet; all DTensors of a pickle share it.
    """

    rank: None = None
    device: None = None

    def __init__(self, mesh: Mesh, *, cost: CostModel = NCCL, check: Check = "first") -> None:
        self.mesh = mesh
        self.cost = cost
        self.check: Check = check
        self.received: Counter[int] = Counter()
        self.calls: Counter[str] = Counter()
        self.agreed: set[Any] = set()
        self.compiled: dict[Any, Any] = {}

    def __repr__(self) -> str:
        return f"SimulatedComm({self.mesh!r})"

    def __reduce__(self) -> Any:
        return partial(type(self), cost=self.cost, check=self.check), (self.mesh,)

    def share(self, numbers: Sequence[int], src_rank: int) -> list[int]:
        return list(numbers)

    def agree(self, about: str, digest: str, mesh: Sequence[Mesh], mistake: str | None) -> None:
        contained(about, mesh, self.mesh)
        if mistake is not None:
            self.refuse(about, mistake)

    def refuse(self, about: str, mistake: str) -> None:
        raise misfit(about, mistake)

    def width(self, type: TensorType) -> int:
        return type.mesh.size

    def mistake(self, value: object, type: TensorType) -> str | None:
        count = type.mesh.size
        if not isinstance(value, (tuple, list)) or len(value) != count:
            return f"a simulated value is a tuple of {count} tensors, one a rank"
        for rank, local in zip(type.mesh.order, value, strict=True):
            found = mistakes(local, type, rank, _device(value))
            if found:
                return found
        return None

    def each(self, type: TensorType, make: Callable[[int], torch.Tensor]) -> Tensors:
        return tuple([make(rank) for rank in type.mesh.order])

    def leaves(self, value: Tensors) -> Tensors:
        return tuple(value)

    def value(self, leaves: Sequence[torch.Tensor]) -> Tensors:
        return tuple(leaves)

    def copy(self, value: Tensors) -> Tensors:
        return tuple([copied(local) for local in value])

    def local(self, step: Step, value: Tensors) -> Tensors:
        held = dict(zip(step.src.mesh.order, value, strict=True))
        nothing = torch.empty(0, device=_device(value))
        return tuple([local_step(step, r, held.get(r, nothing)) for r in step.dst.mesh.order])

    def all_gather(self, step: Step, value: Tensors) -> Tensors:
        collective = step.collective
        assert isinstance(collective, AllGather)
        counts = self._sizes(step, collective.axes)
        self.calls["all_gather"] += 1
        out = []
        for rank, ranks, members in self._cosets(step, collective.axes, value):
            self._count(rank, ranks, members)
            whole = tiling(step.dst.local_shape(rank), counts, collective.dims)
            out.append(join(torch.cat(members), whole))
        return tuple(out)

    def all_to_all(self, step: Step, value: Tensors) -> Tensors:
        collective = step.collective
        assert isinstance(collective, AllToAll)
        count = prod(self._sizes(step, collective.axes))
        self.calls["all_to_all"] += 1
        out = []
        for rank, ranks, members in self._cosets(step, collective.axes, value):
            place = ranks.index(rank)
            before = tiling(step.src.local_shape(rank), (count,), (collective.dst_dim,))
            parts = [split(m, before).chunk(count)[place] for m in members]
            self._count(rank, ranks, parts)
            after = tiling(step.dst.local_shape(rank), (count,), (collective.src_dim,))
            out.append(join(torch.cat(parts), after))
        return tuple(out)

    def all_reduce(self, step: Step, value: Tensors, owned: bool) -> Tensors:
        collective = step.collective
        assert isinstance(collective, AllReduce)
        self.calls["all_reduce"] += 1
        out = []
        for rank, ranks, members in self._cosets(step, collective.axes, value):
            count = len(ranks)
            self.received[rank] += members[0].nbytes * 2 * (count - 1) // count
            out.append(_reduced(members, collective.reduce_op))
        return tuple(out)

    def reduce_scatter(self, step: Step, value: Tensors) -> Tensors:
        collective = step.collective
        assert isinstance(collective, ReduceScatter)
        counts = self._sizes(step, collective.axes)
        self.calls["reduce_scatter"] += 1
        out = []
        for rank, ranks, members in self._cosets(step, collective.axes, value):
            place = ranks.index(rank)
            whole = tiling(step.src.local_shape(rank), counts, collective.dims)
            parts = [split(m, whole).chunk(prod(counts))[place] for m in members]
            self._count(rank, ranks, parts)
            out.append(_reduced(parts, collective.reduce_op))
        return tuple(out)

    def broadcast(self, step: Step, value: Tensors) -> Tensors:
        collective = step.collective
        assert isinstance(collective, Broadcast)
        self.calls["broadcast"] += 1
        for rank in step.dst.mesh.order:
            if rank != collective.root:
                self.received[rank] += value[0].nbytes
        return tuple([copied(value[0]) for _ in step.dst.mesh.order])

    def exchange(self, step: Step, value: Tensors) -> Tensors:
        return self.exchange_many([step], [value])[0]

    def exchange_many(self, steps: Sequence[Step], values: Sequence[Tensors]) -> list[Tensors]:
        self.calls["exchange"] += 1
        return [self._exchange(step, value) for step, value in zip(steps, values, strict=True)]

    def _exchange(self, step: Step, value: Tensors) -> Tensors:
        collective, src, dst = step.collective, step.src, step.dst
        assert isinstance(collective, Exchange)
        held = dict(zip(src.mesh.order, map(flat, value), strict=True))
        fresh = partial(empty, like=_device(value))
        results = {rank: fresh(dst, rank) for rank in dst.mesh.order}
        for i in range(collective.pieces):
            post: dict[int, dict[int, torch.Tensor]] = {rank: {} for rank in results}
            for rank, local in held.items():
                now = rounds(step, rank)[i]
                parts = cut(local, now.source)
                for parcel in now.sends:
                    part = packed(parcel.part, parts[parcel.index])
                    post[parcel.peer][rank] = part
                    self.received[parcel.peer] += part.nbytes
            for rank, out in results.items():
                now = rounds(step, rank)[i]
                assert {p.peer for p in now.recvs} == set(post[rank]), "both sides know the parcels"
                olds = cut(held[rank], now.source) if rank in held else []
                news = cut(flat(out), now.target)
                keep(now, olds, news)
                arrived = [post[rank][parcel.peer] for parcel in now.recvs]
                for parcel, part in zip(now.recvs, arrived, strict=True):
                    if parcel.in_place:
                        news[parcel.index][0].copy_(part)
                settle(now, collective.reduce_op, olds, news, arrived)
        if collective.reduce_op == "avg":
            for out in results.values():
                divide(out, talk(src, dst).terms)
        return tuple(results.values())

    def _sizes(self, step: Step, axes: Sequence[str]) -> tuple[int, ...]:
        return tuple([step.src.mesh.axis_size(axis) for axis in axes])

    def _cosets(self, step: Step, axes: tuple[str, ...], value: Tensors):
        """For each rank: itself, the ranks of its coset and what they hold."""
        mesh = step.src.mesh
        for rank in mesh.order:
            ranks = mesh.coset(axes, mesh.coord(rank) or ())
            yield rank, ranks, [value[mesh.position(r) or 0] for r in ranks]

    def _count(self, rank: int, ranks: Sequence[int], parts: Sequence[torch.Tensor]) -> None:
        self.received[rank] += sum(p.nbytes for r, p in zip(ranks, parts, strict=True) if r != rank)


def _reduced(terms: Sequence[torch.Tensor], reduce_op: ReduceOp) -> torch.Tensor:
    total = copied(terms[0])
    for term in terms[1:]:
        accumulate(reduce_op, total, term)
    if reduce_op == "avg":
        divide(total, len(terms))
    return total


def _device(value: object) -> torch.device:
    tensors = [t for t in value if isinstance(t, torch.Tensor)]  # type: ignore[attr-defined]
    return tensors[0].device if tensors else torch.device("cpu")
