"""`cotangents_again`: a backward as a function of DTensors, which has a derivative of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs

from fdtensor.programs.options import Options
from fdtensor.tensors.dtensor import DTensor

__all__ = ["cotangents_again"]


def cotangents_again(
    make: Callable[[Any, Options], Callable[..., Any]],
    options: Options,
    derived: dict[Any, Any],
    g: Any,
    types: Any,
    values: Any,
    ct_types: Any,
    cts: Any,
    own: Any,
    comm: Any,
) -> list[Any]:
    """The cotangents of inputs as values with derivatives of their own.

    `derived` has the functions of DTensors that `make` has made of such backwards.
    """
    known = derived.get(g)
    if known is None:
        known = derived[g] = make(g, attrs.evolve(options, dynamic=None, **own))
    tensors = [DTensor(v, t, comm) for v, t in zip(values, types, strict=True)]
    cotangents = [DTensor(v, t, comm) for v, t in zip(cts, ct_types, strict=True)]
    return [grad.local for grad in known(tensors, cotangents)[1]]
