"""What a look at indices costs: ops with and without `check_indices`, beside plain torch.

One rank of a pretended world of 4: rows of indices are sharded, what they look up is whole or cut.
The collectives of a call are counted; here they are free.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import attrs
import torch
import torch.nn.functional as F

from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.plans.cost import NCCL
from fdtensor.runtime.funcol import FuncolComm
from fdtensor.tensors.call import call
from fdtensor.tensors.connect import from_local
from tests.bench.timing import Counted, interleaved, ratio

__all__ = ["LOOKUPS", "CheckTimes", "Lookup", "check_times"]

MESH = Mesh(tp=4)

CLASSES, WIDTH, ROWS = 1024, 64, 512
"""Of what is looked up; indices in a block."""


@attrs.frozen
class Lookup:
    """A function of a table and indices; the table is whole, or cut in dim 0."""

    name: str
    fn: Callable[..., Any]
    cut: bool = False
    wide: bool = False
    """Whether there is an index for each element of a row."""


def _embedding(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return F.embedding(index, table)


def _entropy(scores: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(scores[index], index)


LOOKUPS = (
    Lookup("embedding", _embedding),
    Lookup("embedding, rows cut", _embedding, cut=True),
    Lookup("gather", lambda table, index: table.gather(0, index), wide=True),
    Lookup("rows and cross_entropy", _entropy),
)


@attrs.frozen
class CheckTimes:
    """Microseconds of a lookup, medians, and its collectives without checks and with them."""

    op: str
    plain: float
    unchecked: float
    checked: float
    ratio: float
    """Checked to unchecked, the median of rounds."""
    collectives: tuple[int, int]


def check_times(lookup: Lookup, rounds: int, count: int) -> CheckTimes:
    """A lookup on one rank of a pretended world of 4; `count` calls a loop."""
    comm = FuncolComm(MESH, cost=NCCL)
    rows = (ROWS, WIDTH) if lookup.wide else (ROWS,)
    table = TensorType((CLASSES, WIDTH), torch.float32, MESH.layout("tp" if lookup.cut else None))
    index = TensorType((4 * ROWS, *rows[1:]), torch.int64, MESH.layout("tp"))
    blocks = torch.randn(table.local_shape(comm.rank)), torch.randint(WIDTH, rows)
    args = [from_local(block, t, comm) for block, t in zip(blocks, (table, index))]
    plain = torch.randn(CLASSES, WIDTH), blocks[1]
    calls: dict[str, Callable[[], Any]] = {
        "plain": lambda: lookup.fn(*plain),
        "unchecked": lambda: call(lookup.fn, *args, check_indices=False),
        "checked": lambda: call(lookup.fn, *args, check_indices=True),
    }
    for one in calls.values():
        one()
    before, after = (Counted.during(calls[name])[1] for name in ("unchecked", "checked"))
    taken = interleaved(calls, rounds, count)
    slower = ratio(taken["checked"], taken["unchecked"])
    alone, unchecked, checked = (median(taken[name]) for name in calls)
    return CheckTimes(lookup.name, alone, unchecked, checked, slower, (before, after))
