"""Random numbers that depend on a key and the place in the full tensor, whatever the layout.

Keys and draws are those of JAX, by Threefry-2x32 in its partitionable form. A draw takes a shape
and gives a plain tensor, or takes a `TensorType` and a Comm and gives a DTensor of which each rank
makes its own block, without traffic.
"""

from fdtensor.ops.random_bits import Key, key
from fdtensor.tensors.random.choices import bernoulli, categorical, dropout, permutation
from fdtensor.tensors.random.keyed import fold_in, split
from fdtensor.tensors.random.numbers import (
    bits,
    exponential,
    gumbel,
    normal,
    randint,
    truncated_normal,
    uniform,
)

__all__ = [
    "Key",
    "bernoulli",
    "bits",
    "categorical",
    "dropout",
    "exponential",
    "fold_in",
    "gumbel",
    "key",
    "normal",
    "permutation",
    "randint",
    "split",
    "truncated_normal",
    "uniform",
]
