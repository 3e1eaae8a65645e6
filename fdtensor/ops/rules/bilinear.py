"""Elementwise sums, products and the backward kernels of elementwise functions.

A backward kernel is linear in the gradient, its first argument.
"""

from __future__ import annotations

from fdtensor.layouts.placement import StridedShard
from fdtensor.ops.graph import Full
from fdtensor.ops.notation.core import PRODUCT, P, R, S
from fdtensor.ops.notation.dtypes import alike
from fdtensor.ops.notation.ops import on, tensors
from fdtensor.ops.rules.linear import linear, scaled
from fdtensor.ops.rules.monotone import shifted
from fdtensor.ops.rules.pointwise import broadcast


def _sum(a, b, shift, slope):
    """The rows of a sum: of two tensors, or `slope * a + shift` where `b` is a number."""
    yield from broadcast(tensors((a, b)))
    if not isinstance(b, Full):
        yield from shifted(a, shift, slope)
    elif isinstance(a, Full) and alike(a, b):
        yield (P, P), P


@on("add.Tensor add.Scalar sub.Tensor sub.Scalar")
def add(a, b, alpha=1):
    """`out[i] = a[i] + alpha * b[i]`, or with `-`"""
    yield from _sum(a, b, 0 if isinstance(b, Full) else b * alpha, 1)


@on("rsub.Tensor rsub.Scalar")
def rsub(a, b, alpha=1):
    """`out[i] = b[i] - alpha * a[i]`"""
    yield from _sum(a, b, b, -alpha)


@on("mul.Tensor")
def mul(a, b):
    """`out[i] = a[i] * b[i]`"""
    if not (isinstance(a, Full) and isinstance(b, Full)):
        yield from scaled(b, a) if isinstance(b, Full) else scaled(a, b)
        return
    yield from broadcast(tensors((a, b)))
    if alike(a, b):
        yield (P, R), P
        yield (R, P), P
        yield (PRODUCT, PRODUCT), PRODUCT


@on("div.Tensor true_divide.Tensor div.Tensor_mode div.Scalar_mode")
def div(a, b, *, rounding_mode=None):
    """`out[i] = a[i] / b[i]`, which may be rounded"""
    yield from linear(tensors((a, b)), *(["P"] if rounding_mode is None else []))


FACTOR = """
ldexp.Tensor polar elu_backward gelu_backward hardshrink_backward hardsigmoid_backward
hardswish_backward hardtanh_backward infinitely_differentiable_gelu_backward leaky_relu_backward
log_sigmoid_backward logit_backward mish_backward native_dropout_backward
rrelu_with_noise_backward sigmoid_backward silu_backward softplus_backward softshrink_backward
tanh_backward threshold_backward
"""


@on(FACTOR)
def factor(x, *others, **kwargs):
    """`out[i] = x[i] * f(a[i], b[i], ...)`, where `x` may be a gradient"""
    yield from linear(tensors((x, *others, *kwargs.values())), "P")


@on("_prelu_kernel_backward")
def prelu_backward(grad, x, weight):
    """`out[i], other[i] = grad[i] * f(x[i], weight[i]), grad[i] * g(x[i])`"""
    yield from linear([grad, x, weight], "P", outs=2)


@on("glu")
def glu(x, dim):
    """`out[i] = x[0, i] * sigmoid(x[1, i])`, with dim `dim` of `x` as two dims"""
    for d in range(x.ndim):
        yield (StridedShard(d, 2) if d == dim % x.ndim else S(d),), S(d)


@on("glu_backward")
def glu_backward(grad, x, dim):
    """`out[0, i], out[1, i] = grad[i] * f(x[:, i]), grad[i] * g(x[:, i])`"""
    for (before,), after in glu(x, dim):
        yield (after, before), before
    yield (P, R), P
