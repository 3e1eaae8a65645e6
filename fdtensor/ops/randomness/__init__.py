"""Random ops in traced functions: torch's own, with numbers that depend on a key and the place."""

from fdtensor.ops.randomness.draw import DRAW, boxed
from fdtensor.ops.randomness.eager import Drawing
from fdtensor.ops.randomness.numbers import PASS_A_KEY, Numbers, drawn_again
from fdtensor.ops.randomness.of_torch import replacement
from fdtensor.ops.randomness.refusal import is_quiet, refuse_numbers, refuse_random
from fdtensor.ops.randomness.truncated import without_rejection

__all__ = [
    "DRAW",
    "PASS_A_KEY",
    "Drawing",
    "Numbers",
    "boxed",
    "drawn_again",
    "is_quiet",
    "refuse_numbers",
    "refuse_random",
    "replacement",
    "without_rejection",
]
