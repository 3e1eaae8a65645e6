"""Plain functions cost no more than programs by hand at real size, and both are right."""

from __future__ import annotations

import functools
from itertools import pairwise
from typing import Any

import attrs
import optree
import pytest
import torch

from fdtensor import Program, connect, run, shards
from fdtensor.runtime.simulator import SimulatedComm
from tests.workloads.every import EVERY
from tests.workloads.workload import Cost, exact, measured, widest

LONG = (
    "Llama-3-8B, dp, FSDP and tp",
    "Llama-3-70B, FSDP and sequence parallel",
    "top-2 of 64 experts, dp and ep",
    "top-2 of 64 experts, ep and tp",
    "top-2 of 64 experts, dropless, forward",
)
"""The choice of these takes as long as that of all others together, at any size of tensors."""

NAMES = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.deep] * (name in LONG)) for name in EVERY]
)


@NAMES
def test_the_automatic_program_costs_no_more_than_the_one_by_hand(name):
    workload = EVERY[name]
    m = measured(workload)
    assert m.of_bytes <= workload.at_most
    assert m.of_seconds <= workload.slower
    has_more = max(workload.at_most, workload.slower) > 1.1
    assert has_more == bool(workload.why), "a ratio above 1.1 has its reason"
    if workload.max_bytes is not None:
        assert m.automatic.peak <= workload.max_bytes


def test_a_larger_budget_takes_no_longer():
    """Values made again in less room than there is leave some for collectives that start early."""
    workload = EVERY["Llama-3-8B, FSDP, four layers in 3.4 GB"]
    seconds = []
    for budget in (2_400_000_000, 2_800_000_000, 3_400_000_000):
        within = attrs.evolve(workload, max_bytes=budget)
        seconds.append(Cost.of(within.program(within.real, within.mesh)).seconds)
    assert all(more <= 1.02 * less for less, more in pairwise(seconds))


@functools.cache
def small_run(name: str) -> tuple[list[Program], list[torch.Tensor], list[torch.Tensor]]:
    """Both programs for small tensors, the automatic one as at real size; inputs and results."""
    workload = EVERY[name]
    mesh = workload.small_mesh
    with exact():
        as_real = workload.program(workload.real, mesh)
        programs = [
            workload.program(workload.small, mesh, as_if=as_real),
            workload.program_by_hand(workload.small, mesh),
        ]
        torch.manual_seed(0)
        args = optree.tree_map(widest, workload.args(workload.small))
        wanted = workload.function(*args)
    return programs, tensors_in(args), tensors_in(wanted)


def tensors_in(tree: Any) -> list[torch.Tensor]:
    return optree.tree_leaves(tree)  # type: ignore[return-value]


def worst(got: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    """The largest difference, beside the largest entry of its tensor."""
    return max(
        ((a - b).abs().max() / b.abs().max().clamp(min=1e-30)).item() if b.numel() else 0.0
        for a, b in zip(got, wanted, strict=True)
    )


@pytest.mark.few(12)
@NAMES
def test_both_give_on_simulated_ranks_what_one_process_gives(name):
    programs, args, wanted = small_run(name)
    for program in programs:
        values = [shards(t, x.layout) for t, x in zip(args, program.in_types, strict=True)]
        outs = run(program, values, SimulatedComm(program.mesh))
        due = [shards(t, x.layout) for t, x in zip(wanted, program.out_types, strict=True)]
        for got, block in zip(zip(*outs, strict=True), zip(*due, strict=True), strict=True):
            assert worst([*got], [*block]) <= 1e-6


def on_rank(programs: list[Program], args: Any, wanted: Any) -> list[float]:
    """The largest differences of this rank's results, of each program."""
    worsts = []
    for program in programs:
        comm = connect(program.mesh)
        rank = torch.distributed.get_rank()
        if rank not in program.mesh.order:
            continue
        values = [shards(t, x.layout)[rank] for t, x in zip(args, program.in_types, strict=True)]
        due = [shards(t, x.layout)[rank] for t, x in zip(wanted, program.out_types, strict=True)]
        worsts.append(worst(run(program, values, comm), due))
    return worsts


@pytest.mark.few(5)
@pytest.mark.mesh
@NAMES
def test_and_on_real_ones(name, pool4):
    for worsts in pool4.run(on_rank, *small_run(name), timeout=60):
        assert all(w <= 1e-6 for w in worsts)
