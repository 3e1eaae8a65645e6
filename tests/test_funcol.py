"""The real mesh: gloo ranks give what the simulator gives, with the bytes and the peak announced.

Each call of the pool runs many examples. Values are small integers, so that every reduction is
exact in any order, and results are equal to the bit.
"""

import re
import time
import warnings

import attrs
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fdtensor import (
    GLOO,
    NCCL,
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    CommError,
    CostModel,
    Exchange,
    Layout,
    Mesh,
    Partial,
    Plan,
    PlanError,
    Ragged,
    ReduceScatter,
    Replicate,
    Shard,
    SimulatedComm,
    Step,
    StridedShard,
    TensorType,
    distribute,
    from_local,
    fuse,
    plan,
    run,
)
from fdtensor.collective import is_local
from fdtensor.dtypes import known, reducible
from fdtensor.funcol import FuncolComm
from fdtensor.interpreter import run_fused
from fdtensor.placement import REDUCE_OPS
from fdtensor.testing.strategies import redistributions
from fdtensor.testing.values import full_tensor, scatter
from fdtensor.transition import by_exchange
from fdtensor.wire import reduces_as

pytestmark = [
    pytest.mark.mesh,
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
]

R, S, P = Replicate(), Shard, Partial
LINE, SQUARE = Mesh(x=4), Mesh(x=2, y=2)

DTYPES = sorted(
    {d for d in vars(torch).values() if isinstance(d, torch.dtype) and known(d)}, key=str
)
STORED = ("plain", "strided", "reversed", "expanded", "offset")
"""How an input may lie in memory."""


@attrs.frozen
class Case:
    """A plan to run, the blocks it starts from, and how they lie in memory."""

    found: Plan
    blocks: tuple[torch.Tensor, ...]
    stored: str = "plain"


def case(found: Plan, seed: int = 0, stored: str = "plain") -> Case:
    """A case whose pending terms are split at random."""
    return Case(found, scatter(full_tensor(found.src, seed), found.src, seed), stored)


@st.composite
def cases(draw, world, dtype=None) -> Case:
    """Any redistribution, by any way to run it, from blocks that lie anyhow in memory."""
    src, dst = draw(redistributions(world, draw(st.booleans()), dtype=dtype))
    found = plan(src, dst, cost=draw(st.sampled_from((GLOO, NCCL))))
    way = draw(st.sampled_from((None, None, "peer_to_peer", "all_to_all")))
    if way:
        found = forced(found, way, draw(st.integers(1, 4)))
    return case(found, draw(st.integers(0, 99)), draw(st.sampled_from(STORED)))


def forced(found: Plan, way: str, pieces: int) -> Plan:
    """The same plan with every collective as an exchange of this way."""
    steps = [
        step if is_local(step) else by_exchange(step.src, step.dst, way, pieces)
        for step in found.steps
    ]
    return Plan(found.src, found.dst, tuple(steps), found.cost)


def alone(collective, src: TensorType, dst: Layout | TensorType) -> Plan:
    """A plan of one step."""
    dst = dst if isinstance(dst, TensorType) else src.with_layout(dst)
    return Plan(src, dst, (Step(collective, src, dst),), GLOO)


def tight(src: TensorType, dst: TensorType, cost: CostModel) -> Plan:
    """The plan that holds least."""
    try:
        return plan(src, dst, cost=cost, max_bytes=0)
    except PlanError as error:
        least = int(re.search(r"the least is (\d+)", str(error)).group(1))
        return plan(src, dst, cost=cost, max_bytes=least)


def lying(block: torch.Tensor, stored: str) -> torch.Tensor:
    """The same values, lying in memory as said."""
    match stored:
        case "plain":
            return block.clone()
        case "strided":
            wide = block.new_zeros([2 * n for n in block.shape])
            wide[tuple([slice(None, None, 2)] * block.dim())] = block
            return wide[tuple([slice(None, None, 2)] * block.dim())]
        case "reversed":
            dims = tuple(reversed(range(block.dim())))
            return block.permute(dims).contiguous().permute(dims)
        case "expanded":  # only what is the same everywhere can be
            first = block[:1]if block.dim() else block
            same = block.dim() and len(block) and bits(block) == bits(first.expand(block.shape))
            return first.clone().expand(block.shape) if same else block.clone()
        case "offset":
            wide = torch.cat([block.new_zeros(3), block.reshape(-1)])
            return wide[3:].view(block.shape)
    raise AssertionError(stored)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
