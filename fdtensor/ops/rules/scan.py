"""Scans from the end, of which derivatives of scans are made."""

from __future__ import annotations

from typing import Any

import torch

from fdtensor.ops.notation.core import P, S, rule
from fdtensor.ops.rewrite import BACKWARD_SCANS

aten = torch.ops.aten


def _from_end(scan: Any, op: Any) -> None:
    def local(at, x, dim):
        return scan(x.flip(dim), dim).flip(dim) if x.ndim else scan(x, dim)

    @rule(op, local=local, whole=True)
    def rows(x, dim):
        """`out[i, j] = sum_(k >= j) x[i, k]`, or `log sum exp`"""
        for d in range(x.ndim):
            if d != dim % x.ndim:
                yield (S(d),), S(d)
        if scan is aten.cumsum.default:
            yield (P,), P


for _scan, _op in BACKWARD_SCANS.items():
    _from_end(_scan, _op)
