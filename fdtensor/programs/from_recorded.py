"""`program_of`: the program of a function that was recorded, by the options of its caller."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import optree

from fdtensor.layouts.errors import FdtensorError
from fdtensor.layouts.free_type import FreeType
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import Ragged, Spans
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.plans.cost import CostModel
from fdtensor.programs.arguments import arguments_of
from fdtensor.programs.as_if import as_in
from fdtensor.programs.asked import asked_of, constraints_of
from fdtensor.programs.assembly import assembled
from fdtensor.programs.budget import cheapest_within
from fdtensor.programs.ends import Wanted, numbered
from fdtensor.programs.meshes import graph_on, mesh_with, on_mesh, seen_by_caller, wants_on
from fdtensor.programs.options import Options
from fdtensor.programs.program import Program
from fdtensor.programs.recording import Recorded, name_of

__all__ = ["program_like", "program_of"]


def program_of(
    it: Recorded,
    f: Callable[..., Any],
    spec: optree.PyTreeSpec,
    types: Sequence[TensorType | FreeType | None],
    options: Options,
    requires_grad: Sequence[bool],
    repeats: Program | None,
    budget: int | None,
    wants: Sequence[Wanted] | None = None,
    *,
    mesh: Mesh,
    cost: CostModel,
    packed: bool,
) -> Program:
    """The program of what was recorded, with the choices of one that it repeats.

    It holds at most `budget` bytes at once, where there is one; `wants` are the layouts of results,
    where they do not follow from the options.
    """
    types = types if repeats is None else as_in(repeats.in_types, types)
    if wants is None:
        wants = asked_of(it.graph, f, spec, types, it.out_tree, it.statics, options, repeats)
    mesh = mesh_with(mesh, it.graph, wants)
    known = [on_mesh(mesh, t) for t in types if t is not None]
    assemble = functools.partial(
        assembled,
        *(graph_on(mesh, it.graph), mesh, known, wants_on(mesh, it.graph, wants), cost),
        name=name_of(f),
        regather=options.regather,
        on_missing_rule=options.on_missing_rule,
        packed=packed,
        constraints=constraints_of(options, spec, types, requires_grad),
        repeats=repeats,
        arguments=arguments_of(f, spec, numbered(types)),
    )
    program = assemble() if budget is None else cheapest_within(assemble, budget, cost, known)
    return seen_by_caller(program, types, wants)


def program_like(
    first: Program, make: Callable[..., Program], repeats: Program | None, budget: int | None
) -> Program:
    """The program with the choices of the first one, at other sizes; else with its results."""
    if repeats is None and budget is None:
        with contextlib.suppress(FdtensorError):  # a row or blocks that these sizes do not have
            return make(first, None)
    layouts = [t.layout for t in first.out_types]
    return make(repeats, budget, [at if _is_of_any_size(at) else None for at in layouts])


def _is_of_any_size(layout: Layout) -> bool:
    return not any(isinstance(p, (Ragged, Spans)) for p in layout.placements)
