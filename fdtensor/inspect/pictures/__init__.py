"""`show`: what a type, DTensor, mesh, plan or program looks like, in a terminal or a notebook."""

from __future__ import annotations

import inspect
from typing import Any, cast

from fdtensor.inspect.pictures.facts import Description
from fdtensor.inspect.pictures.picture import Picture, fate, seen
from fdtensor.inspect.pictures.plans import of_plan
from fdtensor.inspect.pictures.programs import of_program
from fdtensor.inspect.pictures.types import of_dtensor, of_mesh, of_type
from fdtensor.layouts.errors import FdtensorError
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.plans.cost import CostModel
from fdtensor.plans.planner import Plan
from fdtensor.programs.program import Program
from fdtensor.tensors.dtensor import DTensor

__all__ = ["Picture", "picture_of", "show"]


def show(
    x: TensorType | DTensor[Any] | Mesh | Plan | Program, *, cost: CostModel | None = None
) -> Picture:
    """The picture of a type, DTensor, mesh, plan or program.

    - a type: which ranks hold which indices; of a DTensor also its values, where there are few.
      Nothing is sent: on a real mesh these are the values of this rank.
    - a mesh: its ranks by their coordinates.
    - a plan: the blocks before and after each step, bytes of the busiest rank beside the bound.
    - a program: its listing with the seconds of each line, the costliest ones marked, and a
      timeline of compute and communication. Seconds are those of `cost`, by default of the model
      that the plan or program was made for.

    As a statement of its own it shows the picture: HTML in a notebook, colors in a terminal, plain
    text in a file; among the processes of torchrun the first one shows it. A picture that is
    assigned or passed on is not shown: print it, or `picture.save("x.html")` or `"x.svg"`.
    Raises `FdtensorError` for anything else.
    """
    picture = picture_of(x, cost)
    frame: Any = inspect.currentframe()
    # at a prompt that has shown it already, None is what the prompt does not show again
    return cast(Picture, seen(picture, fate(frame.f_back)))


def picture_of(x: object, cost: CostModel | None = None) -> Picture:
    """The picture of `x`, which is not shown."""
    return Picture(_described(x, cost))


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
        case Layout():
            raise FdtensorError(
                f"the layout {x} has no shape to draw.",
                mesh=x.mesh,
                hint="Write show(TensorType(shape, dtype, layout)).",
            )
        case _:
            raise FdtensorError(
                f"there is no picture of a {type(x).__name__}.",
                hint="Show a TensorType, a DTensor, a Mesh, a Plan or a Program.",
            )
