"""Keys and the random bits of any block of a tensor: they depend on the key and the place alone."""

from fdtensor.random_bits.fill import filled
from fdtensor.random_bits.floats import gumbel_of, normal_of, truncated_of, uniform_of
from fdtensor.random_bits.integers import integers_of
from fdtensor.random_bits.keys import Key, fold_in, key, split
from fdtensor.random_bits.places import Places

__all__ = [
    "Key",
    "Places",
    "filled",
    "fold_in",
    "gumbel_of",
    "integers_of",
    "key",
    "normal_of",
    "split",
    "truncated_of",
    "uniform_of",
]
