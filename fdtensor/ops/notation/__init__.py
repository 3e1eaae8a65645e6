"""What rules are written in: placements and rows, index formulas, blocks, windows and runs."""

from fdtensor.ops.notation.core import (
    At,
    Block,
    Needs,
    P,
    R,
    Row,
    Rule,
    S,
    U,
    Window,
    rule,
    rule_of,
)

__all__ = ["At", "Block", "Needs", "P", "R", "Row", "Rule", "S", "U", "Window", "rule", "rule_of"]
