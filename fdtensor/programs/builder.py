"""`Builder`: the lines of a graph's calls, as rows of their rules and their decompositions say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import torch

from fdtensor.layouts.errors import RuleError
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import Placement
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.ops.graph import Call, Full, Graph, Var, substituted
from fdtensor.ops.lift import kept_cuts, layout_of, lifted, strided_first
from fdtensor.ops.notation.core import Row
from fdtensor.ops.pins import pinned
from fdtensor.ops.precision import HALVES, is_widened, wide_of, widened
from fdtensor.ops.saved_values import ALIAS, SAVED
from fdtensor.plans.cost import CostModel
from fdtensor.programs.as_if import Repeated, dearer
from fdtensor.programs.axis_order import kept_order
from fdtensor.programs.boundary import boundary_of
from fdtensor.programs.choice import has_rule, inside
from fdtensor.programs.choices import Body, Choices, Inside
from fdtensor.programs.eqn import Eqn
from fdtensor.programs.nested import layout_at
from fdtensor.programs.nodes import Option, Place
from fdtensor.programs.options import OnMissingRule
from fdtensor.programs.values import Values

__all__ = ["Builder"]


class Builder:
    """Adds the lines of calls to the values of a program."""

    def __init__(
        self,
        mesh: Mesh,
        prices: CostModel,
        within: Inside,
        on_missing_rule: OnMissingRule,
        values: Values,
        regathered: frozenset[Var],
        orders: Mapping[Var, tuple[str, ...]],
        nesting: tuple[str, ...],
        repeated: Repeated | None = None,
    ) -> None:
        self.mesh, self.on_missing_rule, self.values = mesh, on_missing_rule, values
        self.prices = prices
        """The cost model that the choice was made by."""
        self.within = within
        """The constraints on the choices for decompositions."""
        self.regathered = regathered
        """Values of the whole graph whose moves are made anew for each use."""
        self.orders = orders
        """The orders of axes in which values of the graph will be read, where one is special."""
        self.nesting = nesting
        """The order of axes that cut one dim, where nothing else says one."""
        self.repeated = repeated
        """The program at other sizes whose choices these are."""

    def whole(
        self,
        graph: Graph,
        choices: Choices,
        in_types: Sequence[TensorType],
        wants: Sequence[Layout | None],
    ) -> tuple[tuple[Var, ...], dict[Var, Var], tuple[Var, ...]]:
        """Adds the lines of the whole graph: its inputs, all its values, and its outputs."""
        env = self.inputs(graph, in_types)
        inputs = tuple([env[v] for v in graph.inputs])
        self.run(graph, choices, env)
        return inputs, env, tuple(self.outputs(graph, choices, env, wants))

    def run(self, graph: Graph, choices: Choices, env: dict[Var, Var]) -> None:
        """Adds the lines of the whole graph: `env` has its inputs, and gets its other values."""
        self._constants(graph, env)
        nested = choices.nested
        for i, call in enumerate(graph.calls):
            self.values.call = call
            options = {axis: choices[axis].calls[i] for axis in self.mesh.axes}
            self._at_scale(call.outs[:1])
            order = () if nested is None else nested.calls[i]
            self._add(graph, call, options, env, self.regathered, order)
            self._at_scale(call.outs, env)
        self.values.call, self.values.scale = None, 1.0

    def inputs(self, graph: Graph, in_types: Sequence[TensorType]) -> dict[Var, Var]:
        """Adds the inputs of the whole graph, and returns the value of each."""
        env: dict[Var, Var] = {}
        for v, type in zip(graph.inputs, in_types, strict=True):
            env[v] = self.values.new(type)
            self._at_scale([v], env)
        return env

    def _at_scale(self, of: Sequence[Var | None], env: Mapping[Var, Var] | None = None) -> None:
        """New values count as these values of the graph do, and those of `env` too."""
        if self.repeated is not None:
            for v in of:
                self.values.scale = self.repeated.ratio(v)
                if env is not None and v is not None:
                    self.values.scales[env[v]] = self.values.scale

    def _constants(self, graph: Graph, env: dict[Var, Var]) -> None:
        for v, tensor in graph.constants:
            full = graph.types[v.index]
            env[v] = self.values.new(TensorType(full.shape, full.dtype, self.mesh.layout()))
            self.values.constants.append((env[v], tensor))

    def _add(
        self,
        graph: Graph,
        call: Call,
        options: Mapping[str, Option],
        env: dict[Var, Var],
        regathered: frozenset[Var],
        order: tuple[str, ...] = (),
    ) -> None:
        """The lines of a call: a move, those of its decomposition, or the op itself.

        Axes that cut one dim come in an `order`, or in one that suits the operands.
        """
        pin = pinned(call)
        if pin is not None:
            env[call.outs[0]] = self._pinned(graph, call, pin, env)  # type: ignore[index]
        elif any(isinstance(o.note, Body) for o in options.values()):
            self._inline(graph, call, options, env, regathered, order)
        else:
            rows = {a: o.note for a, o in options.items()}
            self._apply(graph, call, rows, env, regathered, order)

    def _pinned(self, graph: Graph, call: Call, pin: Layout, env: dict[Var, Var]) -> Var:
        full = graph.types[call.ins[0].index]
        moved = self.values.moved(env[call.ins[0]], TensorType(full.shape, full.dtype, pin))
        if call.op is not SAVED:
            return moved
        kept = self.values.new(self.values.type_of(moved))  # other layouts come from this one alone
        self.values.eqns.append(Eqn(ALIAS, (moved,), (), (kept,), "kept"))
        return kept

    def _apply(
        self,
        graph: Graph,
        call: Call,
        rows: Mapping[str, Row],
        env: dict[Var, Var],
        regathered: frozenset[Var],
        order: tuple[str, ...],
    ) -> None:
        """The line of a call whose axes each follow a row."""
        values, order = self.values, order or self._order(call, rows, env)
        types = lifted(call, self.mesh, rows, graph.types, order)
        assert types is not None, f"the rows of {call.op} were found to compose"
        before, after = types
        taken: list[Var] = []
        forced = False
        for v, type in zip(call.ins, before, strict=True):
            forced |= values.type_of(env[v]) not in (type, values.held(type))
            taken.append(values.moved(env[v], type, keep=v not in regathered))
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
        """The line of a call on these values; pending sums are computed in a wider dtype."""
        values = self.values
        op, args, kwargs = call.op, call.args, call.kwargs
        pending = [t for t in (*before, *after) if t is not None and values.held(t) is not t]
        wide = values.reduce_dtype if pending and is_widened(op) else None
        if wide is not None:
            op, args, kwargs, reads_halves = widened(op, args, kwargs, wide)
            if not reads_halves:
                taken = [values.wider(v, wide) for v in taken]
        elif pending:  # an op of another library takes its own dtypes: each term is rounded
            taken = [values.cast(v, t.dtype) for v, t in zip(taken, before, strict=True)]
        numbers = iter(taken)
        args, kwargs = substituted((args, kwargs), lambda _: next(numbers))
        outs = [None if t is None else values.new(_in_dtype(t, wide)) for t in after]
        values.eqns.append(Eqn(op, args, kwargs, tuple(outs), note))
        return tuple(
            v if v is None or t is None else values.cast(v, values.held(t).dtype)
            for v, t in zip(outs, after, strict=True)
        )

    def _missing(self, call: Call) -> str:
        if self.on_missing_rule == "error":
            raise RuleError(
                f"{call.op} has no rule, and its operands are not replicated.",
                hint='Give it one with @fdtensor.rule, or pass on_missing_rule="replicate".',
            )
        return "no rule: operands replicated"

    def _order(self, call: Call, rows: Mapping[str, Row], env: dict[Var, Var]) -> tuple[str, ...]:
        """The order of axes that lets the largest operand stay, or be cut further where it is."""
        sides = [(self.values.type_of(env[v]), self.values.nbytes(env[v])) for v in call.ins]
        best, cuts = kept_order(call, sides, rows), {a: (*r.ins, *r.outs) for a, r in rows.items()}
        out = next((v for v in call.outs if v is not None), None)
        return best or self.orders.get(out) or strided_first(self.nesting, cuts)  # type: ignore[arg-type]

    def _inline(
        self,
        graph: Graph,
        call: Call,
        options: Mapping[str, Option],
        env: dict[Var, Var],
        regathered: frozenset[Var],
        order: tuple[str, ...],
    ) -> None:
        """The decomposition of a call in its place."""
        note: Body = next(o.note for o in options.values() if isinstance(o.note, Body))
        body, axes = note.graph, self.mesh.axes
        is_read = [v is not None for v in call.outs]
        read = [k for k, v in enumerate(call.outs) if v is not None]
        boundaries = tuple((a, boundary_of(option, is_read)) for a, option in options.items())
        scale, prices = self.values.scale, self.prices
        prices = prices if scale == 1.0 else dearer(prices, scale)
        choices = inside(note, self.mesh, boundaries, prices, self.within)
        inner_env: dict[Var, Var] = {}
        needed = {v for inner in body.calls for v in inner.ins} | set(body.outs)
        for i, (v, inner) in enumerate(zip(call.ins, body.inputs, strict=True)):
            if inner not in needed:  # it stays as it is, whatever the rows of some axes say
                continue
            layout = self.values.type_of(env[v]).layout
            wanted: dict[str, Place] = {a: options[a].ins[i] for a in axes}
            placements = [layout[a] if p == "free" else p for a, p in wanted.items()]
            full, within = graph.types[v.index], () if "free" in wanted.values() else order
            inner_env[inner] = self._placed(env[v], placements, full, within, v not in regathered)
        self._constants(body, inner_env)
        for i, inner in enumerate(body.calls):
            inner_options = {axis: choices[axis].calls[i] for axis in axes}
            self._add(body, inner, inner_options, inner_env, frozenset())
        for k, inner in zip(read, body.outs, strict=True):
            placements = [options[a].outs[k] for a in axes]
            full = body.types[inner.index]
            env[call.outs[k]] = self._placed(inner_env[inner], placements, full, order)  # type: ignore[index]

    def _placed(
        self,
        v: Var,
        placements: Sequence[Placement],
        full: Full,
        order: tuple[str, ...],
        keep: bool = True,
    ) -> Var:
        """A value in these placements, in this order of axes or else in one that suits it."""
        mesh = self.mesh
        layout = layout_of(mesh, tuple(placements), order) if order else self._laid(v, placements)
        return self.values.moved(v, TensorType(full.shape, full.dtype, layout), keep)

    def _laid(self, v: Var, placements: Sequence[Placement]) -> Layout:
        """The layout with these placements, with the order of `v` where it has them already."""
        layout = self.values.type_of(v).layout
        if layout.placements == tuple(placements):
            return layout
        wanted = dict(zip(self.mesh.axes, placements, strict=True))
        kept = kept_cuts(layout, wanted)
        each = {a: (p,) for a, p in wanted.items()}
        others = strided_first([a for a in self.nesting if a not in kept], each)
        return layout_of(self.mesh, tuple(placements), (*kept, *others))

    def outputs(
        self,
        graph: Graph,
        choices: Choices,
        env: dict[Var, Var],
        wants: Sequence[Layout | None],
    ) -> list[Var]:
        """The outputs in the layouts that are wanted or were chosen."""
        outs: list[Var] = []
        for i, (v, want) in enumerate(zip(graph.outs, wants, strict=True)):
            full = graph.types[v.index]
            layout = want or self._laid(env[v], [choices[a].outs[i] for a in self.mesh.axes])
            if want is None and choices.nested is not None:
                layout = layout_at(self.mesh, choices.nested.outs[i])
            out = self.values.moved(env[v], TensorType(full.shape, full.dtype, layout))
            outs.append(self.values.cast(out, full.dtype))
        return outs


def _in_dtype(type: TensorType, wide: torch.dtype | None) -> TensorType:
    """The type of a result as a line in a wider dtype computes it."""
    if wide is None or type.dtype not in HALVES:
        return type
    return attrs.evolve(type, dtype=wide_of(type.dtype, wide))
