"""Collectives by the names of mesh axes, for functions of `shard_map`; the groups they run in.

fd.shard_map(lambda x: fd.collectives.psum(x.sum(), "dp"), mesh)(x)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fdtensor.layouts.lazy import lazy_names
from fdtensor.tensors.shard_map.collectives import (
    all_gather,
    all_to_all,
    axis_index,
    axis_size,
    pmax,
    pmean,
    pmin,
    ppermute,
    psum,
    reduce_scatter,
)

if TYPE_CHECKING:
    from fdtensor.runtime.control.process import groups

__all__ = [
    "all_gather",
    "all_to_all",
    "axis_index",
    "axis_size",
    "groups",
    "pmax",
    "pmean",
    "pmin",
    "ppermute",
    "psum",
    "reduce_scatter",
]

if not TYPE_CHECKING:  # checkers would take any name for one of this module
    __getattr__, __dir__ = lazy_names(__name__, {"runtime.control.process": ["groups"]})
