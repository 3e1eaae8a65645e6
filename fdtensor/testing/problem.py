"""`Problem`: what is wrong with a call in a setting, on simulated ranks or on real ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs
import torch

from fdtensor.layouts.mesh import Mesh
from fdtensor.runtime.simulator import SimulatedComm
from fdtensor.tensors.dtensor import DTensor
from fdtensor.testing.compare import Difference, Tolerance, difference
from fdtensor.testing.outcome import Claim, Outcome
from fdtensor.testing.setting import Setting
from fdtensor.testing.values import gather_full

if TYPE_CHECKING:
    from fdtensor.cluster import LocalCluster

__all__ = ["Judge", "Problem"]


@attrs.frozen(eq=False)
class Problem:
    """A difference, or an error that was raised."""

    found: Difference | Exception

    @property
    def kind(self) -> str:
        """What sort of problem it is: a difference, or the kind of error."""
        return "" if isinstance(self.found, Difference) else type(self.found).__name__

    def __str__(self) -> str:
        if isinstance(self.found, Difference):
            return str(self.found)
        first = str(self.found).partition("\n")[0]
        return f"raises {self.kind}" + (f": {first}" if first else "")


@attrs.define(eq=False)
class Judge:
    """Compares a call in any setting with the single process, whose results it keeps."""

    claim: Claim
    tolerance: Tolerance
    known: Outcome | None = None
    """What the claim's own tensors give."""

    def problem(self, setting: Setting) -> Problem | None:
        """What is wrong on simulated ranks, or None."""
        spread = setting.spread(self.claim.tensors)
        due = self._due(spread)
        try:
            found = self.claim.on(spread, self.claim.function())
        except Exception as error:
            return Problem(error)
        wrong = difference(self.claim, found, due, self.tolerance)
        return None if wrong is None else Problem(wrong)

    def problem_on(self, ranks: LocalCluster, setting: Setting) -> Problem | None:
        """What is wrong on real ranks, or None."""
        from fdtensor.cluster import WorkerError

        everyone = SimulatedComm(Mesh(world=ranks.n))
        spread = setting.spread(self.claim.tensors, everyone)
        due = self._due(spread)
        try:
            outcomes = ranks.run(_here, self.claim, spread)
        except WorkerError as error:
            return Problem(error)
        for found in outcomes:
            wrong = found and difference(self.claim, found, due, self.tolerance)
            if wrong:
                return Problem(wrong)
        return None

    def _due(self, spread: Sequence[DTensor[Any]]) -> Outcome:
        """What the plain function gives for the tensors that these blocks are.

        Floats that were split into terms are not quite those that they were split from.
        """
        own = self.claim.tensors
        meant = [
            gather_full(x.local, x.type) if x.layout.partial and not t.isnan().any() else t
            for x, t in zip(spread, own, strict=True)
        ]
        if not all(map(torch.equal, meant, own)) and not any(t.isnan().any() for t in own):
            return self.claim.plain(meant)
        if self.known is None:
            self.known = self.claim.plain(own)
        return self.known


def _here(claim: Claim, tensors: Sequence[DTensor[Any]]) -> Outcome | None:
    """The outcome on this rank of the mesh; nothing on others, where `shard_map` cannot run."""
    here = tensors[0]
    if here.mesh.position(here.comm.rank) is None:  # type: ignore[attr-defined]
        return None
    return claim.on(tensors, claim.function())
