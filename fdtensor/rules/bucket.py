"""Searching in sorted values: where they are cut, the counts of the parts add up."""

from __future__ import annotations

import torch

from fdtensor.rules.core import P, R, S, rule

aten = torch.ops.aten


@rule(aten.searchsorted.Tensor)
def searchsorted(lines, x, *, out_int32=False, right=False, side=None, sorter=None):
    """`out[i, j]` = how many of `lines[i]` are less than `x[i, j]`, or not greater"""
    rest = () if sorter is None else (R,)
    many = lines.ndim > 1
    for d in range(x.ndim):
        if many and d < x.ndim - 1:
            yield (S(d), S(d), *(S(d) for _ in rest)), S(d)
        else:
            yield (R, S(d), *rest), S(d)
    if sorter is None:
        yield (S(lines.ndim - 1), R), P  # counts of parts add up


@rule(aten.searchsorted.Scalar)
def searchsorted_scalar(lines, x, *, out_int32=False, right=False, side=None, sorter=None):
    """`out` = how many of `lines` are less than `x`, or not greater"""
    if sorter is None:
        yield (S(0),), P


@rule(aten.bucketize.Tensor)
def bucketize(x, boundaries, *, out_int32=False, right=False):
    """`out[i]` = how many of `boundaries` are less than `x[i]`, or not greater"""
    for d in range(x.ndim):
        yield (S(d), R), S(d)
    yield (R, S(0)), P
