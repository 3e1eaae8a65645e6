"""`pipeline`: stages of a model on meshes of their own, each with a part of the batch at a time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fdtensor.layouts.errors import TraceError
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.signatures import named_arguments
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.layouts.tree import flatten, unflatten
from fdtensor.ops.ambient import ambient
from fdtensor.ops.random_bits.keys import AnyKey, words_of
from fdtensor.ops.random_key import with_random_key
from fdtensor.parallel.pipelines.arguments import (
    comm_of,
    refuse_no_batch,
    refuse_unfit,
    trees_of,
    values_of,
    warn_of_inputs,
)
from fdtensor.parallel.pipelines.planned import Planned, planned
from fdtensor.parallel.pipelines.running import Prepared, Running
from fdtensor.parallel.pipelines.schedules import Schedule, schedule_of
from fdtensor.plans.cost import CostModel, model_of
from fdtensor.plans.local_tensors import empty
from fdtensor.programs.options import Choosing, OnMissingRule, Options
from fdtensor.programs.recording import name_of
from fdtensor.programs.tracer import type_of
from fdtensor.runtime.comm import inside
from fdtensor.runtime.digests import Digest
from fdtensor.tensors.calls.arguments import compare_key
from fdtensor.tensors.calls.reads import Reads, argument_key
from fdtensor.tensors.dtensor import DTensor, is_dtensor

__all__ = ["Pipeline", "pipeline"]

KEPT = 32
"""How many pipelines, for arguments of as many types, are kept."""


@named_arguments
def pipeline(
    stages: Sequence[Callable[..., Any]],
    loss: Callable[..., Any],
    *,
    meshes: Sequence[Mesh],
    microbatches: int,
    schedule: str = "1f1b",
    choice: Choosing = "follow",
    regather: bool = False,
    on_missing_rule: OnMissingRule = "replicate",
    check_indices: bool = True,
    reduce_dtype: torch.dtype | None = torch.float32,
    deterministic: bool = False,
    max_bytes: int | None = None,
) -> Pipeline:
    """A training step of a model whose stages lie on meshes of their own.

    `grads, value = step(params, x, target)`: `stages[i](params[i], x)` runs on `meshes[i]`, for one
    of `microbatches` parts of the batch at a time, and its result goes to the next stage; `loss(y,
    target)` is a mean over the batch, so `value` is that of all parts, and `grads` its gradients in
    the layouts of `params`. A sum is divided by `microbatches`, and a mean over entries of which
    parts have more or fewer, as with `ignore_index`, weighs them by part: one whose targets are all
    ignored makes it nan, which a sum over entries divided by a number does not. What the axes of a
    mesh cut is cut by those of the same name on the next one.
    `schedule` is "gpipe", "1f1b", "interleaved" (stages go round the meshes: `meshes=[m0, m1, m0,
    m1]`, and `microbatches` is a multiple of how many there are) or "zero_bubble". Part i has every
    `microbatches`-th row of the batch from row i on, so that no row moves where ranks have as many
    rows of each part. Parameters in shards are gathered once for all parts, with `regather` for
    each use, and gradients are reduced once. The other options are those of `spmd`; `max_bytes` is
    for the programs of a stage.
    Stages that draw random numbers, as dropout does, need `step(params, x, target, key=key)`: for
    part p, stage i draws from `fold_in(fold_in(key, i), p)`, and the loss as the last one.
    Meshes have no rank in common. Raises `TraceError` for stages that do not fit.

    >>> meshes = [Mesh.from_ranks([0, 1], "dp"), Mesh.from_ranks([2, 3], "dp")]
    >>> comm = SimulatedComm(Mesh(all=4))
    >>> params = [distribute(torch.full((4, 4), 0.5), m.layout(), comm) for m in meshes]
    >>> x, target = (distribute(torch.ones(8, 4), m.layout("dp"), comm) for m in meshes)
    >>> stages = [lambda w, x: torch.relu(x @ w), lambda w, x: x @ w]
    >>> loss = torch.nn.functional.mse_loss
    >>> step = fd.parallel.pipeline(stages, loss, meshes=meshes, microbatches=4)
    >>> grads, value = step(params, x, target)
    >>> print(value.full(), grads[1].type)
    tensor(9.) f32[4,4]
    >>> print(step.schedule)
    1f1b: 2 stages on 2 meshes, 4 parts, 20 % of the time waiting
      mesh 0  F0 F1 .  .  B0 -  F2 B1 -  F3 B2 -  .  B3 -
      mesh 1  .  F0 B0 -  F1 B1 -  F2 B2 -  F3 B3 -  .  .
    """
    refuse_unfit(stages, loss, meshes)
    order = list(dict.fromkeys(meshes))
    units = schedule_of(schedule, [order.index(mesh) for mesh in meshes], microbatches)
    options = Options(
        choice=choice,
        regather=regather,
        on_missing_rule=on_missing_rule,
        check_indices=check_indices,
        reduce_dtype=reduce_dtype,
        deterministic=deterministic,
        max_bytes=max_bytes,
    )
    return Pipeline(tuple(stages), loss, tuple(meshes), units, options)


class Pipeline:
    """A training step of stages on meshes of their own: made by `pipeline`."""

    def __init__(
        self,
        stages: Sequence[Callable[..., Any]],
        loss: Callable[..., Any],
        meshes: Sequence[Mesh],
        schedule: Schedule,
        options: Options,
    ) -> None:
        self.functions = {
            draws: _with_loss([with_random_key(f) for f in stages] if draws else stages, loss)
            for draws in (False, True)
        }
        """The functions of the stages, by whether they take a random key."""
        self.reads = tuple([Reads(f) for f in (*stages, loss)])
        """What the functions read besides their arguments: a part of the key of a program."""
        self.meshes, self.schedule, self.options = meshes, schedule, options
        self.known: dict[Any, Planned] = {}
        self.prepared: dict[Any, Prepared] = {}
        self.waited: float | None = None
        """The seconds in which this rank waited for others in the last step; None if simulated."""

    def __repr__(self) -> str:
        return f"<pipeline {str(self.schedule).splitlines()[0]}>"

    def trace(
        self,
        params: Sequence[Any],
        x: Any,
        target: Any,
        *,
        key: AnyKey | None = None,
        cost: CostModel | None = None,
    ) -> Planned:
        """The programs, plans and times of a step, for DTensors or types."""
        trees = trees_of(params, x, target)
        known = (leaf for leaf in flatten(trees, is_leaf=is_dtensor)[0] if is_dtensor(leaf))
        first = next(known, None)  # a call then finds what was planned here
        device = None if first is None else first.comm.device
        return self._planned(trees, key is not None, model_of(cost), device)

    def __call__(
        self, params: Sequence[Any], x: Any, target: Any, *, key: AnyKey | None = None
    ) -> tuple[list[Any], Any]:
        """The gradients of `params`, and the loss."""
        try:
            trees = trees_of(params, x, target)
            comm = comm_of(trees)
            if key is not None:
                words_of(key)  # raises for what is no key
            plans = self._planned(trees, key is not None, comm.cost, comm.device)
        except BaseException as error:
            raise self._failed((params, x, target), error)  # noqa: B904 - the same error, of which others hear
        own = [values_of(tree) for tree in trees[0]]
        try:
            is_first = (id(plans), comm) not in self.prepared
            if is_first:
                warn_of_inputs(trees[1])
            running = Running(self._ready(plans, comm))
            if key is not None:
                compare_key(key, comm, plans.meshes, None, is_first)
            running.step(own, values_of(x), values_of(target), key)
            grads = [self._gradients(running, i, tree) for i, tree in enumerate(trees[0])]
        except BaseException as error:
            # of what fails on one rank the others hear in the calls in which they wait for it
            if not getattr(error, "common", False):
                comm.spread(self._groups(), error)
            raise
        self.waited = None if comm.rank is None else running.waited
        (type,) = plans.stages[-1].out_types
        value = running.loss() if _takes_part(type.mesh, comm) else _nothing(type, comm)
        return grads, DTensor(value, type, comm)

    def _groups(self) -> list[tuple[Mesh, ...]]:
        """The meshes whose ranks wait for each other in the calls of a step, one by one and all."""
        meshes = tuple(dict.fromkeys(self.meshes))
        some = [*[(mesh,) for mesh in meshes], *itertools.pairwise(meshes), meshes]
        return [*dict.fromkeys(some)]

    def _failed(self, given: Any, error: BaseException) -> BaseException:
        """The error, of which the other ranks hear in whichever call they wait for this one."""
        leaves = flatten(given, is_leaf=is_dtensor)[0]
        comm = next((leaf.comm for leaf in leaves if isinstance(leaf, DTensor)), None)
        if comm is not None:
            for meshes in self._groups():
                error = comm.failed(meshes, error)
        return error

    def _planned(
        self, trees: tuple[Any, Any, Any], draws: bool, cost: CostModel, device: Any
    ) -> Planned:
        if len(trees[0]) != len(self.meshes):
            raise TraceError(
                f"params has {len(trees[0])} entries for {len(self.meshes)} stages.",
                hint="Give a list with a pytree of DTensors for each stage, {} for one without.",
            )
        leaves, spec = flatten(trees, is_leaf=lambda x: type_of(x) is not None)
        reads = tuple([reads and reads.key() for reads in self.reads])
        key = spec, tuple([type_of(leaf) or argument_key(leaf) for leaf in leaves]), reads
        key = *key, draws, cost, device, ambient()
        plans = self.known.get(key)
        if plans is None:
            how = self.functions[draws], self.meshes, self.schedule, trees, draws, self.options
            try:
                plans = self.known[key] = planned(*how, cost, device or "cpu")
            except (AttributeError, TypeError):
                refuse_no_batch(x=trees[1], target=trees[2])
                raise
            if len(self.known) > KEPT:
                gone = id(self.known.pop(next(iter(self.known))))
                self.prepared = {k: p for k, p in self.prepared.items() if k[0] != gone}
        return plans

    def _ready(self, plans: Planned, comm: Any) -> Prepared:
        """The pipeline on a Comm, agreed on by all ranks of its meshes at the first step."""
        key = id(plans), comm
        if key not in self.prepared:
            if comm.check != "never":
                told = [p for stage in plans.stages for p in stage.programs.values()]
                digest = Digest(plans.digest, plans, *told)
                comm.agree("this pipeline", digest, [*plans.meshes], None)
            self.prepared[key] = Prepared(plans, comm)
        return self.prepared[key]

    def _gradients(self, running: Running, i: int, tree: Any) -> Any:
        """The gradients of the parameters of a stage, in their structure; None where none is."""
        stage, comm = running.pipeline.stages[i], running.comm
        has = _takes_part(stage.mesh, comm)
        values: list[Any] = running.gradients(i) if has else []
        known: dict[int, Any] = {}
        for k, gradient in enumerate(stage.gradients):
            value = values[k] if has else _nothing(gradient.wanted, comm)
            known[gradient.parameter] = DTensor(value, gradient.wanted, comm)
        leaves, spec = flatten(tree, is_leaf=lambda x: isinstance(x, DTensor))
        places = iter(range(len(leaves)))
        grads = [known.get(next(places)) if isinstance(x, DTensor) else None for x in leaves]
        return unflatten(spec, grads)


def _with_loss(
    stages: Sequence[Callable[..., Any]], loss: Callable[..., Any]
) -> tuple[Callable[..., Any], ...]:
    """The functions of the stages, the last one with the loss of its result."""
    *first, last = stages

    def ending(params: Any, x: Any, target: Any, **key: Any) -> Any:
        return loss(last(params, x, **key), target)

    ending.__name__ = name_of(last)
    return (*first, ending)


def _takes_part(mesh: Mesh, comm: Any) -> bool:
    """Whether this process runs a rank of a mesh: of simulated ones all."""
    return comm.rank is None or inside(comm, mesh)


def _nothing(type: TensorType, comm: Any) -> torch.Tensor:
    """The local tensor on a rank outside of a mesh."""
    return empty(type, comm.rank, comm.device)
