"""Elementwise sums, products and the backward kernels of elementwise functions.

A backward kernel is linear in the gradient, its first argument.
"""

from __future__ import annotations

import torch

from fdtensor.graph import Full
from fdtensor.placement import Partial, StridedShard
from fdtensor.rules.core import P, R, S, rule
from fdtensor.rules.linear import alike, numeric
from fdtensor.rules.monotone import shifted, stretched
from fdtensor.rules.pointwise import broadcast, tensors

aten = torch.ops.aten


@rule(aten.add.Tensor, aten.sub.Tensor)
def add(a, b, *, alpha=1):
    """`out[i] = a[i] + alpha * b[i]`, or with `-`"""
    yield from broadcast(tensors((a, b)))
    if not isinstance(b, Full):
        yield from shifted(a, b * alpha)
    elif isinstance(a, Full) and alike(a, b):
        yield (P, P), P


@rule(aten.rsub.Tensor)
def rsub(a, b, *, alpha=1):
    """`out[i] = b[i] - alpha * a[i]`"""
    yield from broadcast(tensors((a, b)))
    if isinstance(b, Full) and alike(a, b):
        yield (P, P), P


@rule(aten.add.Scalar, aten.sub.Scalar)
def add_scalar(a, b, alpha=1):
    """`out[i] = a[i] + alpha * b`, or with `-`"""
    yield from broadcast([a])
    yield from shifted(a, b * alpha)


@rule(aten.mul.Tensor)
def mul(a, b):
    """`out[i] = a[i] * b[i]`"""
    ins = tensors((a, b))
    yield from broadcast(ins)
    if len(ins) == 1:
        if numeric(*ins):
            yield (P,), P
        yield from stretched(ins[0], b)
    elif alike(a, b):
        yield (P, R), P
        yield (R, P), P
        pending = Partial("product")
        yield (pending, pending), pending


@rule(aten.div.Tensor, aten.true_divide.Tensor)
def div(a, b):
    """`out[i] = a[i] / b[i]`"""
    ins = tensors((a, b))
    yield from broadcast(ins)
    if numeric(*ins):
        yield (P, *[R] * (len(ins) - 1)), P


@rule(aten.div.Tensor_mode, aten.div.Scalar_mode)
def div_mode(a, b, *, rounding_mode):
    """`out[i] = round(a[i] / b[i])`"""
    if rounding_mode is None:
        yield from div(a, b)
    else:
        yield from broadcast(tensors((a, b)))


@rule(
    aten.elu_backward.default,
    aten.gelu_backward.default,
    aten.hardshrink_backward.default,
    aten.hardsigmoid_backward.default,
    aten.hardswish_backward.default,
    aten.hardtanh_backward.default,
    aten.infinitely_differentiable_gelu_backward.default,
    aten.leaky_relu_backward.default,
    aten.log_sigmoid_backward.default,
    aten.logit_backward.default,
    aten.mish_backward.default,
    aten.native_dropout_backward.default,
    aten.rrelu_with_noise_backward.default,
    aten.sigmoid_backward.default,
    aten.silu_backward.default,
    aten.softplus_backward.default,
    aten.softshrink_backward.default,
    aten.tanh_backward.default,
    aten.threshold_backward.default,
)
def backward(grad, *others, **kwargs):
    """`out[i] = grad[i] * f(a[i], b[i], ...)`"""
    ins = tensors((grad, *others, *kwargs.values()))
    yield from broadcast(ins)
    yield (P, *[R] * (len(ins) - 1)), P


@rule(aten._prelu_kernel.default)
def prelu(x, weight):
    """`out[i] = x[i] if x[i] > 0 else weight[i] * x[i]`"""
    yield from broadcast([x, weight])


@rule(aten._prelu_kernel_backward.default)
def prelu_backward(grad, x, weight):
    """`out[i], other[i] = grad[i] * f(x[i], weight[i]), grad[i] * g(x[i])`"""
    for before, after in broadcast([grad, x, weight]):
        yield before, (after, after)
    yield (P, R, R), (P, P)


@rule(aten.glu.default)
def glu(x, dim):
    """`out[i] = x[0, i] * sigmoid(x[1, i])`, with dim `dim` of `x` as two dims"""
    for before, after in _halves(x, dim):
        yield (before,), after


@rule(aten.glu_backward.default)
def glu_backward(grad, x, dim):
    """`out[0, i], out[1, i] = grad[i] * f(x[:, i]), grad[i] * g(x[:, i])`"""
    for before, after in _halves(x, dim):
        yield (after, before), before
    yield (P, R), P


def _halves(x, dim):
    for d in range(x.ndim):
        yield (StridedShard(d, 2), S(d)) if d == dim % x.ndim else (S(d), S(d))
