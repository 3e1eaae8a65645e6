"""`Fused`: the plans of many tensors, run together: one message a pair of ranks for all of them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import attrs

from fdtensor.layouts.expected import no_argument
from fdtensor.layouts.kinds import is_iterable
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.placement import Placement, Ragged, Shard, StridedShard
from fdtensor.layouts.record import Record
from fdtensor.layouts.remembered import remembered
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.plans.collectives import AllReduce, ReduceExchange, Step, by_exchange, is_local
from fdtensor.plans.movement import movement
from fdtensor.plans.owners import owners
from fdtensor.plans.planner import Plan, by_layouts, plan

__all__ = ["Fused", "batched", "fuse"]


@attrs.frozen(eq=False, repr=False)
class Fused(Record):
    """Plans made of exchanges and local steps only; their exchanges meet in at most two rounds.

    Fewer rounds are worth more bytes: where a plan alone has a `ReduceExchange`, terms meet at the
    owners that a layout can name, so that a few more of them may travel.

    >>> mesh = Mesh(x=2)
    >>> a, b = (TensorType((n, 6), torch.float32, mesh.layout("x")) for n in (4, 5))
    >>> fused = fd.plans.fuse([plan(t, mesh.layout()) for t in (a, b)])
    >>> fused.received_bytes, len(fused.plans)
    (120, 2)
    """

    plans: tuple[Plan, ...]

    @property
    def rounds(self) -> int:
        """How many exchanges it takes, for all tensors together."""
        return max((sum(not is_local(s) for s in p.steps) for p in self.plans), default=0)

    @property
    def received_bytes(self) -> int:
        """The bytes that a rank receives, at most: the sum over the plans of their busiest."""
        return sum(p.received_bytes for p in self.plans)

    @property
    def digest(self) -> str:
        """A hexadecimal fingerprint, the same on every rank and machine."""
        return _digest(self)

    def transpose(self) -> Fused:
        """The plan of the backward; raises `PlanError` where one plan is not linear."""
        return fuse([p.transpose() for p in self.plans])

    def __repr__(self) -> str:
        return f"Fused({self.plans!r})"

    def __str__(self) -> str:
        head = f"{_count(len(self.plans), 'plan')} in {_count(self.rounds, 'round')}"
        return "\n".join([head, *(str(p) for p in self.plans)])


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def fuse(plans: Sequence[Plan]) -> Fused:
    """The plans as one.

    >>> mesh = Mesh(x=2)
    >>> a, b = (TensorType((n, 6), torch.float32, mesh.layout("x")) for n in (4, 5))
    >>> print(fd.plans.fuse([plan(a, mesh.layout()), plan(b, mesh.layout(None, "x"))]))
    2 plans in 1 round
    f32[4@x,6] -> f32[4,6] on Mesh(x=2)
      exchange[axis=x way=all_to_all]  f32[4,6]  48 B
    1 step, 48 B received per rank
    f32[5@x,6] -> f32[5,6@x] on Mesh(x=2)
      exchange[axis=x way=all_to_all]  f32[5,6@x]  36 B
    1 step, 36 B received per rank
    """
    try:
        return Fused(tuple([_exchanged(p) for p in plans]))
    except (TypeError, AttributeError):  # asked here, it costs those nothing that give plans
        if is_iterable(plans) and all(isinstance(p, Plan) for p in plans):
            raise
        raise no_argument("plans", plans, "list of plans", "Write fuse([plan(a, b)]).") from None


@remembered(16384)
def _exchanged(whole: Plan) -> Plan:
    """The same movement by at most two exchanges, and local steps."""
    if any(isinstance(step.collective, ReduceExchange) for step in whole.steps):
        whole = by_layouts(whole.src, whole.dst, whole.cost)
    steps: list[Step] = []
    todo = list(whole.steps)
    while todo:
        step = todo.pop(0)
        if is_local(step):
            steps.append(step)
            continue
        src, dst = step.src, step.dst
        if isinstance(step.collective, AllReduce) and src.shape:
            owned = owners(movement(src, dst))
            while not all(map(is_local, todo)):  # the owners send where the reduced blocks would go
                dst = todo.pop(0).dst
            steps.append(by_exchange(src, owned, "all_to_all"))
            src = owned
        if src is not dst:
            steps.append(by_exchange(src, dst, "all_to_all"))
    return Plan(whole.src, whole.dst, tuple(steps), whole.cost)


@remembered(1024)
def _digest(fused: Fused) -> str:
    text = "".join(p.digest for p in fused.plans)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@remembered(4096)
def batched(one: Plan, size: int) -> Plan:
    """The same plan for `size` tensors stacked along a new first dim."""
    return plan(_batched(one.src, size), _batched(one.dst, size), cost=one.cost)


def _batched(type: TensorType, size: int) -> TensorType:
    placements: list[Placement] = []
    for placement in type.layout.placements:
        match placement:
            case Shard(dim):
                placement = Shard(dim + 1)
            case StridedShard(dim, factor):
                placement = StridedShard(dim + 1, factor)
            case Ragged(dim, sizes):
                placement = Ragged(dim + 1, sizes)
            case _:
                pass
        placements.append(placement)
    order = {dim + 1: axes for dim, axes in type.layout.order}
    layout = Layout(type.mesh, placements, order)
    return TensorType((size, *type.shape), type.dtype, layout)
