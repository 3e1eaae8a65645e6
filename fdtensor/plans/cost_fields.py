"""Converters of the fields of a cost model, which refuse what is no price."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from fdtensor.layouts.dtypes import dtype_name, parse_dtype
from fdtensor.layouts.errors import LayoutError, PlanError
from fdtensor.layouts.mesh_fields import LINKS
from fdtensor.layouts.words import shown

__all__ = ["by_dtype", "check_link", "duration", "flag", "no_model", "rate", "table", "text"]


def no_model(value: object) -> PlanError:
    """The error for what is no cost model."""
    return PlanError(
        f"{shown(value)} is not a cost model.",
        hint="Pass fd.cost.NCCL, GLOO, A100, H100, H200 or TPU_V5P, or what calibrate(comm) gives.",
    )


def check_link(axis: str, value: object, kind: type) -> None:
    """Raises `PlanError` for what connects no ranks, as a link of this kind does."""
    if isinstance(value, kind):
        return
    name = str(value).upper() if value in LINKS else "INFINIBAND"
    raise PlanError(
        f"{axis}={shown(value)} is not a Link.",
        hint=f"Write with_links({axis}=fd.cost.{name}), or Link(latency, bandwidth).",
    )


def duration(value: object) -> float:
    """Seconds, or how many times longer something takes."""
    return _number(value, 0.0)


def rate(value: object) -> float:
    """So much per second."""
    return _number(value, 5e-324)


def flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise PlanError(f"torus={value!r} is no flag.", hint="Write torus=True or torus=False.")
    return value


def _number(value: object, least: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _no_price(value)
    if not least <= value <= sys.float_info.max:
        raise _no_price(value)
    return float(value)


def _no_price(value: object) -> PlanError:
    return PlanError(
        f"{value!r} is no price.",
        hint="Times of a cost model are finite, 0 or more; rates are finite and more than 0.",
    )


def table(*kinds: Callable[[Any], Any]) -> Callable[[Any], tuple[Any, ...]]:
    """Returns the converter of rows, each a name and its numbers, to tuples."""

    def convert(rows: Any) -> tuple[Any, ...]:
        try:
            own = [(text(n), *[k(v) for k, v in zip(kinds, vs, strict=True)]) for n, *vs in rows]
        except (TypeError, ValueError) as error:
            if isinstance(error, PlanError):
                raise
            raise PlanError(
                f"{rows!r} is no table of a cost model.",
                hint="Give rows of a name and its numbers: (('all_gather', 1.6),).",
            ) from None
        names = [row[0] for row in own]
        twice = next((name for i, name in enumerate(names) if name in names[:i]), None)
        if twice is not None:
            raise PlanError(f"{twice!r} has two rows in a cost model.", hint="Give one for each.")
        return tuple(own)

    return convert


def text(value: object) -> str:
    if not isinstance(value, str):
        raise PlanError(f"{value!r} is no name in a cost model.", hint="Names are texts.")
    return value


def by_dtype(value: object) -> tuple[tuple[str, float], ...]:
    """Rates by the names of dtypes, from such a table or from one number for all."""
    if not isinstance(value, (tuple, list)):
        return (("", rate(value)),)
    rows = _RATES([(_dtype(name), *rates) for name, *rates in _RATES(value)])
    if not rows:
        raise PlanError("a cost model has no flops.", hint='Give a number, or (("", 1e12),).')
    return rows


def _dtype(name: str) -> str:
    """The short name of a dtype, from any of its names; "" stands for all others."""
    try:
        return dtype_name(parse_dtype(name)) if name else name
    except LayoutError as error:
        hint = "Write short names, as bf16 and f32, and '' for all other dtypes."
        raise PlanError(f"{name!r} is no dtype in a cost model.", hint=hint) from error


_RATES = table(rate)
