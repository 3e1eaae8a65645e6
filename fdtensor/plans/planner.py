"""`plan`: the steps from one type to another that receive the fewest bytes, as a value."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

import attrs

from fdtensor.layouts.display import display
from fdtensor.layouts.dtypes import dtype_name
from fdtensor.layouts.errors import FdtensorError, PlanError
from fdtensor.layouts.json_fields import Malformed, parsed, shown
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.opaque import opaque
from fdtensor.layouts.record import Record
from fdtensor.layouts.remembered import remembered
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.plans.arguments import check_ends, check_prices
from fdtensor.plans.bound import least_total, lower_bound
from fdtensor.plans.budget import some_ranks, within
from fdtensor.plans.check import check_steps
from fdtensor.plans.collectives import Step, is_local
from fdtensor.plans.cost import NCCL, CostModel, seconds
from fdtensor.plans.json import decode, encode
from fdtensor.plans.memory import peak_at
from fdtensor.plans.search import by_owners, candidates
from fdtensor.plans.text import as_text
from fdtensor.plans.traffic import (
    all_received,
    most_received,
    most_sent,
    received_at,
    sent_at,
)

__all__ = ["Plan", "by_layouts", "plan"]


@attrs.frozen(eq=False, repr=False)
class Plan(Record):
    """The steps that take a tensor of type `src` to type `dst`.

    Bytes are per rank. `received_bytes` and `sent_bytes` are those of the busiest rank,
    `peak_bytes` is the most that any rank holds at once, source and destination included.

    >>> mesh = Mesh(dp=2, tp=4)
    >>> src = TensorType((8, 16), torch.float32, mesh.layout("dp", partial={"tp": "sum"}))
    >>> p = plan(src, mesh.layout(None, "tp"))
    >>> print(p)
    f32[8@dp,16]{sum:tp} -> f32[8,16@tp] on Mesh(dp=2, tp=4)
      reduce_scatter[axis=tp dim=1 reduce_op=sum]  f32[8@dp,16@tp]  192 B
      all_gather[axis=dp dim=0]                    f32[8,16@tp]      64 B
    2 steps, 256 B received per rank
    >>> p.received_bytes, p.lower_bound_bytes
    (256, 256)
    >>> Plan.from_json(p.to_json()) == p
    True
    """

    src: TensorType
    dst: TensorType
    steps: tuple[Step, ...]
    cost: CostModel

    @property
    def received_bytes(self) -> int:
        """The bytes that the busiest rank receives."""
        return _received(self)

    @property
    def total_bytes(self) -> int:
        """The bytes that all ranks receive together."""
        return all_received(self.steps)

    @property
    def sent_bytes(self) -> int:
        """The bytes that the rank that sends most sends."""
        return _sent(self)

    def received_bytes_at(self, rank: int) -> int:
        """The bytes that `rank` receives."""
        return sum(received_at(step, rank) for step in self.steps)

    def sent_bytes_at(self, rank: int) -> int:
        """The bytes that `rank` sends."""
        return sum(sent_at(step, rank) for step in self.steps)

    @property
    def lower_bound_bytes(self) -> int:
        """The bytes that no plan can be below: see `fdtensor.plans.bound.lower_bound`."""
        return lower_bound(self.src, self.dst)

    @property
    def least_total_bytes(self) -> int:
        """The fewest bytes that all ranks together receive if an element's terms meet at a rank."""
        return least_total(self.src, self.dst)

    @property
    def peak_bytes(self) -> int:
        """The most bytes that any rank holds at once: the caller's input, the output, buffers."""
        return _peak(self)

    def peak_bytes_at(self, rank: int) -> int:
        """The most bytes that `rank` holds at once."""
        if not self.steps:  # what does not move is still copied
            inside = self.src.mesh.position(rank) is not None
            return 2 * self.src.local_nbytes(rank) if inside else 0
        return peak_at(self.steps, rank)

    @property
    def seconds(self) -> float:
        """The seconds that the cost model gives."""
        return sum(seconds(step, self.cost) for step in self.steps)

    @property
    def is_local(self) -> bool:
        """Whether nothing is sent."""
        return all(is_local(step) for step in self.steps)

    @property
    def digest(self) -> str:
        """A hexadecimal fingerprint: equal plans have the same one on every rank and machine."""
        return _digest(self)

    def transpose(self) -> Plan:
        """The plan of the backward: cotangents of `dst` to cotangents of `src`.

        Raises `PlanError` for a plan that is not linear: with max, min, product or bits pending.
        """
        for op in (*self.src.layout.partial.values(), *self.dst.layout.partial.values()):
            if op not in ("sum", "avg"):
                raise PlanError(
                    f"a plan with {op} pending is not linear, so it has no transpose.",
                    src=self.src,
                    dst=self.dst,
                    hint="Differentiate through sum or avg, or detach the tensor first.",
                )
        return plan(self.dst.cotangent(), self.src.cotangent(), cost=self.cost)

    def verify(self) -> None:
        """Raises `PlanError` where the steps do not take `src` to `dst`.

        Each step must start where the one before it ends, and its collective be the one that its
        types ask for. It takes time for each step, not for each rank or element.
        """
        check_steps(self.src, self.dst, self.steps, self.cost)

    def to_json(self) -> str:
        """The plan as JSON text; `Plan.from_json` gives the same plan back."""
        return json.dumps(encode(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that `to_json` wrote, verified; raises `PlanError` for every other text.

        The text may come from anyone: nothing in it is run or imported, and it is not read where it
        has more than 2**25 characters.
        """
        try:
            p = cls(*decode(parsed(text)))
        except (Malformed, FdtensorError) as error:
            raise PlanError(
                f"this text is not a plan: {str(error).splitlines()[0].removesuffix('.')}.",
                text=shown(text),
                hint="Give what Plan.to_json returned.",
            ) from error
        p.verify()
        return p

    def __str__(self) -> str:
        return as_text(self)

    def __repr__(self) -> str:
        return f"Plan.from_json({self.to_json()!r})"

    def _repr_html_(self) -> str:
        return display("html", self)


@opaque
def plan(
    src: TensorType,
    dst: TensorType | Layout,
    *,
    cost: CostModel | None = None,
    max_bytes: int | None = None,
) -> Plan:
    """The plan that receives the fewest bytes from `src` to `dst`, on the same mesh or another.

    Among plans with the same bytes, the one that takes the least time by `cost` (by default that
    of NCCL, where named collectives are best). All ranks together receive `least_total_bytes`,
    unless pending terms are reduced where bytes are not all that counts: in a 0-d tensor, where
    more than 64 ranks talk, on a mesh of more than 1024, and where sums become averages beside new
    terms. Then terms meet at owners of a layout, without ranks that neither type uses.
    `max_bytes` bounds what any rank holds at once, its source and destination block counted:
    messages are then cut into pieces as needed, of steps from layout to layout.
    Raises `PlanError` where shape or dtype differ, or where `max_bytes` is too little.

    >>> mesh = Mesh(x=2)
    >>> print(plan(TensorType((4, 6), torch.float32, mesh.layout("x")), mesh.layout(None, "x")))
    f32[4@x,6] -> f32[4,6@x] on Mesh(x=2)
      all_to_all[axis=x dim=0->1]  f32[4,6@x]  24 B
    1 step, 24 B received per rank
    """
    try:
        return _plan(src, dst, cost or NCCL, max_bytes)
    except TypeError:  # what cannot be hashed, a list of placements say, is no type
        check_ends(src, dst)
        check_prices(cost, max_bytes)
        raise


@remembered(65536)
def _plan(src: object, dst: object, cost: CostModel, max_bytes: int | None) -> Plan:
    check_ends(src, dst)
    assert isinstance(src, TensorType)
    assert isinstance(dst, (TensorType, Layout))
    check_prices(cost, max_bytes)
    if isinstance(dst, Layout):
        dst = src.with_layout(dst)
    if src.shape != dst.shape or src.dtype != dst.dtype:
        raise PlanError(
            f"a plan moves a tensor, it does not change it from {dtype_name(src.dtype)}"
            f"{list(src.shape)} to {dtype_name(dst.dtype)}{list(dst.shape)}.",
            src=src,
            dst=dst,
            hint="Give both types the same shape and dtype.",
        )
    if src.layout.overlaps:
        raise PlanError(
            "nothing moves away from blocks that overlap.",
            src=src,
            dst=dst,
            hint="Spans are what a line of a program reads: move what they were made from.",
        )
    plain = by_layouts(src, dst, cost)
    best = _by_owners(plain) or plain
    if max_bytes is None or best.peak_bytes <= max_bytes:
        return best
    return within(plain, max_bytes, other=best.peak_bytes)


def _by_owners(plain: Plan) -> Plan | None:
    """The plan by owners of no layout, where that receives less; a number may not take longer."""
    if not (plain.src.layout.partial or plain.dst.layout.partial):
        return None  # each rank receives what it lacks
    if plain.total_bytes in (0, plain.least_total_bytes):
        return None
    steps = by_owners(plain.src, plain.dst)
    other = None if steps is None else Plan(plain.src, plain.dst, steps, plain.cost)
    if other is None or other.total_bytes >= plain.total_bytes:
        return None
    return other if plain.src.shape or other.seconds <= plain.seconds else None


def by_layouts(src: TensorType, dst: TensorType, cost: CostModel) -> Plan:
    """The best plan in which terms are reduced by the ranks that hold a block of some layout."""
    return _best([Plan(src, dst, steps, cost) for steps in candidates(src, dst, cost)])


def _best(plans: Sequence[Plan]) -> Plan:
    if len(plans) == 1:
        return plans[0]
    return min(plans, key=lambda p: (p.total_bytes, p.seconds, len(p.steps)))


@remembered(4096)
def _peak(p: Plan) -> int:
    meshes = {p.src.mesh: None, p.dst.mesh: None}
    ranks = {rank for mesh in meshes for rank in some_ranks(mesh)}
    return max(p.peak_bytes_at(rank) for rank in ranks)


@remembered(4096)
def _received(p: Plan) -> int:
    return most_received(p.steps)


@remembered(4096)
def _sent(p: Plan) -> int:
    return most_sent(p.steps)


@remembered(4096)
def _digest(p: Plan) -> str:
    return hashlib.sha256(p.to_json().encode()).hexdigest()[:32]
