"""`Values`: the values and lines of a program that is being assembled.

A value has versions: the layouts and dtypes that it has been moved or cast to.
"""

from __future__ import annotations

import attrs
import torch

from fdtensor.layouts.tensor_type import TensorType
from fdtensor.ops.graph import Call, Var
from fdtensor.ops.precision import CAST, HALVES, ROUNDED, has_pending_sum, wide_of, widened_type
from fdtensor.plans.collectives import Slice, Step
from fdtensor.plans.cost import CostModel, linked
from fdtensor.plans.planner import Plan, plan
from fdtensor.programs.as_if import dearer
from fdtensor.programs.eqn import Eqn
from fdtensor.programs.rounding import stages

__all__ = ["Values"]


class Values:
    """The types and lines so far, and every value in the versions that exist of it."""

    def __init__(self, cost: CostModel, reduce_dtype: torch.dtype | None) -> None:
        self.cost, self.reduce_dtype = cost, reduce_dtype
        self.types: list[TensorType] = []
        """By the index of the value."""
        self.eqns: list[Eqn] = []
        self.constants: list[tuple[Var, torch.Tensor]] = []
        self.makers: dict[Var, Call] = {}
        """The call of the whole graph for which a value is computed."""
        self.call: Call | None = None
        """The call of the whole graph whose lines are being added."""
        self.scale = 1.0
        """How many times larger new values are taken to be than they are, to price their moves."""
        self.scales: dict[Var, float] = {}
        """The same of each value; 1 where it is silent."""
        self._versions: dict[Var, dict[TensorType, Var]] = {}

    def new(self, type: TensorType) -> Var:
        """A value of this type, which is its only version."""
        v = self._numbered(type, self.scale)
        self._versions[v] = {type: v}
        return v

    def _numbered(self, type: TensorType, scale: float) -> Var:
        v = Var(len(self.types))
        self.types.append(type)
        if scale != 1.0:
            self.scales[v] = scale
        if self.call is not None:
            self.makers[v] = self.call
        return v

    def type_of(self, v: Var) -> TensorType:
        """The type of a value."""
        return self.types[v.index]

    def nbytes(self, v: Var) -> float:
        """The bytes that a value is taken to have, all of it."""
        return self.types[v.index].nbytes * self.scales.get(v, 1.0)

    def held(self, type: TensorType) -> TensorType:
        """The type in which a value of this type is held: of a wider dtype while it is a sum."""
        return widened_type(type, self.reduce_dtype)

    def moved(self, v: Var, type: TensorType, keep: bool = True) -> Var:
        """`v` with another layout, from the version of it that is the cheapest to move.

        Pending sums are held in the dtype that they are reduced in. Unless `keep`, new versions are
        forgotten, and made again for the next use.
        """
        wanted, versions = self.held(type), self._versions[v]
        if wanted in versions:
            return versions[wanted]
        scale = self.scales.get(v, 1.0)
        cost = self.cost if scale == 1.0 else dearer(linked(self.cost, type.mesh), scale)
        ways = [self._way(t, type, cost) for t in versions if not t.layout.overlaps]
        source, best = min(ways, key=_bytes_and_seconds)
        kept = versions if keep else {}
        moved = versions[source]
        for part in best:
            moved = self._cast(moved, part.src.dtype, kept)
            # along an axis of one rank there is nothing to do but to say so
            steps = part.steps or (Step(Slice((), ()), part.src, part.dst),)
            for step in steps if part.src is not part.dst else ():
                moved = self._step(step, moved, kept)
        return self._cast(moved, wanted.dtype, kept)

    def cast(self, v: Var, dtype: torch.dtype) -> Var:
        """`v` in another dtype."""
        return self._cast(v, dtype, self._versions[v])

    def wider(self, v: Var, dtype: torch.dtype) -> Var:
        """`v` in the dtype that is as wide as this one, if it is a half."""
        own = self.types[v.index].dtype
        return self.cast(v, wide_of(own, dtype)) if own in HALVES else v

    def _way(
        self, source: TensorType, to: TensorType, cost: CostModel
    ) -> tuple[TensorType, tuple[Plan, ...]]:
        """The plans from one version to another: pending sums are reduced in a wider dtype."""
        source_in = attrs.evolve(source, dtype=to.dtype)
        wide = self.held(source_in).dtype
        if wide is to.dtype:
            return source, (plan(source_in, to, cost=cost),)
        return source, stages(source_in, to, wide, cost)

    def _cast(self, v: Var, dtype: torch.dtype, versions: dict[TensorType, Var]) -> Var:
        type = attrs.evolve(self.types[v.index], dtype=dtype)
        if self.types[v.index] is type:
            return v
        if type not in versions:
            out = self._numbered(type, self.scales.get(v, 1.0))
            if dtype in HALVES and has_pending_sum(type.layout):
                self.eqns.append(Eqn(ROUNDED, (v, dtype), (), (out,)))
            else:
                self.eqns.append(Eqn(CAST, (v,), (("dtype", dtype),), (out,)))
            self._versions[out] = versions
            versions[type] = out
        return versions[type]

    def _step(self, step: Step, source: Var, versions: dict[TensorType, Var]) -> Var:
        out = self._numbered(step.dst, self.scales.get(source, 1.0))
        self.eqns.append(Eqn(step, (source,), (), (out,)))
        self._versions[out] = versions
        versions.setdefault(step.dst, out)
        return out


def _bytes_and_seconds(way: tuple[TensorType, tuple[Plan, ...]]) -> tuple[int, float]:
    """The key by which one of several ways to move a value is the cheapest."""
    _, parts = way
    return sum(part.total_bytes for part in parts), sum(part.seconds for part in parts)
