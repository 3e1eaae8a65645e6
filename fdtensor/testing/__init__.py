"""What tests of distributed code need: strategies for every record, values to spread, real ranks.

`strategies` draws meshes, layouts, types and redistributions, `values` makes the tensors that go
with them, and `pool` keeps gloo processes up. Each is imported at its first use: the pool does
without hypothesis.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fdtensor.testing.pool import GlooPool, WorkerError
    from fdtensor.testing.strategies import (
        layouts,
        meshes,
        placements,
        redistributions,
        shapes,
        types,
    )
    from fdtensor.testing.values import block, full_tensor, gather_full, reduced, scatter

__all__ = [
    "GlooPool",
    "WorkerError",
    "block",
    "full_tensor",
    "gather_full",
    "layouts",
    "meshes",
    "placements",
    "redistributions",
    "reduced",
    "scatter",
    "shapes",
    "types",
]


def __getattr__(name: str) -> object:
    for home in ("pool", "values", "strategies") if name in __all__ else ():
        module = import_module(f"{__name__}.{home}")
        if name in module.__all__:
            return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
