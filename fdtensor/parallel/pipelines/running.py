"""`Running`: one step of a pipeline, on all simulated ranks or on this one of many processes.

Messages are begun in one order on all ranks, that of the times at which they are ready, and waited
for when they are read: so none waits for another in a circle, and all are under way while ranks
compute.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import Any

import torch

from fdtensor.ops.graph import Var
from fdtensor.ops.random_bits.keys import AnyKey, fold_in
from fdtensor.ops.random_key import key_type
from fdtensor.parallel.pipelines.planned import Planned
from fdtensor.parallel.pipelines.schedules import Action
from fdtensor.parallel.pipelines.stage import Stage
from fdtensor.plans.collectives import Exchange
from fdtensor.plans.local_tensors import empty
from fdtensor.plans.planner import Plan
from fdtensor.runtime.interpreter import execute
from fdtensor.runtime.runner import runner_of
from fdtensor.tensors.calls.arguments import key_tensor

__all__ = ["Prepared", "Running"]

Wait = Callable[[], Any]
"""Waits for a message, and gives the value."""


class Prepared:
    """A pipeline on a Comm: which of its actions run here, and by what functions."""

    def __init__(self, pipeline: Planned, comm: Any) -> None:
        self.pipeline, self.comm = pipeline, comm
        meshes, rank = pipeline.meshes, comm.rank
        self.place = None
        """The place of this rank; None on simulated ranks, which are at all places."""
        if rank is not None:
            self.place = next((i for i, m in enumerate(meshes) if m.position(rank) is not None), -1)
        units = pipeline.units
        self.actions = [slot.action for slot in units.slots if self.runs_at(slot.place)]
        ended = sorted(units.slots, key=lambda slot: (slot.stop, slot.place))
        self.messages = [slot.action for slot in ended if self._sends(slot.action)]
        """The actions whose results this rank sends or receives, in the order of all ranks."""
        self._runners: dict[Any, Any] = {}

    def runs_at(self, place: int) -> bool:
        """Whether a place is that of this rank, or ranks are simulated."""
        return self.place is None or self.place == place

    def taker(self, action: Action) -> int:
        """The stage that reads what an action gives."""
        return action.stage + (1 if action.kind == "F" else -1)

    def plans(self, action: Action) -> tuple[Plan, ...]:
        """The plans of what an action sends."""
        sends = self.pipeline.sends[action.stage - (action.kind == "B")]
        return sends.forward if action.kind == "F" else sends.backward

    def _sends(self, action: Action) -> bool:
        places = self.pipeline.units.places
        if not action.sends(len(places)) or not self.plans(action):
            return False
        return any(self.runs_at(places[stage]) for stage in (action.stage, self.taker(action)))

    def run(self, program: Any, values: Sequence[Any]) -> Sequence[Any]:
        """The outputs of a program on this rank, or on all simulated ones."""
        runner = self._runners.get(id(program))
        if runner is None:
            runner = self._runners[id(program)] = runner_of(program, self.comm)
        return runner(values)

    def begin(self, plan: Plan, value: Any) -> Wait:
        """Begins to move a value; what is returned waits for its end."""
        *before, last = plan.steps or (None,)
        if last is None or self.comm.rank is None or not isinstance(last.collective, Exchange):
            moved = self.comm.watched(plan, execute)(plan, value, self.comm)
            return lambda: moved

        def begun(_: Plan) -> Wait:
            moved = value
            for step in before:
                moved = self.comm.perform(step, moved)
            return self.comm.begin(last, moved)

        wait = self.comm.watched(plan, begun)(plan)
        return lambda: self.comm.waited([plan.src.mesh, plan.dst.mesh], wait)


class Running:
    """One step: what stages have computed so far, and what is on its way."""

    def __init__(self, prepared: Prepared) -> None:
        self.it, self.comm, self.pipeline = prepared, prepared.comm, prepared.pipeline
        self.shared: dict[int, dict[Var, Any]] = {}
        """The values of each stage for all parts."""
        self.of_part: dict[tuple[int, int], dict[Var, Any]] = {}
        """The values of a stage for one part, while they are read."""
        self.arriving: dict[Action, list[Wait]] = {}
        """What an action gave to another stage."""
        self.leaving: deque[list[Wait]] = deque()
        self.sums: dict[tuple[int, int], Any] = {}
        self.losses: list[Any] = []
        self.left = deque(prepared.messages)
        self.waited = 0.0
        """The seconds in which this rank waited for others."""

    def step(
        self,
        params: Sequence[Sequence[Any]],
        inputs: Sequence[Any],
        targets: Sequence[Any],
        key: AnyKey | None,
    ) -> None:
        """Runs the step, for the values of parameters, of x and of target, and a random key."""
        pipeline, run = self.pipeline, self.it.run
        stages, parts = pipeline.stages, pipeline.units.parts
        given: list[list[Any]] = []
        for program, values, stage in zip(
            pipeline.split, (inputs, targets), (stages[0], stages[-1]), strict=True
        ):
            taken = program is not None and self._runs(stage)
            given.append(list(run(program, values)) if taken else [])
        for i, stage in enumerate(stages):
            if self._runs(stage):
                known = dict(zip(stage.parameters, params[i], strict=True))
                outs = run(stage.prepare.program, [known[v] for v in stage.prepare.takes])
                self.shared[i] = known | dict(zip(stage.prepare.gives, outs, strict=True))
        for part in range(parts):
            self._given(0, stages[0].inputs[: len(inputs)], part, given[0], len(inputs))
            own = stages[-1].inputs[: -1 if key is not None else None]
            own = own[len(own) - len(targets) :]
            self._given(len(stages) - 1, own, part, given[1], len(targets))
        if key is not None:
            self._give_keys(key)
        for action in self.it.actions:
            self._run(action)
        while self.leaving:
            _all(self.leaving.popleft())

    def _give_keys(self, key: AnyKey) -> None:
        """Notes the key of each stage for each part: that of the stage, for the part."""
        for i, stage in enumerate(self.pipeline.stages):
            if self._runs(stage):
                type = key_type(stage.mesh)
                for part in range(self.pipeline.units.parts):
                    words = key_tensor(fold_in(fold_in(key, i), part), self.comm.device)
                    value = self.comm.value([words] * self.comm.width(type))
                    self.of_part.setdefault((i, part), {})[stage.inputs[-1]] = value

    def _runs(self, stage: Stage) -> bool:
        return self.it.runs_at(self.pipeline.meshes.index(stage.mesh))

    def _given(
        self, stage: int, names: Sequence[Var], part: int, values: Sequence[Any], count: int
    ) -> None:
        """Notes the part of a batch that a stage takes."""
        if values:
            own = values[part * count : (part + 1) * count]
            self.of_part.setdefault((stage, part), {}).update(zip(names, own, strict=True))

    def _run(self, action: Action) -> None:
        """Runs an action: waits for what it takes, runs its program, sends what it gives."""
        stage = self.pipeline.stages[action.stage]
        phase = stage.phases[action.kind]
        env = self.of_part.setdefault((action.stage, action.part), {})
        env.update(self._taken(action, stage))
        known = self.shared[action.stage]
        values = [env[v] if v in env else known[v] for v in phase.takes]
        outs = self.it.run(phase.program, values) if phase.gives else ()
        del values
        env.update(zip(phase.gives, outs, strict=True))
        self._sent(action, [env[v] for v in self._given_on(action, stage)])
        if action.kind == "F" and action.stage == len(self.pipeline.stages) - 1:
            self.losses.append(env[stage.outs[0]])
        self._add(action, stage, env)
        self._forget(action, stage)

    def _taken(self, action: Action, stage: Stage) -> Iterator[tuple[Var, Any]]:
        """What an action takes from another stage, by the names it has here."""
        last = action.stage == len(self.pipeline.stages) - 1
        if action.kind == "B" and last:
            yield from zip(stage.cotangents, self._seeds(stage), strict=True)
            return
        source = next(iter(action.needs(len(self.pipeline.stages))), None)
        if source is None or source.stage == action.stage or not self.it.plans(source):
            return
        names = stage.inputs if action.kind == "F" else stage.cotangents
        if source not in self.arriving:
            self._begin_up_to(source)
        start = perf_counter()
        values = _all(self.arriving.pop(source))
        self.waited += perf_counter() - start
        yield from zip(names, values, strict=False)  # the last stage has targets besides

    def _seeds(self, stage: Stage) -> list[Any]:
        """The cotangents of the loss of a part: of their mean, each has its share."""
        (type,) = stage.out_types
        share = 1.0 / self.pipeline.units.parts

        def seed(rank: int) -> torch.Tensor:
            device = self.comm.device or "cpu"
            return torch.full(type.local_shape(rank), share, dtype=type.dtype, device=device)

        return [self.comm.each(type, seed)]

    def _given_on(self, action: Action, stage: Stage) -> Sequence[Var]:
        """What an action gives to another stage."""
        if not action.sends(len(self.pipeline.stages)) or not self.it.plans(action):
            return ()
        return stage.outs if action.kind == "F" else stage.sent_back

    def _sent(self, action: Action, values: Sequence[Any]) -> None:
        if not values:
            return
        places = self.pipeline.units.places
        if places[action.stage] == places[self.it.taker(action)] or self.comm.rank is None:
            pairs = zip(self.it.plans(action), values, strict=True)
            self.arriving[action] = [self.it.begin(plan, value) for plan, value in pairs]
            return
        self._begin_up_to(action, values)

    def _begin_up_to(self, last: Action, values: Sequence[Any] = ()) -> None:
        """Begins the messages up to one, in the order of all ranks; others send all before it."""
        while True:
            action = self.left.popleft()
            plans = self.it.plans(action)
            own = values if action == last else ()
            own = own or [empty(p.src, self.comm.rank, self.comm.device) for p in plans]
            waits = [self.it.begin(plan, value) for plan, value in zip(plans, own, strict=True)]
            if self.it.runs_at(self.pipeline.units.places[action.stage]):
                self.leaving.append(waits)
                if len(self.leaving) > MOST_LEAVING * len(self.pipeline.stages):
                    _all(self.leaving.popleft())
            else:
                self.arriving[action] = waits
            if action == last:
                return

    def _add(self, action: Action, stage: Stage, env: dict[Var, Any]) -> None:
        """Adds the gradients of a part to those of the others."""
        if action.kind == ("W" if stage.weights.gives else "B"):
            for k, gradient in enumerate(stage.gradients):
                key, term = (action.stage, k), env[gradient.value]
                known = self.sums.get(key)
                self.sums[key] = self._sum(known, term, gradient.type.dtype, action.part > 1)

    def _sum(self, known: Any, term: Any, dtype: torch.dtype, owned: bool) -> Any:
        terms = self.comm.leaves(term)
        if known is None:
            return self.comm.value([t.to(dtype) for t in terms])
        pairs = zip(self.comm.leaves(known), terms, strict=True)
        return self.comm.value([a.add_(b) if owned else a + b for a, b in pairs])

    def _forget(self, action: Action, stage: Stage) -> None:
        """Drops what no later program of the stage reads for this part."""
        order = "FBW"
        later = order[order.index(action.kind) + 1 :]
        read = {v for kind in later for v in stage.phases[kind].takes}
        key = action.stage, action.part
        self.of_part[key] = {v: x for v, x in self.of_part[key].items() if v in read}

    def gradients(self, i: int) -> list[Any]:
        """The gradients of the parameters of a stage that have any, reduced."""
        stage = self.pipeline.stages[i]
        sums = [self.sums[i, k] for k in range(len(stage.gradients))]
        return sums if stage.finish is None else list(self.it.run(stage.finish, sums))

    def loss(self) -> Any:
        """The mean of the losses of all parts."""
        total = self.losses[0]
        for loss in self.losses[1:]:
            total = self._sum(total, loss, self.comm.leaves(loss)[0].dtype, False)
        count = len(self.losses)
        return self.comm.value([t / count for t in self.comm.leaves(total)])


MOST_LEAVING = 4
"""How many messages for each stage may be on their way before this rank waits for the first."""


def _all(waits: Sequence[Wait]) -> list[Any]:
    return [wait() for wait in waits]
