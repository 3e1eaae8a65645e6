"""The notation of rules: placements and rows, index formulas, blocks, windows and runs."""

from fdtensor.ops.notation.core import (
    At,
    Block,
    Halo,
    P,
    R,
    Row,
    Rule,
    S,
    Units,
    Window,
    rule,
    rule_of,
)

__all__ = [
    "At",
    "Block",
    "Halo",
    "P",
    "R",
    "Row",
    "Rule",
    "S",
    "Units",
    "Window",
    "rule",
    "rule_of",
]
