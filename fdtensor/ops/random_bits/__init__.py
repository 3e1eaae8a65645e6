"""Keys and the random bits of any block of a tensor: they depend on the key and the place alone."""

from fdtensor.ops.random_bits.bounded import integers, integers_of
from fdtensor.ops.random_bits.fill import filled, filled_by_each
from fdtensor.ops.random_bits.floats import (
    exponential_of,
    gumbel_of,
    normal_of,
    truncated_of,
    uniform_of,
)
from fdtensor.ops.random_bits.keys import Key, fold_in, key, split
from fdtensor.ops.random_bits.places import Places
from fdtensor.ops.random_bits.threefry import RECORDING

__all__ = [
    "RECORDING",
    "Key",
    "Places",
    "exponential_of",
    "filled",
    "filled_by_each",
    "fold_in",
    "gumbel_of",
    "integers",
    "integers_of",
    "key",
    "normal_of",
    "split",
    "truncated_of",
    "uniform_of",
]
