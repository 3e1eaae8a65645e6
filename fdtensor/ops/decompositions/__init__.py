"""Ops as simpler ones, whose pieces have rows where the op has none. Every file is a family."""

import importlib
import pkgutil

from fdtensor.ops.decompositions.core import (
    DECOMPOSITIONS,
    Decomposition,
    decomposition,
    decomposition_of,
    own_decomposition,
)

__all__ = [
    "DECOMPOSITIONS",
    "Decomposition",
    "decomposition",
    "decomposition_of",
    "own_decomposition",
]

for _family in sorted(module.name for module in pkgutil.iter_modules(__path__)):
    importlib.import_module(f"{__name__}.{_family}")
