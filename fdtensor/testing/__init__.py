"""Tests of distributed code: laws over all layouts, strategies, values, real ranks.

    assert_same_on_every_layout(f, x, w)  # as in one process, whatever the layouts
    @given(sharded((x, w)))  # any DTensors of these tensors, for a law of your own
    pytest_plugins = ["fdtensor.testing.fixtures"]  # gloo_ranks(4): four real ranks in a test

`every_layout` has the law; `strategies` draws meshes, layouts, types and redistributions by
hypothesis, and `tensor_strategies` DTensors; `values` makes the tensors that go with them, `pool`
keeps gloo processes up and `fixtures` hands them to pytest. Each is imported at its first use: the
pool does without hypothesis, and all but the fixtures without pytest. `verify` tries the rows of an
op and `discovery` finds some. It imports from all other rooms.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fdtensor.layouts.lazy import lazy_names

if TYPE_CHECKING:
    from fdtensor.testing.discovery import Discovered, discover
    from fdtensor.testing.every_layout import assert_same_on_every_layout, assert_same_on_layouts
    from fdtensor.testing.pool import GlooPool, WorkerError
    from fdtensor.testing.row_checks import verify
    from fdtensor.testing.strategies import (
        layouts,
        meshes,
        placements,
        redistributions,
        shapes,
        types,
    )
    from fdtensor.testing.strides import Strides
    from fdtensor.testing.tensor_strategies import memory_formats, sharded
    from fdtensor.testing.values import block, full_tensor, gather_full, reduced, scatter

__all__ = [
    "Discovered",
    "GlooPool",
    "Strides",
    "WorkerError",
    "assert_same_on_every_layout",
    "assert_same_on_layouts",
    "block",
    "discover",
    "full_tensor",
    "gather_full",
    "layouts",
    "memory_formats",
    "meshes",
    "placements",
    "redistributions",
    "reduced",
    "scatter",
    "shapes",
    "sharded",
    "types",
    "verify",
]

if not TYPE_CHECKING:  # checkers would take any name for one of this package
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "testing.pool": ["GlooPool", "WorkerError"],
            "testing.values": ["block", "full_tensor", "gather_full", "reduced", "scatter"],
            "testing.strides": ["Strides"],
            "testing.every_layout": ["assert_same_on_every_layout", "assert_same_on_layouts"],
            "testing.strategies": [
                *("layouts", "meshes", "placements", "redistributions", "shapes", "types"),
            ],
            "testing.tensor_strategies": ["memory_formats", "sharded"],
            "testing.discovery": ["Discovered", "discover"],
            "testing.row_checks": ["verify"],
        },
    )
