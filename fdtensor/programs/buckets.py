"""`Buckets`: how many bytes of tensors travel together, in one collective."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from fdtensor.layouts.tensor_type import TensorType
from fdtensor.ops.graph import Var
from fdtensor.plans.collectives import Bundle, Step
from fdtensor.plans.cost import CostModel, seconds
from fdtensor.programs.program import Eqn, Program

__all__ = ["BUCKET_BYTES", "Buckets", "kind_of", "reduces"]

BUCKET_BYTES = 1 << 20
"""The bytes per rank of tensors that may always travel together."""

STARTS = 6
"""How many times as long as its start a larger group may move."""

PARTS = 2
"""How many groups there are at least, if they are larger: one is computed while others move."""


@attrs.frozen
class Buckets:
    """The most bytes per rank of the tensors of one collective, by what may share it.

    They are what the cost model moves in `STARTS` times the start of a collective, but at most one
    of `PARTS` parts of all that is moved so, and at least `BUCKET_BYTES`.
    """

    limits: Mapping[Bundle, float]
    scales: Mapping[Var, float]
    """How many times the bytes that they have some values count for."""

    @classmethod
    def of(cls, program: Program, bucket_bytes: int | None = None) -> Buckets:
        """Those of a program; `bucket_bytes` where it is given."""
        buckets = cls({}, {} if program.origin is None else program.origin.scales)
        each: dict[Bundle, list[Eqn]] = {}
        for eqn in program.eqns:
            kind = kind_of(eqn)
            if kind is not None:
                each.setdefault(kind, []).append(eqn)
        limits: dict[Bundle, float] = dict.fromkeys(each, bucket_bytes or 0)
        if bucket_bytes is None:
            limits.update((kind, buckets.limit(some, program.cost)) for kind, some in each.items())
        return attrs.evolve(buckets, limits=limits)

    def limit(self, eqns: Sequence[Eqn], cost: CostModel) -> float:
        """The limit for lines of one kind, which are all that there are."""
        steps = [eqn.op for eqn in eqns if isinstance(eqn.op, Step)]
        kind = steps[0].collective.kind
        of_bytes_free = attrs.evolve(cost, copy=1e300, slowdown=[(kind, 0.0)])
        starting = sum(seconds(step, of_bytes_free) for step in steps)
        moving = sum(seconds(step, cost) for step in steps) - starting
        if moving <= 0.0:
            return BUCKET_BYTES
        size, start = sum(_size(_larger(step)) for step in steps), starting / len(steps)
        total = sum(map(self.before if reduces(eqns[0]) else self.after, eqns))
        return max(BUCKET_BYTES, min(STARTS * start / moving * size, total / PARTS))

    def before(self, eqn: Eqn) -> float:
        """The bytes of the operand of a move."""
        assert isinstance(eqn.op, Step)
        return _size(eqn.op.src) * self.scales.get(eqn.ins[0], 1.0)

    def after(self, eqn: Eqn) -> float:
        """The bytes of the result of a move."""
        assert isinstance(eqn.op, Step)
        return _size(eqn.op.dst) * self.scales.get(eqn.ins[0], 1.0)


def kind_of(eqn: Eqn) -> Bundle | None:
    """The key that lines share if they may travel together; None for a line that travels alone."""
    return eqn.op.collective.bundle(eqn.op) if isinstance(eqn.op, Step) else None


def reduces(eqn: Eqn) -> bool:
    """Whether a line adds up the blocks of ranks, or takes their largest."""
    return getattr(getattr(eqn.op, "collective", None), "reduce_op", None) is not None


def _larger(step: Step) -> TensorType:
    """The type of which the bytes of a group are counted."""
    return max(step.src, step.dst, key=_size)


def _size(type: TensorType) -> int:
    return type.local_nbytes(type.mesh.order[0])
