"""`assembled`: the program of a graph between given types, with its collectives put in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import permutations

import attrs

from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.ops.graph import Call, Graph, Var
from fdtensor.plans.cost import CostModel
from fdtensor.programs.as_if import Repeated
from fdtensor.programs.axis_order import preferred_order
from fdtensor.programs.boundary import Boundary
from fdtensor.programs.builder import Builder, Choices
from fdtensor.programs.bundles import bundled
from fdtensor.programs.choice import prices_of
from fdtensor.programs.choices import UNCONSTRAINED, Constraints
from fdtensor.programs.options import OnMissingRule
from fdtensor.programs.program import Program
from fdtensor.programs.regather import unshared, views_of_inputs
from fdtensor.programs.schedule import scheduled
from fdtensor.programs.together import chosen_together
from fdtensor.programs.values import Values

__all__ = ["Origin", "assembled", "boundaries_of"]


@attrs.frozen(eq=False)
class Origin:
    """The graph of a program, and the choices that its layouts follow from."""

    graph: Graph
    choices: Choices
    values: Mapping[Var, Var]
    """The value of the program that each value of the graph first became."""
    calls: Mapping[Var, Call]
    """The call of the graph for which each value of the program is made; none for outputs."""
    wants: tuple[Layout | None, ...]
    """The layouts that were asked for; None for an output whose layout was chosen."""
    regather: bool
    nesting: tuple[str, ...]
    """The order of axes that cut one dim, where nothing else says one."""
    repeats: Program | None = None
    """The program at other sizes whose choices these are."""
    scales: Mapping[Var, float] = attrs.field(factory=lambda: dict[Var, float]())
    """How many times the bytes that they have values of the program then had; 1 where silent."""


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
    choosing: CostModel | None = None,
    constraints: Constraints = UNCONSTRAINED,
    repeats: Program | None = None,
) -> Program:
    """The program of `graph` for inputs of these types, that takes the least time by `cost`.

    `wants` has the layouts of the outputs; where one is None it is chosen too, and not pending.
    With `regather`, gathered inputs are freed after each use and gathered again. Small
    collectives travel together, and start in time, unless `packed` is False. The choice keeps to
    `constraints`, and is made by the cost model `choosing` where there is one. Where there is a
    program that it `repeats`, at other sizes, the choices are those of that one.
    """
    graph, prices = unshared(graph) if regather else graph, choosing or constraints.cost or cost
    repeated = repeats and Repeated(repeats, graph, tuple(t.layout for t in in_types))
    if repeats is not None:
        constraints = attrs.evolve(constraints, like=repeats.origin.choices)
    ends, known = boundaries_of(mesh, in_types, wants), prices_of(graph, mesh, prices, constraints)
    choices = chosen_together(graph, ends, known, constraints, regather)
    orders = preferred_order(graph, [t.layout for t in in_types], wants)
    regathered = views_of_inputs(graph) if regather else frozenset[Var]()

    def nested(nesting: tuple[str, ...]) -> Program:
        values = Values(cost, constraints.reduce_dtype)
        how = regathered, orders, nesting, repeated
        builder = Builder(mesh, prices, on_missing_rule, values, *how)
        env = builder.inputs(graph, in_types)
        inputs = tuple(env[v] for v in graph.inputs)
        builder.run(graph, choices, env)
        outs = tuple(builder.outputs(graph, choices, env, wants))
        lines = tuple(values.constants), tuple(values.eqns), outs, tuple(values.types)
        asked = tuple(wants), regather, nesting, repeats
        origin = Origin(graph, choices, env, values.makers, *asked, values.scales)
        return Program(name, mesh, inputs, *lines, cost, origin)

    program = _best_nesting(nested, mesh) if repeats is None else nested(repeats.origin.nesting)
    return scheduled(bundled(program)) if packed else program


def boundaries_of(
    mesh: Mesh, in_types: Sequence[TensorType], wants: Sequence[Layout | None]
) -> dict[str, Boundary]:
    """The boundary of a graph on each axis, for these types and wanted layouts."""
    return {
        axis: Boundary(
            tuple(t.layout[axis] for t in in_types),
            tuple("free" if w is None else w[axis] for w in wants),
        )
        for axis in mesh.axes
    }


MOST_NESTED = 3
"""The most axes of which every order is tried."""


def _best_nesting(nested: Callable[[tuple[str, ...]], Program], mesh: Mesh) -> Program:
    """The program with the order of axes, where several cut one dim, that takes the least time."""
    best = nested(mesh.axes)
    shared = [t.layout.cuts(d) for t in best.types for d in range(t.ndim)]
    axes = {axis for cuts in shared if len(cuts) > 1 for axis in cuts}
    if not 1 < len(axes) <= MOST_NESTED:
        return best
    others = [a for a in mesh.axes if a not in axes]
    for order in permutations([a for a in mesh.axes if a in axes]):
        program = nested((*order, *others))
        if program.seconds < best.seconds * (1 - 1e-6):
            best = program
    return best
