"""Elementwise sums, products and the backward kernels of elementwise functions.

A backward kernel is linear in the gradient, its first argument.
"""

from __future__ import annotations

import torch

from fdtensor.graph import Full
from fdtensor.notation.core import P, R, S, rule
from fdtensor.placement import Partial, StridedShard
from fdtensor.rules.linear import alike, linear, scaled
from fdtensor.rules.monotone import shifted
from fdtensor.rules.pointwise import broadcast, overloads, tensors

aten = torch.ops.aten


def _sum(a, b, shift, slope):
    """Of two tensors, or of one where `b` is a number and the other is `slope * a + shift`."""
    yield from broadcast(tensors((a, b)))
    if not isinstance(b, Full):
        yield from shifted(a, shift, slope)
    elif isinstance(a, Full) and alike(a, b):
        yield (P, P), P


@rule(*overloads("add.Tensor add.Scalar sub.Tensor sub.Scalar"))
def add(a, b, alpha=1):
    """`out[i] = a[i] + alpha * b[i]`, or with `-`"""
    yield from _sum(a, b, 0 if isinstance(b, Full) else b * alpha, 1)


@rule(*overloads("rsub.Tensor rsub.Scalar"))
def rsub(a, b, alpha=1):
    """`out[i] = b[i] - alpha * a[i]`"""
    yield from _sum(a, b, b, -alpha)


@rule(aten.mul.Tensor)
def mul(a, b):
    """`out[i] = a[i] * b[i]`"""
    if not isinstance(b, Full):
        yield from scaled(a, b)
        return
    yield from broadcast(tensors((a, b)))
    if isinstance(a, Full) and alike(a, b):
        yield (P, R), P
        yield (R, P), P
        pending = Partial("product")
        yield (pending, pending), pending


@rule(*overloads("div.Tensor true_divide.Tensor"))
def div(a, b):
    """`out[i] = a[i] / b[i]`"""
    yield from linear(tensors((a, b)), "P")


@rule(*overloads("div.Tensor_mode div.Scalar_mode"))
def div_mode(a, b, *, rounding_mode):
    """`out[i] = round(a[i] / b[i])`"""
    yield from div(a, b) if rounding_mode is None else broadcast(tensors((a, b)))


BACKWARD = """
elu_backward gelu_backward hardshrink_backward hardsigmoid_backward hardswish_backward
hardtanh_backward infinitely_differentiable_gelu_backward leaky_relu_backward log_sigmoid_backward
logit_backward mish_backward native_dropout_backward rrelu_with_noise_backward sigmoid_backward
silu_backward softplus_backward softshrink_backward tanh_backward threshold_backward
"""


@rule(*overloads(BACKWARD))
def backward(grad, *others, **kwargs):
    """`out[i] = grad[i] * f(a[i], b[i], ...)`"""
    yield from linear(tensors((grad, *others, *kwargs.values())), "P")


@rule(aten._prelu_kernel_backward.default)
def prelu_backward(grad, x, weight):
    """`out[i], other[i] = grad[i] * f(x[i], weight[i]), grad[i] * g(x[i])`"""
    yield from linear([grad, x, weight], "P", outs=2)


@rule(aten.glu.default)
def glu(x, dim):
    """`out[i] = x[0, i] * sigmoid(x[1, i])`, with dim `dim` of `x` as two dims"""
    for d in range(x.ndim):
        yield (StridedShard(d, 2) if d == dim % x.ndim else S(d),), S(d)


@rule(aten.glu_backward.default)
def glu_backward(grad, x, dim):
    """`out[0, i], out[1, i] = grad[i] * f(x[:, i]), grad[i] * g(x[:, i])`"""
    for (before,), after in glu(x, dim):
        yield (after, before), before
    yield (P, R), P
