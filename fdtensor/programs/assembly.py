"""`assembled`: the program of a graph between given types, with its collectives put in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import permutations

import attrs

from fdtensor.layouts.free_type import FreeType
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.ops.graph import Call, Graph, Var
from fdtensor.plans.cost import CostModel, linked
from fdtensor.programs.arguments import Arguments
from fdtensor.programs.as_if import Repeated
from fdtensor.programs.axis_order import preferred_order
from fdtensor.programs.boundary import Boundary
from fdtensor.programs.builder import Builder
from fdtensor.programs.bundles import bundled
from fdtensor.programs.choice import prices_of
from fdtensor.programs.choices import UNCONSTRAINED, Choices, Constraints
from fdtensor.programs.ends import Wanted, tied_inputs, typed, wanted
from fdtensor.programs.following import tolls_of
from fdtensor.programs.loops import in_loops
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
    arguments: Arguments | None = None
    """The arguments of the function, with the number of the input in place of each tensor."""
    constraints: Constraints = UNCONSTRAINED
    """What the choice kept to."""
    seen: tuple[TensorType, ...] = ()
    """The types of the results for the caller, where some are on other meshes."""


def assembled(
    graph: Graph,
    mesh: Mesh,
    in_types: Sequence[TensorType | FreeType],
    wants: Sequence[Wanted],
    cost: CostModel,
    *,
    name: str = "program",
    regather: bool = False,
    on_missing_rule: OnMissingRule = "replicate",
    packed: bool = True,
    choosing: CostModel | None = None,
    constraints: Constraints = UNCONSTRAINED,
    repeats: Program | None = None,
    arguments: Arguments | None = None,
    holding: float = 0.0,
) -> Program:
    """The program of `graph` for inputs of these types, that takes the least time by `cost`.

    `wants` has the layouts of the outputs; where one is None it is chosen too, and not pending.
    With `regather`, gathered inputs are freed after each use and gathered again. Small
    collectives travel together, and start in time, unless `packed` is False. The choice keeps to
    `constraints`, and is made by the cost model `choosing` where there is one. Where there is a
    program that it `repeats`, at other sizes, the choices are those of that one. Free inputs get
    the layouts that are chosen for them, and outputs that are `Tied` to them the same; a byte of
    these costs `holding` seconds.
    """
    graph, prices = unshared(graph) if regather else graph, choosing or constraints.cost or cost
    repeated = _repeated(repeats, graph, in_types)
    constraints = _of_ends(constraints, in_types, wants, holding, repeats)
    constraints = _with_tolls(constraints, graph, mesh, prices)
    ends, known = boundaries_of(mesh, in_types, wants), prices_of(graph, mesh, prices, constraints)
    choices = chosen_together(graph, ends, known, constraints, regather)
    regathered = views_of_inputs(graph) if regather else frozenset[Var]()

    def nested(nesting: tuple[str, ...], of_inputs: tuple[str, ...] | None = None) -> Program:
        types = typed(in_types, mesh, choices, of_inputs or nesting)
        asked, near = wanted(wants, types), of_inputs is not None
        orders = preferred_order(graph, [t.layout for t in types], asked, near)
        values = Values(cost, constraints.reduce_dtype)
        how = regathered, orders, nesting, repeated
        builder = Builder(mesh, prices, constraints.inside, on_missing_rule, values, *how)
        inputs, env, outs = builder.whole(graph, choices, types, asked)
        lines = tuple(values.constants), in_loops(values.eqns, outs), outs, tuple(values.types)
        how = asked, regather, nesting, repeats, values.scales, arguments, constraints
        origin = Origin(graph, choices, env, values.makers, *how)
        return Program(name, mesh, inputs, *lines, cost, origin)

    program = _best_nesting(nested, in_types, mesh, repeats)
    return scheduled(bundled(program)) if packed else program


def _of_ends(
    constraints: Constraints,
    in_types: Sequence[TensorType | FreeType],
    wants: Sequence[Wanted],
    holding: float,
    repeats: Program | None,
) -> Constraints:
    """The constraints with those of the inputs and outputs, and of the program to repeat."""
    like = constraints.like if repeats is None else repeats.origin.choices
    ins = tuple([t.layout if isinstance(t, TensorType) else None for t in in_types])
    outs = tuple([want if isinstance(want, Layout) else None for want in wants])
    given = {"ties": tied_inputs(wants), "holding": holding, "ins": ins, "outs": outs}
    return attrs.evolve(constraints, like=like, **given)


def _with_tolls(
    constraints: Constraints, graph: Graph, mesh: Mesh, prices: CostModel
) -> Constraints:
    """The constraints with the tolls of moves that undo what was given, where that is followed."""
    if not constraints.follow:
        return constraints
    tolls = tolls_of(graph, mesh, linked(prices, mesh), constraints.parameters)
    return attrs.evolve(constraints, tolls=tolls)


def _repeated(
    repeats: Program | None, graph: Graph, in_types: Sequence[TensorType | FreeType]
) -> Repeated | None:
    """The graph beside the program that it repeats."""
    layouts = tuple([t.layout for t in in_types if isinstance(t, TensorType)])
    return None if repeats is None else Repeated(repeats, graph, layouts)


def boundaries_of(
    mesh: Mesh, in_types: Sequence[TensorType | FreeType], wants: Sequence[Wanted]
) -> dict[str, Boundary]:
    """The boundary of a graph on each axis, for these types and wanted layouts."""
    return {
        axis: Boundary(
            tuple(t.layout[axis] if isinstance(t, TensorType) else "free" for t in in_types),
            tuple(w[axis] if isinstance(w, Layout) else "free" for w in wants),
        )
        for axis in mesh.axes
    }


MOST_NESTED = 3
"""The most axes of which every order is tried."""


def _best_nesting(
    nested: Callable[..., Program],
    in_types: Sequence[TensorType | FreeType],
    mesh: Mesh,
    repeats: Program | None,
) -> Program:
    """The program with the order of axes, where several cut one dim, that takes the least time.

    Inputs whose layouts are free may have another order than what is made of them.
    """
    if repeats is not None:
        return nested(repeats.origin.nesting)
    free = any(isinstance(t, FreeType) for t in in_types)
    best = nested(mesh.axes)
    for order in _orders(best, best.types):
        best = _faster(nested(order), best)
    for order in _orders(best, best.in_types) if free else ():
        best = _faster(nested(best.origin.nesting, order), best)
    return best


def _orders(program: Program, types: Sequence[TensorType]) -> Iterator[tuple[str, ...]]:
    """Other orders of the axes of which several cut a dim of one of these types; none of many."""
    mesh = program.mesh
    shared = [t.layout.cuts(d) for t in types for d in range(t.ndim)]
    axes = {axis for cuts in shared if len(cuts) > 1 for axis in cuts}
    if 1 < len(axes) <= MOST_NESTED:
        others = [a for a in mesh.axes if a not in axes]
        own = tuple([a for a in program.origin.nesting if a in axes])
        for order in permutations([a for a in mesh.axes if a in axes]):
            if order != own:
                yield (*order, *others)


def _faster(program: Program, best: Program) -> Program:
    """A program that takes less time than the best one, else that one."""
    return program if program.seconds < best.seconds * (1 - 1e-6) else best
