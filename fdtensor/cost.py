"""The seconds of plans and programs: the models of two backends, and how to measure another.

comm = fd.connect(mesh, cost=fd.cost.GLOO)
fd.cost.estimate(plan, fd.cost.calibrate(comm))
"""

from __future__ import annotations

from fdtensor.inspect.calibrate import calibrate, estimate
from fdtensor.plans.cost import GLOO, NCCL, CostModel

__all__ = ["CostModel", "GLOO", "NCCL", "calibrate", "estimate"]
