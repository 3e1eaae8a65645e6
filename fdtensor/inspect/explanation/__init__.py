"""`explain`: why a program or plan is what it is, or what tells two programs apart, as text."""

from __future__ import annotations

from fdtensor.inspect.explanation.pairs import told_apart
from fdtensor.inspect.explanation.plans import plan_explained
from fdtensor.inspect.explanation.programs import explained
from fdtensor.layouts.errors import TraceError
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.layouts.text import Text
from fdtensor.plans.cost import CostModel, model_of
from fdtensor.programs.program import Program

__all__ = ["explain", "explained"]


def explain(
    first: Program | TensorType,
    second: Program | TensorType | Layout | str | None = None,
    *,
    cost: CostModel | None = None,
) -> Text:
    """Why something is what it is, as text.

    - `explain(program)`: its costly moves, and why values have their layouts; `explain(program,
      "f")` has all about one value.
    - `explain(program, other)`: what tells two programs apart.
    - `explain(src, dst)` for a type and a type or layout: the ways that `plan` compared, by `cost`.

    Raises `TraceError` for anything else, and for a program with `cost`, which has one of its own.

    >>> mesh = Mesh(x=2)
    >>> explain(TensorType((4, 6), torch.float32, mesh.layout("x")), mesh.layout(None, "x"))
    f32[4@x,6] -> f32[4,6@x] on Mesh(x=2)
                   received  all ranks      time
      taken            24 B       48 B  14.00 us  all_to_all[axis=x dim=0->1]
      full copies      48 B       96 B  14.00 us  all_gather[axis=x dim=0]
                                                  slice[axis=x dim=1]
    bound 24 B, reached: a rank must receive what it wants and does not hold
    """
    if cost is not None and isinstance(first, Program):
        raise TraceError(
            "a program is explained by its own cost model.",
            program=first.cost.name,
            given=model_of(cost).name,
            hint="Trace it by another one, trace(f, ..., cost=cost); estimate(program, cost) "
            "prices it.",
        )
    match first, second:
        case Program(), None | str():
            return Text(explained(first, second))
        case Program(), Program():
            return Text(told_apart(first, second))
        case TensorType(), TensorType() | Layout():
            return Text(plan_explained(first, second, cost))
        case _:
            raise TraceError(
                "explain takes a program, two programs, or a TensorType and where it goes.",
                first=type(first).__name__,
                second=type(second).__name__,
                hint="Write explain(program), explain(program, other) or explain(src, dst).",
            )
