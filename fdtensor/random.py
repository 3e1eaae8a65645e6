"""Random numbers that depend on a key and the place in the full tensor, whatever the layout.

    key = fd.random.key(0)
    w = fd.random.normal(key, fd.TensorType((8, 16), torch.float32, layout), comm)

Keys and draws are those of JAX, by Threefry-2x32 in its partitionable form. A draw takes a shape
and gives a plain tensor, or takes a `TensorType` and a Comm and gives a DTensor of which each rank
makes its own block, without traffic.
"""

from __future__ import annotations

from fdtensor.tensors.random import (
    Key,
    bernoulli,
    bits,
    categorical,
    dropout,
    exponential,
    fold_in,
    gumbel,
    key,
    normal,
    permutation,
    randint,
    split,
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
