"""`Planned`: a pipeline for arguments of certain types: stages, what is sent, and the schedule."""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs

from fdtensor.layouts.display import display
from fdtensor.layouts.errors import TraceError
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import Cut, Placement, Replicate, Shard
from fdtensor.layouts.progress import working
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.layouts.tree import flatten, unflatten
from fdtensor.parallel.pipelines.parts import is_typed, parted
from fdtensor.parallel.pipelines.schedules import Action, Schedule
from fdtensor.parallel.pipelines.stage import Stage, staged
from fdtensor.plans.collectives import Exchange
from fdtensor.plans.cost import CostModel
from fdtensor.plans.planner import Plan, plan
from fdtensor.plans.text import bytes_text, time_text
from fdtensor.programs.options import Options
from fdtensor.programs.program import Program
from fdtensor.programs.recording import TENSOR, name_of
from fdtensor.programs.tracer import type_of

__all__ = ["Planned", "Sends", "planned"]


@attrs.frozen
class Sends:
    """What passes between a stage and the next one, for one part: a plan for each tensor."""

    forward: tuple[Plan, ...]
    backward: tuple[Plan, ...]


@attrs.frozen(eq=False, repr=False)
class Planned:
    """A pipeline for arguments of certain types: it prints, and tells its bytes and seconds."""

    stages: tuple[Stage, ...]
    sends: tuple[Sends, ...]
    """Between each stage and the next one."""
    schedule: Schedule
    """With the seconds of the cost model."""
    units: Schedule
    """With unit times, in the order of which messages are sent."""
    split: tuple[Program | None, Program | None]
    """The parts of the inputs of the first stage, and of the targets of the last one."""
    cost: CostModel

    @property
    def meshes(self) -> tuple[Mesh, ...]:
        """The meshes, in the order of their first stages."""
        return tuple(dict.fromkeys(stage.mesh for stage in self.stages))

    @property
    def seconds(self) -> float:
        """How long a step takes by the cost model."""
        return self.schedule.seconds

    @property
    def received_bytes(self) -> int:
        """The bytes that a rank receives in a step, at most."""
        return max(self.received_bytes_on(mesh) for mesh in self.meshes)

    def received_bytes_on(self, mesh: Mesh) -> int:
        """The bytes that a rank of a mesh receives in a step, at most."""
        parts, total = self.schedule.parts, 0
        for i, stage in enumerate(self.stages):
            if stage.mesh is not mesh:
                continue
            for name, program in stage.programs.items():
                total += program.received_bytes * (parts if name in stage.phases else 1)
            ends = (not i, self.split[0]), (i == len(self.stages) - 1, self.split[1])
            total += sum(p.received_bytes for at_end, p in ends if at_end and p is not None)
            coming = self.sends[i - 1].forward if i else ()
            back = self.sends[i].backward if i < len(self.sends) else ()
            total += sum(p.received_bytes for p in (*coming, *back)) * parts
        return total

    @property
    def digest(self) -> str:
        """A hexadecimal fingerprint, the same on every rank and machine."""
        programs = [p for stage in self.stages for p in stage.programs.values()]
        plans = [p for sends in self.sends for p in (*sends.forward, *sends.backward)]
        text = "".join([str(self.units), *(x.digest for x in (*programs, *plans))])
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def __str__(self) -> str:
        return "\n".join(_lines(self))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {str(self.schedule).splitlines()[0]}>"

    def _repr_html_(self) -> str:
        return display("html", self.schedule)


def planned(
    functions: Sequence[Callable[..., Any]],
    meshes: Sequence[Mesh],
    units: Schedule,
    args: tuple[Sequence[Any], Any, Any],
    draws: bool,
    options: Options,
    cost: CostModel,
    device: Any,
) -> Planned:
    """The pipeline of these functions for `(params, x, target)` of certain types.

    Where it `draws`, they take a random `key` too.
    """
    params, x, target = args
    halves = "W" in {a.kind for row in units.rows for a in row}
    inputs, targets, split = parted(x, target, units.parts, cost)
    stages: list[Stage] = []
    for i, (f, mesh) in enumerate(zip(functions, meshes, strict=True)):
        last = i == len(functions) - 1
        given = (params[i], inputs, targets) if last else (params[i], inputs)
        _refuse_elsewhere(given, mesh, i)
        with working(f"tracing stage {i} of the pipeline, {name_of(f)}"):
            stage = staged(f, given, options, cost, device, not i, halves, units.parts, draws)
        stages.append(stage)
        if last:
            _refuse_no_mean(stage)
        else:
            inputs = _carried(stage, meshes[i + 1])
    sends = tuple(_sends(a, b, cost) for a, b in itertools.pairwise(stages))
    return Planned(tuple(stages), sends, _timed(units, stages, sends), units, split, cost)


def _carried(stage: Stage, mesh: Mesh) -> Any:
    """What a stage gives, as types on the mesh of the next one: cut by the axes of one name."""
    types = iter(stage.out_types)
    own = stage.traced
    leaves = [_on(next(types), mesh) if x is TENSOR else x for x in own.statics]
    return unflatten(own.out_tree, leaves)


