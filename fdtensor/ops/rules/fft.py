"""Fourier transforms: linear, and independent along the dims that they do not transform."""

from __future__ import annotations

import torch

from fdtensor.layouts.torch_private import OpOverload
from fdtensor.ops.notation.core import P, S, rule

aten = torch.ops.aten

DTYPES = {
    aten._fft_c2c.default: lambda dtype: dtype,
    aten._fft_r2c.default: torch.dtype.to_complex,
    aten._fft_c2r.default: torch.dtype.to_real,
}
"""The dtype of the result of an op, from that of its operand."""


def _transform(op: OpOverload) -> None:
    def local(at, x, *args):
        if 0 in x.shape:  # which the kernels refuse
            return x.new_zeros(at.outs[0].shape, dtype=DTYPES[op](x.dtype))
        return op(x, *args)

    @rule(op, local=local)
    def rows(x, dim, *_):
        """`out[i, k] = sum_j w^(j * k) * x[i, j]`"""
        yield (P,), P
        for d in set(range(x.ndim)) - {d % x.ndim for d in dim}:
            yield (S(d),), S(d)


for op in DTYPES:
    _transform(op)
