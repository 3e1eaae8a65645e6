"""Random ops in traced functions: torch's own, with numbers that depend on a key and the place."""

from fdtensor.randomness.draw import DRAW, boxed
from fdtensor.randomness.eager import Drawing
from fdtensor.randomness.numbers import Numbers
from fdtensor.randomness.of_torch import replacement
from fdtensor.randomness.refusal import is_quiet, refuse_random
from fdtensor.randomness.truncated import without_rejection

__all__ = [
    "DRAW",
    "Drawing",
    "Numbers",
    "boxed",
    "is_quiet",
    "refuse_random",
    "replacement",
    "without_rejection",
]
