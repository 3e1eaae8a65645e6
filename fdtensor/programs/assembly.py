"""`assembled`: the program of a graph between given types, with its collectives put in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch

from fdtensor.layouts.errors import RuleError
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.ops.graph import Call, Full, Graph, Var, substituted
from fdtensor.ops.lift import kept_cuts, layout_of, lifted
from fdtensor.ops.notation.core import Row
from fdtensor.ops.pins import pinned
from fdtensor.ops.precision import CAST, HALVES, ROUNDED, held, is_widened, waits, wide_of, widened
from fdtensor.ops.saved_values import ALIAS, KEPT
from fdtensor.plans.collective import Slice, Step
from fdtensor.plans.cost import CostModel
from fdtensor.plans.planner import Plan, plan
from fdtensor.programs.choice import (
    UNBOUND,
    Body,
    Bounds,
    Choice,
    Ends,
    chosen,
    ends_of,
    has_rule,
    inside,
    views_of_inputs,
)
from fdtensor.programs.options import OnMissingRule
from fdtensor.programs.program import Eqn, Program
from fdtensor.programs.rounding import stages
from fdtensor.programs.schedule import scheduled

__all__ = ["Origin", "assembled"]

Chosen = Mapping[str, Choice]


@attrs.frozen(eq=False)
class Origin:
    """What the layouts of a program were chosen from."""

    graph: Graph
    choices: Chosen
    values: Mapping[Var, Var]
    """The value of the program that each value of the graph first became."""
    calls: Mapping[Var, Call]
    """The call of the graph for which each value of the program is made; none for outputs."""
    wants: tuple[Layout | None, ...]
    """The layouts that were asked for; None for an output whose layout was chosen."""
    regather: bool


def assembled(
    graph: Graph,
    mesh: Mesh,
    in_types: Sequence[TensorType],
    wants: Sequence[Layout | None],
    cost: CostModel,
    *,
    name: str = "program",
    regather: bool = False,
    on_missing_rule: OnMissingRule = "replicate",
    packed: bool = True,
    bounds: Bounds = UNBOUND,
) -> Program:
    """The program of `graph` for inputs of these types, that takes the least time by `cost`.

    `wants` has the layouts of the outputs; where one is None it is chosen too, and not pending.
    With `regather`, what inputs are gathered to is freed after each use and gathered again. Small
    collectives travel together unless `packed` is False. `bounds` are what the choice keeps to.
    """
    graph = unshared(graph) if regather else graph
    choices: dict[str, Choice] = {}
    for axis in (*mesh.axes, *mesh.axes[: mesh.ndim - 1]):  # again, now that the others are known
        ends = Ends(
            tuple(t.layout[axis] for t in in_types),
            tuple("free" if w is None else w[axis] for w in wants),
        )
        others = {a: choice for a, choice in choices.items() if a != axis}
        choices[axis] = chosen(
            graph, mesh, axis, ends, others, bounds.cost or cost, regather, bounds=bounds
        )
    build = _Builder(mesh, cost, bounds.cost or cost, on_missing_rule, bounds.reduce_dtype)
    build.wishes = _orders(graph, [t.layout for t in in_types], wants)
    again = views_of_inputs(graph) if regather else frozenset()
    env = {v: build.value(t) for v, t in zip(graph.inputs, in_types, strict=True)}
    inputs = tuple(env[v] for v in graph.inputs)
    build.run(graph, choices, env, again)
    outs = tuple(build.finished(graph, choices, env, wants))
    program = Program(
        name,
        mesh,
        inputs,
        tuple(build.constants),
        tuple(build.eqns),
        outs,
        tuple(build.types),
        cost,
        Origin(graph, choices, env, build.makers, tuple(wants), regather),
    )
    return scheduled(program, ahead=not regather) if packed else program


class _Builder:
    """Lines and types of a program as they are made."""

    def __init__(
        self,
        mesh: Mesh,
        cost: CostModel,
        prices: CostModel,
        on_missing_rule: OnMissingRule,
        reduce_dtype: torch.dtype | None,
    ) -> None:
        self.mesh, self.cost, self.on_missing_rule = mesh, cost, on_missing_rule
        self.reduce_dtype = reduce_dtype
        self.prices = prices
        """Those that the choice was made by."""
        self.wishes: Mapping[Var, tuple[str, ...]] = {}
        """The orders of axes in which values of the graph will be read, where one is special."""
        self.types: list[TensorType] = []
        self.eqns: list[Eqn] = []
        self.constants: list[tuple[Var, Any]] = []
        self.versions: dict[Var, dict[TensorType, Var]] = {}
        """Every value in the layouts that it has been moved to."""
        self.makers: dict[Var, Call] = {}
        self.now: Call | None = None
        """The call of the whole graph whose lines are being added."""

    def value(self, type: TensorType) -> Var:
        made = self._new(type)
        self.versions[made] = {type: made}
        return made

    def _new(self, type: TensorType) -> Var:
        made = Var(len(self.types))
        self.types.append(type)
        if self.now is not None:
            self.makers[made] = self.now
        return made

    def moved(self, v: Var, type: TensorType, keep: bool = True) -> Var:
        """`v` with another layout, from the version of it that is the cheapest to move.

        Terms that wait are held in the dtype that sums are reduced in.
        """
        wanted, versions = self._held(type), self.versions[v]
        if wanted in versions:
            return versions[wanted]
        ways = [self._way(t, type) for t in versions if not t.layout.overlaps]
        source, best = min(ways, key=_bytes_and_seconds)
        kept = versions if keep else {}
        made = versions[source]
        for part in best:
            made = self._cast(made, part.src.dtype, kept)
            # along an axis of one rank there is nothing to do but to say so
            steps = part.steps or (Step(Slice((), ()), part.src, part.dst),)
            for step in steps if part.src is not part.dst else ():
                made = self._step(step, made, kept)
        return self._cast(made, wanted.dtype, kept)

    def _way(self, source: TensorType, to: TensorType) -> tuple[TensorType, tuple[Plan, ...]]:
        """How one version becomes another: terms that wait are added up in a wider dtype."""
        source_in = attrs.evolve(source, dtype=to.dtype)
        wide = self._held(source_in).dtype
        if wide is to.dtype:
            return source, (plan(source_in, to, cost=self.cost),)
        return source, stages(source_in, to, wide, self.cost)

    def _held(self, type: TensorType) -> TensorType:
        return held(type, self.reduce_dtype)

    def _cast(self, v: Var, dtype: torch.dtype, versions: dict[TensorType, Var]) -> Var:
        type = attrs.evolve(self.types[v.index], dtype=dtype)
        if self.types[v.index] is type:
            return v
        if type not in versions:
            made = self._new(type)
            if dtype in HALVES and waits(type.layout):
                self.eqns.append(Eqn(ROUNDED, (v, dtype), (), (made,)))
            else:
                self.eqns.append(Eqn(CAST, (v,), (("dtype", dtype),), (made,)))
            self.versions[made] = versions
            versions[type] = made
        return versions[type]

    def _step(self, step: Step, source: Var, versions: dict[TensorType, Var]) -> Var:
        made = self._new(step.dst)
        self.eqns.append(Eqn(step, (source,), (), (made,)))
        self.versions[made] = versions
        versions.setdefault(step.dst, made)
        return made

    def run(
        self, graph: Graph, choices: Chosen, env: dict[Var, Var], again: frozenset[Var]
    ) -> None:
        """Adds the lines of a graph whose inputs are in `env`, which gets its other values."""
        for v, tensor in graph.constants:
            full = graph.types[v.index]
            env[v] = self.value(TensorType(full.shape, full.dtype, self.mesh.layout()))
            self.constants.append((env[v], tensor))
        whole = self.now is None
        for i, call in enumerate(graph.calls):
            self.now = call if whole else self.now
            options = {axis: choices[axis].calls[i] for axis in self.mesh.axes}
            pin = pinned(call)
            if pin is not None:
                env[call.outs[0]] = self._pinned(graph, call, pin, env)  # type: ignore[index]
            elif any(isinstance(o.note, Body) for o in options.values()):
                self._inline(graph, call, options, env, again)
            else:
                self._apply(graph, call, {a: o.note for a, o in options.items()}, env, again)
        self.now = None if whole else self.now

    def _pinned(self, graph: Graph, call: Call, pin: Layout, env: dict[Var, Var]) -> Var:
        full = graph.types[call.ins[0].index]
        made = self.moved(env[call.ins[0]], TensorType(full.shape, full.dtype, pin))
        if call.op is KEPT:  # other layouts are made of this one alone
            source, made = made, self.value(self.types[made.index])
            self.eqns.append(Eqn(ALIAS, (source,), (), (made,), "kept"))
        return made

    def _apply(
        self,
        graph: Graph,
        call: Call,
        rows: Mapping[str, Row],
        env: dict[Var, Var],
        again: frozenset[Var],
    ) -> None:
        types = lifted(call, self.mesh, rows, graph.types, self._order(call, rows, env))
        assert types is not None, f"the rows of {call.op} were found to agree"
        before, after = types
        taken, forced = [], False
        for v, type in zip(call.ins, before, strict=True):
            forced |= self.types[env[v].index] not in (type, self._held(type))
            taken.append(self.moved(env[v], type, keep=v not in again))
        note = self._missing(call) if forced and not has_rule(call) else ""
        outs = self._line(call, taken, before, after, note)
        env.update(
            (v, o) for v, o in zip(call.outs, outs, strict=True) if v is not None and o is not None
        )

    def _line(
        self,
        call: Call,
        taken: Sequence[Var],
        before: Sequence[TensorType],
        after: Sequence[TensorType | None],
        note: str,
    ) -> tuple[Var | None, ...]:
        """The line of a call on these values; where sums wait it computes in a wider dtype."""
        op, args, kwargs = call.op, call.args, call.kwargs
        waiting = [t for t in (*before, *after) if t is not None and self._held(t) is not t]
        wide = self.reduce_dtype if waiting and is_widened(op) else None
        if wide is not None:
            op, args, kwargs, as_they_are = widened(op, args, kwargs, wide)
            if not as_they_are:
                taken = [self._wider(v, wide) for v in taken]
        elif waiting:  # an op of others takes what it is given: each term is rounded
            taken = [
                self._cast(v, t.dtype, self.versions[v]) for v, t in zip(taken, before, strict=True)
            ]
        numbers = iter(taken)
        args, kwargs = substituted((args, kwargs), lambda _: next(numbers))
        outs = [None if t is None else self.value(_in_dtype(t, wide)) for t in after]
        self.eqns.append(Eqn(op, args, kwargs, tuple(outs), note))
        return tuple(
            v if v is None or t is None else self._cast(v, self._held(t).dtype, self.versions[v])
            for v, t in zip(outs, after, strict=True)
        )

    def _wider(self, v: Var, dtype: torch.dtype) -> Var:
        own = self.types[v.index].dtype
        return self._cast(v, wide_of(own, dtype), self.versions[v]) if own in HALVES else v

    def _missing(self, call: Call) -> str:
        if self.on_missing_rule == "error":
            raise RuleError(
                f"{call.op} has no rule, and its operands are not replicated.",
                hint='Give it one with @fdtensor.rule, or pass on_missing_rule="replicate".',
            )
        return "no rule: operands replicated"

    def _order(self, call: Call, rows: Mapping[str, Row], env: dict[Var, Var]) -> tuple[str, ...]:
        """The order of axes that lets the largest operand stay, or be cut further where it is."""
        best: tuple[int, tuple[str, ...]] = (0, ())
        for i, v in enumerate(call.ins):
            type = self.types[env[v].index]
            kept = kept_cuts(type.layout, {a: rows[a].ins[i] for a in self.mesh.axes})
            if kept and type.nbytes > best[0]:
                best = (type.nbytes, (*kept, *(a for a in self.mesh.axes if a not in kept)))
        made = next((v for v in call.outs if v is not None), None)
        return best[1] or (self.wishes.get(made, ()) if made is not None else ())

    def _inline(
        self,
        graph: Graph,
        call: Call,
        options: Mapping[str, Any],
        env: dict[Var, Var],
        again: frozenset[Var],
    ) -> None:
        """The decomposition of a call in its place."""
        note: Body = next(o.note for o in options.values() if isinstance(o.note, Body))
        body = note.graph
        read = [k for k, v in enumerate(call.outs) if v is not None]
        used = [v is not None for v in call.outs]
        ends = tuple((a, ends_of(option, used)) for a, option in options.items())
        choices = inside(note, self.mesh, ends, self.prices, self.reduce_dtype)
        here: dict[Var, Var] = {}
        needed = {v for inner in body.calls for v in inner.ins} | set(body.outs)
        for i, (v, inner) in enumerate(zip(call.ins, body.inputs, strict=True)):
            if inner not in needed:  # it stays as it is, whatever the rows of some axes say
                continue
            full = graph.types[v.index]
            now = self.types[env[v].index].layout
            wanted = [options[a].ins[i] for a in self.mesh.axes]
            placements = [
                now[a] if p == "free" else p for a, p in zip(self.mesh.axes, wanted, strict=True)
            ]
            type = TensorType(full.shape, full.dtype, self._laid(env[v], placements))
            here[inner] = self.moved(env[v], type, keep=v not in again)
        self.run(body, choices, here, frozenset())
        for k, inner in zip(read, body.outs, strict=True):
            placements = [options[a].outs[k] for a in self.mesh.axes]
            made, full = here[inner], body.types[inner.index]
            type = TensorType(full.shape, full.dtype, self._laid(made, placements))
            env[call.outs[k]] = self.moved(made, type)  # type: ignore[index]

    def _laid(self, v: Var, placements: Sequence[Any]) -> Layout:
        """The layout with these placements, with the order of `v` where it has them already."""
        layout = self.types[v.index].layout
        if layout.placements == tuple(placements):
            return layout
        return layout_of(
            self.mesh,
            tuple(placements),
            kept_cuts(layout, dict(zip(self.mesh.axes, placements, strict=True))),
        )

    def finished(
        self,
        graph: Graph,
        choices: Chosen,
        env: dict[Var, Var],
        wants: Sequence[Layout | None],
    ) -> list[Var]:
        """The outputs in the layouts that are wanted or were chosen."""
        outs = []
        for i, (v, want) in enumerate(zip(graph.outs, wants, strict=True)):
            made, full = env[v], graph.types[v.index]
            layout = want or self._laid(made, [choices[a].outs[i] for a in self.mesh.axes])
            made = self.moved(made, TensorType(full.shape, full.dtype, layout))
            outs.append(self._cast(made, full.dtype, self.versions[made]))
        return outs


def _bytes_and_seconds(way: tuple[TensorType, tuple[Plan, ...]]) -> tuple[int, float]:
    """What decides between the versions of a value that may be moved."""
    _, parts = way
    return sum(part.total_bytes for part in parts), sum(part.seconds for part in parts)


def _in_dtype(type: TensorType, wide: torch.dtype | None) -> TensorType:
    """The type as a wider line gives it."""
    if wide is None or type.dtype not in HALVES:
        return type
    return attrs.evolve(type, dtype=wide_of(type.dtype, wide))


def _orders(
    graph: Graph, layouts: Sequence[Layout], wants: Sequence[Layout | None]
) -> dict[Var, tuple[str, ...]]:
    """The order of axes in which each value is read or wanted, where one is not that of the mesh.

    What is made of nothing, or of replicas, is cut so at once.
    """
    known = dict(zip(graph.inputs, map(_order_of, layouts), strict=True))
    wanted = [() if w is None else _order_of(w) for w in wants]
    if not any(known.values()) and not any(wanted):
        return {}
    for call in graph.calls:
        found = next((known[v] for v in call.ins if known.get(v)), ())
        known.update((v, found) for v in call.outs if v is not None)
    wishes: dict[Var, tuple[str, ...]] = {
        v: w for v, w in zip(graph.outs, wanted, strict=True) if w
    }
    for call in reversed(graph.calls):
        found = next((wishes[v] for v in call.outs if v in wishes), ())  # type: ignore[index]
        found = found or next((known[v] for v in call.ins if known.get(v)), ())
        for v in call.ins if found else ():
            wishes.setdefault(v, found)
    return wishes


def _order_of(layout: Layout) -> tuple[str, ...]:
    """The axes in the order of the cuts that are not in that of the mesh, then the others."""
    special = tuple(axis for _, axes in layout.order for axis in axes)
    return (*special, *(a for a in layout.mesh.axes if a not in special)) if special else ()


def unshared(graph: Graph) -> Graph:
    """The graph with views of inputs taken anew for each use, straight from the input."""
    views = {v: call for call in graph.calls for v in call.outs if v is not None}
    of_inputs = views_of_inputs(graph) - set(graph.inputs)
    types: list[Full] = list(graph.types)
    calls: list[Call] = []

    def fresh(v: Var) -> Var:
        if v not in of_inputs:
            return v
        call = views[v]
        made = Var(len(types))
        types.append(types[v.index])
        args, kwargs = substituted((call.args, call.kwargs), fresh)
        outs = tuple(made if o is v else None for o in call.outs)
        calls.append(Call(call.op, args, kwargs, outs, call.mark))
        return made

    for call in graph.calls:
        if any(v in of_inputs for v in call.outs if v is not None):
            continue
        args, kwargs = substituted((call.args, call.kwargs), fresh)
        calls.append(Call(call.op, args, kwargs, call.outs, call.mark))
    outs = tuple(fresh(v) for v in graph.outs)
    return Graph(graph.inputs, graph.constants, tuple(calls), outs, tuple(types))
