"""The verbs on distributed values: `connect` and `redistribute`, beside `distribute`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch

from fdtensor.layouts.errors import FdtensorError, ValueTreeError
from fdtensor.layouts.expected import no_layout
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.opaque import opaque
from fdtensor.layouts.prefixes import layout_of_each, whole_without_dims
from fdtensor.layouts.signatures import named_arguments
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.layouts.tree import flatten, paths, unflatten
from fdtensor.ops.transparent import recording
from fdtensor.plans.cost import NCCL, CostModel
from fdtensor.plans.fused import fuse
from fdtensor.plans.planner import Plan, plan
from fdtensor.runtime.comm import Check, Comm
from fdtensor.runtime.interpreter import run, run_fused
from fdtensor.runtime.process_groups import SECONDS
from fdtensor.runtime.simulator import SimulatedComm
from fdtensor.tensors.distribution import distribute, from_local, shards
from fdtensor.tensors.dtensor import DTensor, due, is_dtensor

__all__ = ["connect", "distribute", "from_local", "redistribute", "shards"]

Tree = TypeVar("Tree")

FUSED_BYTES = 4 << 20
"""Tensors whose blocks are larger travel by themselves: there, packing costs more than it saves."""


@opaque
@named_arguments
def connect(
    mesh: Mesh,
    device: str | torch.device | None = None,
    *,
    check: Check = "first",
    cost: CostModel = NCCL,
    timeout: float = SECONDS,
) -> Comm[Any]:
    """The Comm of a mesh: real where a process group is up, else simulated.

    Under torchrun a process group is brought up from the environment: NCCL where there is CUDA,
    gloo else. `device` is by default the one that the backend serves. `cost` prices plans and
    programs: what runs is the same on real and on simulated ranks unless it differs. On gloo `GLOO`
    is the faster one, and `calibrate` measures another.

    `timeout` is how many seconds ranks wait for each other. What one of them raises, or a call that
    it does not make, is one `CommError` on all of them, at once or within that time. A rank that
    chooses the layouts of a program longer than others is waited for as long as it does.

    >>> connect(Mesh(x=2))
    SimulatedComm(Mesh(x=2))
    """
    from fdtensor.runtime.funcol import FuncolComm
    from fdtensor.runtime.process_groups import default_device, up

    if not up(timeout):
        return SimulatedComm(mesh, check=check, cost=cost)
    return FuncolComm(mesh, device or default_device(), check=check, cost=cost, timeout=timeout)


@named_arguments
def redistribute(tree: Tree, layouts: Any, *, max_bytes: int | None = None) -> Tree:
    """A DTensor, or a pytree of them, under other layouts. Differentiable.

    `layouts` is one layout for all, or a pytree of layouts that has the structure of `tree` or of
    a prefix of it; tensors without dims stay whole under one for many. The traffic of small tensors
    is fused: one message a pair of ranks, in at most two rounds. Leaves that are not DTensors come
    back as they are. `max_bytes` is for each tensor. Raises `ValueTreeError`, which names every
    leaf that has no plan, before anything is sent.

    >>> mesh = Mesh(x=2)
    >>> comm = SimulatedComm(mesh)
    >>> tree = {"a": distribute(torch.arange(4), mesh.layout("x"), comm), "b": 3}
    >>> moved = redistribute(tree, mesh.layout())
    >>> print(moved["a"].type, moved["b"])
    i64[4] 3
    """
    if isinstance(tree, DTensor):
        moved: Any = tree.redistribute(layouts, max_bytes=max_bytes)
        return moved
    leaves, spec = flatten(tree, is_leaf=is_dtensor)
    wanted = layout_of_each(layouts, spec, _is_target)
    ndims = [x.ndim if isinstance(x, DTensor) else 1 for x in leaves]
    wanted = whole_without_dims(layouts, spec, wanted, ndims)
    if recording():
        pairs = zip(leaves, wanted, strict=True)
        return unflatten(spec, [x.redistribute(t) if is_dtensor(x) else x for x, t in pairs])
    leaves = [due(x) if isinstance(x, DTensor) else x for x in leaves]
    plans = _plans(leaves, wanted, paths(spec, "tree"), max_bytes)
    results = list(leaves)
    places_of: dict[Any, list[int]] = {}
    for i, leaf_plan in plans.items():
        leaf = leaves[i]
        largest = leaf.type.nbytes // _cut_ways(leaf.type)
        if max_bytes is not None or largest > FUSED_BYTES:
            results[i] = DTensor(run(leaf_plan, leaf.local, leaf.comm), leaf_plan.dst, leaf.comm)
        else:
            places_of.setdefault(leaf.comm, []).append(i)
    for comm, places in places_of.items():
        fused = fuse([plans[i] for i in places])
        moved = run_fused(fused, [leaves[i].local for i in places], comm)
        for i, local in zip(places, moved, strict=True):
            results[i] = DTensor(local, plans[i].dst, comm)
    return unflatten(spec, results)


def _plans(
    leaves: Sequence[Any], wanted: Sequence[Any], places: Sequence[str], max_bytes: int | None
) -> dict[int, Plan]:
    """The plan of each leaf that is a DTensor."""
    plans, problems = {}, {}
    for i, (leaf, to) in enumerate(zip(leaves, wanted, strict=True)):
        if not isinstance(leaf, DTensor):
            continue
        try:
            if not _is_target(to):
                raise no_layout(to)
            plans[i] = plan(leaf.type, to, cost=leaf.comm.cost, max_bytes=max_bytes)
        except FdtensorError as error:
            problems[places[i]] = error.sentence
    if problems:
        count = len(plans) + len(problems)
        raise ValueTreeError(
            f"{len(problems)} of {count} DTensors cannot be redistributed.",
            **problems,
            hint="Pass one layout, or a pytree of layouts like the tree or a prefix of it.",
        )
    return plans


def _cut_ways(type: TensorType) -> int:
    ways = 1
    for d in range(len(type.shape)):
        for axis in type.layout.cuts(d):
            ways *= type.mesh.axis_size(axis)
    return ways


def _is_target(node: object) -> bool:
    return isinstance(node, (Layout, TensorType))
