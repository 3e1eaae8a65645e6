"""The seconds of plans and programs: models of accelerators and links, and how to measure others.

comm = fd.connect(mesh, cost=fd.cost.GLOO)
fd.cost.estimate(plan, fd.cost.calibrate(comm))
"""

from __future__ import annotations

from fdtensor.inspect.calibrate import calibrate, estimate
from fdtensor.plans.cost import (
    A100,
    ETHERNET,
    GLOO,
    H100,
    H200,
    INFINIBAND,
    NCCL,
    NVLINK,
    TPU_V5P,
    CostModel,
    Link,
)
from fdtensor.programs.timeline import Timed, Timeline, timeline

__all__ = [
    "A100",
    "CostModel",
    "ETHERNET",
    "GLOO",
    "H100",
    "H200",
    "INFINIBAND",
    "Link",
    "NCCL",
    "NVLINK",
    "TPU_V5P",
    "Timed",
    "Timeline",
    "calibrate",
    "estimate",
    "timeline",
]
