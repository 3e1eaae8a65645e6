"""The errors of fdtensor: each is one sentence with the values, the facts, and what to do next.

    try:
        fd.spmd(f)(x)
    except fd.errors.DataDependentError as error:
        print(error.facts["line"])

All are of the kind `FdtensorError`, and all ranks raise them before anything is sent.
"""

from __future__ import annotations

from fdtensor.layouts.errors import (
    ArgumentError,
    CheckpointError,
    CommError,
    DataDependentError,
    FallbackWarning,
    FdtensorError,
    IndexRangeError,
    LayoutError,
    MeshError,
    NotTorchError,
    OperandError,
    PlanError,
    RuleError,
    TraceError,
    ValueTreeError,
)

__all__ = [
    "ArgumentError",
    "CheckpointError",
    "CommError",
    "DataDependentError",
    "FallbackWarning",
    "FdtensorError",
    "IndexRangeError",
    "LayoutError",
    "MeshError",
    "NotTorchError",
    "OperandError",
    "PlanError",
    "RuleError",
    "TraceError",
    "ValueTreeError",
]
