"""`show`: the picture of a type, DTensor, mesh, plan or program, for a terminal or a notebook."""

from __future__ import annotations

from typing import Any, TypeAlias

from fdtensor.inspect.pictures.facts import Description
from fdtensor.inspect.pictures.picture import Picture
from fdtensor.inspect.pictures.plans import of_plan
from fdtensor.inspect.pictures.programs import of_program
from fdtensor.inspect.pictures.schedules import of_schedule
from fdtensor.inspect.pictures.trees import of_tree
from fdtensor.inspect.pictures.types import of_dtensor, of_mesh, of_type
from fdtensor.layouts.errors import FdtensorError
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.layouts.words import a_kind
from fdtensor.parallel.pipelines.planned import Planned
from fdtensor.parallel.pipelines.schedules import Schedule
from fdtensor.plans.cost import CostModel, model_of
from fdtensor.plans.planner import Plan
from fdtensor.programs.program import Program
from fdtensor.tensors.dtensor import DTensor

__all__ = ["Picture", "show"]

Tree: TypeAlias = dict[Any, Any] | list[Any] | tuple[Any, ...]


def show(
    x: TensorType | DTensor[Any] | Mesh | Plan | Program | Schedule | Planned | Tree,
    *,
    cost: CostModel | None = None,
) -> Picture:
    """The picture of a type, DTensor, mesh, plan, program or pipeline, or of a dict of tensors.

    - a type: which ranks hold which indices; of a DTensor also its values, where there are few.
      Nothing is sent: on a real mesh these are the values of this rank.
    - a mesh: its ranks by their coordinates.
    - a plan: the blocks before and after each step, bytes of the busiest rank beside the bound.
    - a program: its listing with the seconds of each line, the costliest ones marked, layers that
      repeat once, and a timeline of compute and communication. Seconds are those of `cost`, by
      default of the model that the plan or program was made for.
    - a dict, list or tuple of types, DTensors and tensors: the type of each, and what a rank holds.
    - a pipeline, as `step.schedule` or what `step.trace` gives: what each mesh runs when.

    A picture is a value: a notebook or a prompt displays it where it is the last line. Elsewhere
    print it, or `show(x).draw()`, with colors in a terminal. `show(x).save("x.html")` or `"x.svg"`
    writes a file.
    Raises `FdtensorError` for anything else.

    >>> show(Mesh(dp=2, tp=2))
    Mesh(dp=2, tp=2)
      ranks  4, row-major: the last axis counts fastest
    <BLANKLINE>
             tp=0   tp=1
           +------+------+
      dp=0 |  0   |  1   |
           +------+------+
      dp=1 |  2   |  3   |
           +------+------+
    """
    return Picture(_described(x, None if cost is None else model_of(cost)))


def _described(x: object, cost: CostModel | None) -> Description:
    match x:
        case TensorType():
            return of_type(x)
        case DTensor():
            return of_dtensor(x)
        case Mesh():
            return of_mesh(x)
        case Plan():
            return of_plan(x, cost)
        case Program():
            return of_program(x, cost)
        case Schedule():
            return of_schedule(x)
        case Planned():
            return of_schedule(x.schedule)
        case dict() | list() | tuple():
            return of_tree(x)
        case Layout():
            raise FdtensorError(
                f"the layout {x} has no shape to draw.",
                mesh=x.mesh,
                hint="Write show(TensorType(shape, dtype, layout)).",
            )
        case _:
            raise FdtensorError(
                f"there is no picture of {a_kind(x)}.",
                hint="Show a TensorType, a DTensor, a dict of these, a Mesh, a Plan, a Program or "
                "a Schedule.",
            )
