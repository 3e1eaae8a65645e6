"""Whether a plan does what it says: its steps lead from its source to its destination.

A step is right where its collective is one that the planner itself would take for these types, so
what a text says of axes, dims, reductions and roots is compared with what the layouts say. No
tensor is made, and nothing is counted rank by rank but what a local step keeps of uneven blocks.
"""

from __future__ import annotations

from math import prod
from typing import TypeGuard, get_args

from fdtensor.layouts.errors import PlanError
from fdtensor.layouts.placement import Spans, StridedShard
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.plans.collectives import (
    Collective,
    Exchange,
    ReduceExchange,
    Slice,
    Step,
    Way,
    by_exchange,
    by_meetings,
)
from fdtensor.plans.cost import CostModel
from fdtensor.plans.meetings import few_enough
from fdtensor.plans.normal_type import NormalType, normalized
from fdtensor.plans.search import same_everywhere
from fdtensor.plans.traffic import most_received
from fdtensor.plans.transitions import named

__all__ = ["check_step", "check_steps", "is_right"]

HINT = "Make plans with plan(src, dst), or by Plan.from_json of what to_json returned."

MOST_BLOCKS = 1 << 22
"""The most pieces of blocks that are compared one by one."""


def check_steps(src: TensorType, dst: TensorType, steps: tuple[Step, ...], cost: CostModel) -> None:
    """Raises `PlanError` where steps do not take a tensor of type `src` to type `dst`."""
    _check_fields(src, dst, steps, cost)
    at = src
    for i, step in enumerate(steps):
        check_step(step, f"step {i}")
        if step.src is not at:
            raise PlanError(
                f"step {i} does not start where the plan is by then.",
                step=f"{step.src} on {step.src.mesh}",
                plan=f"{at} on {at.mesh}",
                hint=HINT,
            )
        at = step.dst
    if at is not dst and (steps or not same_everywhere(src, dst)):
        raise PlanError(
            f"the plan ends at {at}, not at its destination.",
            destination=f"{dst} on {dst.mesh}",
            end=f"{at} on {at.mesh}",
            hint=HINT,
        )


def _check_fields(src: object, dst: object, steps: object, cost: object) -> None:
    """Raises `PlanError` where a field of a plan is not of its kind."""
    if not isinstance(src, TensorType) or not isinstance(dst, TensorType):
        raise PlanError("a plan goes from a TensorType to a TensorType.", hint=HINT)
    if not isinstance(cost, CostModel) or not isinstance(steps, tuple):
        raise PlanError("a plan has a tuple of steps and a CostModel.", hint=HINT)


def check_step(step: object, name: str) -> None:
    """Raises `PlanError` where a step, called `name`, does not take its source to its end."""
    if not _is_step(step):
        raise PlanError(f"{name} is {step!r}, and no Step of a collective.", hint=HINT)
    if not is_right(step):
        raise PlanError(
            f"{step.collective} is not what takes {step.src} to {step.dst}.",
            which=name,
            mesh=f"{step.src.mesh} to {step.dst.mesh}",
            right=_right(step.src, step.dst),
            hint=HINT,
        )


def _is_step(step: object) -> TypeGuard[Step]:
    return isinstance(step, Step) and isinstance(getattr(step, "collective", None), Collective)


def is_right(step: Step) -> bool:
    """Whether a step takes every tensor of its source type to the same tensor of its other one."""
    src, dst = step.src, step.dst
    if not _of_one_tensor(src, dst):
        return False
    match step.collective:
        case Exchange(_, _, way, pieces):
            return (
                way in get_args(Way)
                and 1 <= pieces <= max((1, *src.shape))
                and _exchangeable(src, dst)
                and step is by_exchange(src, dst, way, pieces)
            )
        case ReduceExchange():
            return few_enough(src, dst) and step is by_meetings(src, dst)
        case Slice((), ()):
            return _held(src, dst)
        case collective:
            return collective is named(src, dst)


def _of_one_tensor(src: TensorType, dst: TensorType) -> bool:
    """Whether both are of the same tensor, whose blocks stay as they are where they overlap."""
    kept = not src.layout.overlaps or src.mesh is dst.mesh
    return (
        kept
        and (src.shape, src.dtype) == (dst.shape, dst.dtype)
        and all(
            not isinstance(p, Spans) or p is q
            # none overlaps where the meshes differ, and with them how many there are
            for p, q in zip(src.layout.placements, dst.layout.placements, strict=False)
        )
    )


def _exchangeable(src: TensorType, dst: TensorType) -> bool:
    """Whether an exchange makes `dst`: it reduces pending terms or leaves them as they are."""
    before = _pending(src) if src.mesh is dst.mesh else {}
    return _pending(dst).items() <= before.items()


def _pending(type: TensorType) -> dict[str, str]:
    """The pending axes of more than one rank, with their reduce ops."""
    partial = type.layout.partial
    return {a: op for a, op in partial.items() if type.mesh.axis_size(a) > 1}


def _held(src: TensorType, dst: TensorType) -> bool:
    """Whether every rank of `dst` holds what it wants, so that a local copy is all there is to do.

    False also where more than `MOST_BLOCKS` pieces of blocks would have to be compared.
    """
    if src.numel == 0:
        return True
    same = src.mesh is dst.mesh
    if not _exchangeable(src, dst) or (same and _pending(src) != _pending(dst)):
        return False
    a, b = normalized(src), normalized(dst)
    if same and all(
        long[: len(short)] == short for short, long in zip(a.cuts, b.cuts, strict=True)
    ):
        return True
    blocks = max(src.mesh.size * _pieces(a), dst.mesh.size * _pieces(b))
    return blocks <= MOST_BLOCKS and not most_received((by_exchange(src, dst),))


def _pieces(type: NormalType) -> int:
    """How many pieces a block may have."""
    cuts = [(d, p) for d, cuts in enumerate(type.cuts) for _, _, p in cuts]
    return prod(min(p.split_factor, type.shape[d]) for d, p in cuts if isinstance(p, StridedShard))


def _right(src: TensorType, dst: TensorType) -> str:
    """The one step that takes `src` to `dst`, as text for a message."""
    if not _of_one_tensor(src, dst):
        return "nothing, they are not of one tensor that can be moved"
    collective = named(src, dst)
    if collective is None and _exchangeable(src, dst):
        collective = by_exchange(src, dst).collective
    return "more than one step" if collective is None else str(collective)
