"""`Checker`: compares a call under certain layouts with a single process; `CaseFailure`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs
import torch

from fdtensor.layouts.mesh import Mesh
from fdtensor.runtime.simulator import SimulatedComm
from fdtensor.tensors.dtensor import DTensor
from fdtensor.testing.case import Case, Outcome
from fdtensor.testing.compare import Difference, Tolerance, difference
from fdtensor.testing.layout_case import LayoutCase
from fdtensor.testing.values import gather_full

if TYPE_CHECKING:
    from fdtensor.cluster import LocalCluster

__all__ = ["Checker", "CaseFailure"]


@attrs.frozen(eq=False)
class CaseFailure:
    """A difference, or an error that was raised."""

    cause: Difference | Exception

    @property
    def kind(self) -> str:
        """The kind of problem: a difference, or the kind of error."""
        return "" if isinstance(self.cause, Difference) else type(self.cause).__name__

    def __str__(self) -> str:
        if isinstance(self.cause, Difference):
            return str(self.cause)
        first = str(self.cause).partition("\n")[0]
        return f"raises {self.kind}" + (f": {first}" if first else "")


@attrs.define(eq=False)
class Checker:
    """Compares a call in any setting with the single process, whose results it keeps."""

    case: Case
    tolerance: Tolerance
    known: Outcome | None = None
    """The outcome of the case's own tensors."""

    def problem(self, setting: LayoutCase) -> CaseFailure | None:
        """The problem on simulated ranks, or None."""
        spread = setting.spread(self.case.tensors)
        expected = self._due(spread)
        try:
            actual = self.case.on(spread, self.case.function())
        except Exception as error:
            return CaseFailure(error)
        wrong = difference(self.case, actual, expected, self.tolerance)
        return None if wrong is None else CaseFailure(wrong)

    def problem_on(self, ranks: LocalCluster, setting: LayoutCase) -> CaseFailure | None:
        """The problem on real ranks, or None."""
        from fdtensor.cluster import WorkerError

        everyone = SimulatedComm(Mesh(world=ranks.n))
        spread = setting.spread(self.case.tensors, everyone)
        expected = self._due(spread)
        try:
            outcomes = ranks.run(_here, self.case, spread)
        except WorkerError as error:
            return CaseFailure(error)
        for actual in outcomes:
            wrong = actual and difference(self.case, actual, expected, self.tolerance)
            if wrong:
                return CaseFailure(wrong)
        return None

    def _due(self, spread: Sequence[DTensor[Any]]) -> Outcome:
        """The outcome of the plain function for the tensors of these blocks.

        Floats that were split into terms are not quite those that they were split from.
        """
        own = self.case.tensors
        meant = [
            gather_full(x.local, x.type) if x.layout.partial and not t.isnan().any() else t
            for x, t in zip(spread, own, strict=True)
        ]
        if not all(map(torch.equal, meant, own)) and not any(t.isnan().any() for t in own):
            return self.case.plain(meant)
        if self.known is None:
            self.known = self.case.plain(own)
        return self.known


def _here(case: Case, tensors: Sequence[DTensor[Any]]) -> Outcome | None:
    """The outcome on this rank of the mesh; nothing on others, where `shard_map` cannot run."""
    first = tensors[0]
    if first.mesh.position(first.comm.rank) is None:  # type: ignore[attr-defined]
        return None
    return case.on(tensors, case.function())
