"""From one type to another: the collectives that take a tensor there, as a value.

It imports from `layouts`. It offers the table of collectives, `plan` with its lower bound,
bytes, peak and seconds, `transition` for one axis, and `fuse` for plans that travel together.
A plan holds no tensor: a collective says what it does to blocks, `runtime` runs it on them.
"""

from __future__ import annotations

from fdtensor.plans.collectives import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Collective,
    Exchange,
    Mask,
    Pad,
    ReduceExchange,
    ReduceScatter,
    Scale,
    Slice,
    Step,
)
from fdtensor.plans.fused import Fused, fuse
from fdtensor.plans.planner import Plan, plan
from fdtensor.plans.text import exact_bytes
from fdtensor.plans.transitions import transition

__all__ = [
    "AllGather",
    "AllReduce",
    "AllToAll",
    "Broadcast",
    "Collective",
    "Exchange",
    "Fused",
    "Mask",
    "Pad",
    "Plan",
    "ReduceExchange",
    "ReduceScatter",
    "Scale",
    "Slice",
    "Step",
    "exact_bytes",
    "fuse",
    "plan",
    "transition",
]
