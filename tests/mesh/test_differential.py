"""Redistribution beside that of torch.distributed.tensor: the same local block on every rank.

Every pair of placements that torch has, on meshes without flattened dims. Pending terms are split
at random, and all values are small integers, so that results are equal to the bit.
"""

import itertools
import logging

import pytest
import torch
import torch.distributed as dist

from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import Partial, Replicate, Shard
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.plans.planner import plan
from fdtensor.testing.values import block, full_tensor, scatter

pytestmark = pytest.mark.mesh

SOURCES = (Replicate(), Shard(0), Shard(1), Partial("sum"), Partial("avg"), Partial("max"))
TARGETS = SOURCES[:3]


def pairs(mesh):
    """Every source layout of the mesh, each with the layouts that torch can take it to.

    torch keeps pending terms where they are, but makes none.
    """
    for source in itertools.product(SOURCES, repeat=mesh.ndim):
        if len({placement for placement in source if isinstance(placement, Partial)}) > 1:
            continue
        kept = [(p,) if isinstance(p, Partial) else () for p in source]
        for target in itertools.product(*[(*TARGETS, *keep) for keep in kept]):
            yield Layout(mesh, source), Layout(mesh, target)


def mistakes(sizes, shape, dtype):
    """How many pairs there are, and on this rank each whose block differs from that of torch."""
    from torch.distributed.tensor import DTensor as TorchDTensor

    from fdtensor.io.interop import layout_to_torch, to_device_mesh
    from fdtensor.runtime.funcol import FuncolComm
    from fdtensor.runtime.interpreter import run

    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    mesh = Mesh(**sizes)
    comm, device_mesh, rank = FuncolComm(mesh), to_device_mesh(mesh), dist.get_rank()
    wrong, count = [], 0
    for source, target in pairs(mesh):
        src = TensorType(shape, dtype, source)
        dst = src.with_layout(target)
        full = full_tensor(src, seed=count)
        local = scatter(full, src, seed=count)[mesh.position(rank)]
        count += 1
        theirs = TorchDTensor.from_local(
            local, device_mesh, layout_to_torch(src)[0], shape=full.shape, stride=full.stride()
        )
        theirs = theirs.redistribute(placements=layout_to_torch(dst)[0]).to_local()
        ours = run(plan(src, dst, cost=comm.cost), local, comm)
        same = ours.shape == theirs.shape and ours.dtype == theirs.dtype
        if not target.partial:
            same = same and torch.equal(ours, block(full, dst, rank))
            same = same and torch.equal(ours, theirs)
        elif same:  # terms may be split otherwise, as long as they reduce to the same
            same = torch.equal(*[reduced(term, target, device_mesh) for term in (ours, theirs)])
        if not same:
            wrong.append(f"{src} -> {dst}: {ours.tolist()}, torch has {theirs.tolist()}")
    return count, wrong


def reduced(term, layout, device_mesh):
    """The terms of all ranks along the pending axes, reduced by torch; averages stay sums."""
    total = term.clone(memory_format=torch.contiguous_format)
    for axis, op in layout.partial.items():
        how = dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM
        dist.all_reduce(total, how, device_mesh.get_group(axis))
    return total


@pytest.mark.parametrize("shape", [(8, 8), (7, 5)], ids=str)
@pytest.mark.parametrize("sizes", [{"x": 4}, {"x": 2, "y": 2}], ids=str)
def test_every_pair_of_placements_gives_the_blocks_of_torch(pool4, sizes, shape):
    for count, wrong in pool4.run(mistakes, sizes, shape, torch.float64):
        assert count == {1: 21, 2: 345}[len(sizes)]
        assert wrong == []
