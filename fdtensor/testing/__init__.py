"""What tests of distributed code need: laws over all layouts, strategies, values, real ranks.

    assert_same_on_every_layout(f, x, w)  # as in one process, whatever the layouts
    @given(sharded((x, w)))  # any DTensors of these tensors, for a law of your own
    pytest_plugins = ["fdtensor.testing.fixtures"]  # gloo_ranks(4): four real ranks in a test

`every_layout` has the law and `strategies` draws meshes, layouts, types, redistributions and
DTensors, by hypothesis; `values` makes the tensors that go with them, `pool` keeps gloo processes
up and `fixtures` hands them to pytest. Each is imported at its first use: the pool does without
hypothesis, and all but the fixtures without pytest. `verify` tries the rows of an op and
`discovery` finds some. It imports from all other rooms.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fdtensor.testing.every_layout import assert_same_on_every_layout, assert_same_on_layouts
    from fdtensor.testing.pool import GlooPool, WorkerError
    from fdtensor.testing.strategies import (
        layouts,
        memory_formats,
        meshes,
        placements,
        redistributions,
        shapes,
        sharded,
        types,
    )
    from fdtensor.testing.strides import Strides
    from fdtensor.testing.values import block, full_tensor, gather_full, reduced, scatter

__all__ = [
    "GlooPool",
    "Strides",
    "WorkerError",
    "assert_same_on_every_layout",
    "assert_same_on_layouts",
    "block",
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
]

_HOMES = ("pool", "values", "strides", "every_layout", "strategies")


def __getattr__(name: str) -> object:
    for home in _HOMES if name in __all__ else ():
        module = import_module(f"{__name__}.{home}")
        if name in module.__all__:
            return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
