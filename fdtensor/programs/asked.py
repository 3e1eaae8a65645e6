"""`asked_of` and `constraints_of`: what options and arguments ask of a program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import optree

from fdtensor.layouts.free_type import FreeType
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.ops.graph import Graph
from fdtensor.programs.as_if import refuse_other_sizes
from fdtensor.programs.choices import Constraints
from fdtensor.programs.ends import Wanted
from fdtensor.programs.following import parameters_among
from fdtensor.programs.options import Options
from fdtensor.programs.out_layouts import resolved, wanted_layouts
from fdtensor.programs.program import Program

__all__ = ["asked_of", "constraints_of"]


def asked_of(
    graph: Graph,
    f: Callable[..., Any],
    spec: optree.PyTreeSpec,
    types: Sequence[TensorType | FreeType | None],
    out_tree: optree.PyTreeSpec,
    statics: Sequence[object],
    options: Options,
    repeats: Program | None,
) -> Sequence[Wanted]:
    """What is asked of each output, by the options and the arguments."""
    if repeats is not None and options.out_layouts is None:
        wants = repeats.origin.wants  # small sizes may be equal where the real ones are not
        refuse_other_sizes(wants, graph)
        return wants
    asked = resolved(options.out_layouts, f, spec, types)
    return wanted_layouts(graph, spec, types, out_tree, statics, asked, options.eager)


def constraints_of(
    options: Options,
    spec: optree.PyTreeSpec,
    types: Sequence[TensorType | FreeType | None],
    requires_grad: Sequence[bool],
) -> Constraints:
    """The constraints on the choice, by the options."""
    parameters = options.parameters
    if parameters is None:
        parameters = parameters_among(spec, types, requires_grad)
    return Constraints(
        reduce_dtype=options.reduce_dtype,
        deterministic=options.deterministic,
        parameters=parameters,
        follow=options.choice == "follow",
        pending=options.eager or options.terms is not None,
        terms=options.terms,
    )
