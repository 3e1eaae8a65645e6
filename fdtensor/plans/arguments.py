"""`check_ends` and `check_prices`: what `plan` takes."""

from __future__ import annotations

from fdtensor.layouts.errors import PlanError
from fdtensor.layouts.expected import no_layout
from fdtensor.layouts.free_type import FreeType
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.plans.cost import model_of

__all__ = ["check_ends", "check_prices"]


def check_ends(src: object, dst: object) -> None:
    """Raises for ends that no plan has: a layout for a type, a list of placements for a layout."""
    for end in (src, dst):
        if isinstance(end, FreeType):
            raise end.unchosen()
    if not isinstance(src, TensorType):
        raise PlanError(
            "a plan goes from a TensorType to a TensorType or Layout.",
            src=repr(src),
            dst=repr(dst),
            hint="Write plan(TensorType(shape, dtype, layout), layout); a DTensor has its .type.",
        )
    if not isinstance(dst, (TensorType, Layout)):
        raise no_layout(dst)


def check_prices(cost: object, max_bytes: object) -> None:
    """Raises `PlanError` for what is no cost model, and for what is no number of bytes."""
    model_of(cost)
    if not isinstance(max_bytes, (int, float, type(None))):
        raise PlanError(
            f"max_bytes={max_bytes!r} is no number of bytes.",
            hint="Write a whole number, max_bytes=10**9 for a gigabyte, or None for no bound.",
        )
