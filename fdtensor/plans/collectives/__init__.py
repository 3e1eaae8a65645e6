"""The closed set of operations that a plan is made of: a file each, and `Step` between two types.

`[A] [B]` are blocks on two ranks, `+[A]` is a pending term, `0` an identity element.

    Slice           [A B] [A B]       ->  [A] [B]           local
    Mask            [A] [A]           ->  +[A] +[0]         local
    Pad             [A] [B]           ->  +[A 0] +[0 B]     local
    Scale           +[A] +[B]         ->  +[2A] +[2B]       local: a sum becomes an average
    AllGather       [A] [B]           ->  [A B] [A B]
    AllToAll        [A B] [C D]       ->  [A / C] [B / D]
    AllReduce       +[A] +[B]         ->  [A+B] [A+B]
    ReduceScatter   +[A B] +[C D]     ->  [A+C] [B+D]
    Broadcast       [A] .             ->  [A] [A]
    Exchange        any blocks        ->  any blocks        each piece comes from one holder,
                                                            pending terms go to one owner
    ReduceExchange  any terms         ->  any blocks        terms go to one owner, and on from it

Each file says between which placements its collective goes, how it prints, what it receives, holds
and copies, what it does to the blocks of all ranks and how one rank runs it. Planner, cost model,
simulator, process groups and exported programs ask it; `ALL` lists them.
"""

from __future__ import annotations

from fdtensor.plans.collectives.all_gather import AllGather
from fdtensor.plans.collectives.all_reduce import AllReduce
from fdtensor.plans.collectives.all_to_all import AllToAll
from fdtensor.plans.collectives.base import Bundle, Change, Collective, Step, World
from fdtensor.plans.collectives.broadcast import Broadcast
from fdtensor.plans.collectives.exchange import Exchange, Way, by_exchange
from fdtensor.plans.collectives.local import is_local, local_step
from fdtensor.plans.collectives.mask import Mask
from fdtensor.plans.collectives.pad import Pad
from fdtensor.plans.collectives.reduce_exchange import ReduceExchange, by_meetings
from fdtensor.plans.collectives.reduce_scatter import ReduceScatter
from fdtensor.plans.collectives.scale import Scale, scalable
from fdtensor.plans.collectives.slice import Slice

__all__ = [
    "ALL",
    "AllGather",
    "AllReduce",
    "AllToAll",
    "Broadcast",
    "Bundle",
    "Change",
    "Collective",
    "Exchange",
    "Mask",
    "Pad",
    "ReduceExchange",
    "ReduceScatter",
    "Scale",
    "Slice",
    "Step",
    "Way",
    "World",
    "by_exchange",
    "by_meetings",
    "is_local",
    "local_step",
    "scalable",
]

ALL: tuple[type[Collective], ...] = (
    Slice,
    Mask,
    Pad,
    Scale,
    AllGather,
    AllToAll,
    AllReduce,
    ReduceScatter,
    Broadcast,
    Exchange,
    ReduceExchange,
)