def _on(type: TensorType, mesh: Mesh) -> TensorType:
    """The type on another mesh, cut by its axes as by those of the same name."""
    if type.mesh is mesh:
        return type
    placements: list[Placement] = []
    for axis in mesh.axes:
        p = type.layout[axis] if axis in type.mesh.axes else Replicate()
        placements.append(Shard(p.dim) if isinstance(p, Cut) else Replicate())
    return TensorType(type.shape, type.dtype, Layout(mesh, tuple(placements)))


def _sends(a: Stage, b: Stage, cost: CostModel) -> Sends:
    """The plans between a stage and the next one."""
    known, program = a.out_types, b.traced.program
    taken = dict(zip(b.inputs, program.in_types[len(b.parameters) :], strict=False))
    forward = [
        _by_messages(plan(x, y, cost=cost)) for x, y in zip(known, taken.values(), strict=False)
    ]
    back = dict(zip(b.sent_back, b.backward.program.out_types, strict=False))
    wanted = [a.backward.program.type_of(v) for v in _cotangents(a)]
    back = back if wanted else {}  # nothing of the stage has a derivative
    pairs = zip(back.values(), wanted, strict=True)
    backward = [_by_messages(plan(x, y.layout, cost=cost)) for x, y in pairs]
    return Sends(tuple(forward), tuple(backward))


def _by_messages(p: Plan) -> Plan:
    """The plan with messages between pairs of ranks: a collective would wait for all of them."""
    steps = [
        attrs.evolve(step, collective=attrs.evolve(step.collective, way="peer_to_peer"))
        if isinstance(step.collective, Exchange)
        else step
        for step in p.steps
    ]
    return attrs.evolve(p, steps=tuple(steps))


def _cotangents(stage: Stage) -> list[Any]:
    """The cotangents of a stage as values of its backward."""
    program, takes = stage.backward.program, stage.backward.takes
    return [program.inputs[takes.index(v)] for v in stage.cotangents]


def _timed(units: Schedule, stages: Sequence[Stage], sends: Sequence[Sends]) -> Schedule:
    """The schedule with the seconds of the cost model."""

    @functools.cache
    def seconds(stage: int, kind: str) -> float:
        return stages[stage].seconds(kind)

    def sending(action: Action) -> float:
        between = sends[action.stage - (action.kind == "B")]
        return sum(p.seconds for p in (between.forward if action.kind == "F" else between.backward))

    return units.timed(lambda a: seconds(a.stage, a.kind), sending)


def _refuse_elsewhere(tree: Any, mesh: Mesh, stage: int) -> None:
    for leaf in flatten(tree, is_leaf=is_typed)[0]:
        type = type_of(leaf)
        if isinstance(type, TensorType) and type.mesh is not mesh:
            raise TraceError(
                f"a tensor of stage {stage} is on another mesh than its stage.",
                tensor=type,
                mesh=type.mesh,
                stage=mesh,
                hint="Parameters lie on the mesh of their stage, x on the first, target on the "
                "last: distribute(tensor, mesh.layout(...), comm).",
            )


def _refuse_no_mean(stage: Stage) -> None:
    types = stage.out_types
    if len(types) != 1 or types[0].ndim or not types[0].dtype.is_floating_point:
        raise TraceError(
            "the loss of a pipeline is a mean over the batch, and this is no one number.",
            loss=", ".join(map(str, types)) or "no tensor",
            hint="Let loss(y, target) return a tensor without dims, as F.mse_loss does.",
        )
    if not stage.gradients and not stage.sent_back:
        raise TraceError(
            "the loss of a pipeline has no derivative.",
            loss=types[0],
            hint="It depends on no floating-point parameter and on nothing of earlier stages.",
        )


def _lines(pipeline: Planned) -> Iterator[str]:
    """The pipeline as text."""
    yield str(pipeline.schedule)
    for name, program in zip(("x", "target"), pipeline.split, strict=True):
        if program is not None and program.received_bytes:
            yield f"parts of {name}: {bytes_text(program.received_bytes)} received per rank"
    for i, stage in enumerate(pipeline.stages):
        own = [f"{k} {time_text(stage.seconds(k))}" for k, p in stage.phases.items() if p.gives]
        yield f"stage {i} on {stage.mesh!r}: {', '.join(own)}"
        for name, program in stage.programs.items():
            if program.received_bytes:
                count = len(program.collectives)
                word = "collective" if count == 1 else "collectives"
                size = bytes_text(program.received_bytes)
                yield f"  {name}: {count} {word}, {size} received per rank"
        if i < len(pipeline.sends):
            sends = pipeline.sends[i]
            each = [sum(p.received_bytes for p in ps) for ps in (sends.forward, sends.backward)]
            yield f"  to stage {i + 1}: {bytes_text(each[0])} a part, {bytes_text(each[1])} back"
    held = ", ".join(map(str, pipeline.schedule.in_flight))
    yield f"parts in flight: {held}"
    yield f"{time_text(pipeline.seconds)} a step on {pipeline.cost.name}"
