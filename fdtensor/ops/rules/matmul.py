"""Products of matrices: each index of the sum may be cut, and then a sum is pending."""

from __future__ import annotations

import re

import torch

from fdtensor.ops.notation.core import rule
from fdtensor.ops.notation.formula import formula
from fdtensor.ops.notation.ops import overloads

aten = torch.ops.aten

FORMULAS = {
    "mm": "c[i, j] = sum_k a[i, k] * b[k, j]",
    "bmm": "c[n, i, j] = sum_k a[n, i, k] * b[n, k, j]",
    "mv": "c[i] = sum_k a[i, k] * b[k]",
    "dot": "c = sum_k a[k] * b[k]",
    "vdot": "c = sum_k conj(a[k]) * b[k]",
    "outer ger": "c[i, j] = a[i] * b[j]",
    "linear": "c[*, j] = sum_k x[*, k] * weight[j, k] + bias[j]",
    "addmm": "c[i, j] = beta * bias[i, j] + alpha * sum_k a[i, k] * b[k, j]",
    "baddbmm": "c[n, i, j] = beta * bias[n, i, j] + alpha * sum_k a[n, i, k] * b[n, k, j]",
    "addbmm": "c[i, j] = beta * bias[i, j] + alpha * sum_{n, k} a[n, i, k] * b[n, k, j]",
    "addmv": "c[i] = beta * bias[i] + alpha * sum_k a[i, k] * b[k]",
    "addr": "c[i, j] = beta * bias[i, j] + alpha * a[i] * b[j]",
}
"""The formula of each op, from which its rows are read."""


def _addmv(at, bias, a, b, *, beta=1, alpha=1):
    if 0 in a.shape:  # the kernel would give the shape of a bias of one element
        return (bias * beta).expand(at.outs[0].shape).clone()
    return aten.addmv.default(bias, a, b, beta=beta, alpha=alpha)


def _letters(text: str) -> str:
    """The letters in the brackets of each factor of a term."""
    return ", ".join(letters.replace(",", "") for letters in re.findall(r"\[(.*?)\]", text))


def _summed(names: str, text: str) -> None:
    result, _, terms = text.partition(" = ")
    read = f"{' + '.join(map(_letters, terms.split(' + ')))} -> {_letters(result)}"

    def rows(*operands, beta=1, alpha=1):
        yield from formula(read, *operands)

    rows.__doc__ = f"`{text}`"
    rule(*overloads(names), local=_addmv if names == "addmv" else None)(rows)


for names, text in FORMULAS.items():
    _summed(names, text)


def _of_halves(wide, op):
    """Products of half operands in float32, which only CUDA has a kernel for."""

    def local(at, a, b, dtype):
        return wide(a, b, dtype) if a.is_cuda else op(a.to(dtype), b.to(dtype))

    return local


for name, text in (("mm", "i k, k j -> i j"), ("bmm", "n i k, n k j -> n i j")):
    _packet = getattr(aten, name)

    @rule(_packet.dtype, local=_of_halves(_packet.dtype, _packet.default), whole=True)
    def product(a, b, dtype, text=text):
        """`c[*, i, j] = sum_k a[*, i, k] * b[*, k, j]`, in a wider dtype"""
        yield from formula(text, a, b)


@rule(aten._int_mm.default)
def int_mm(a, b):
    """`c[i, j] = sum_k a[i, k] * b[k, j]`, of bytes whose sums would wrap around"""
    yield from formula("i k, k j -> i j", a, b, linear=[])


@rule(aten._addmm_activation.default)
def addmm_activation(bias, a, b, *, beta=1, alpha=1, use_gelu=False):
    """`c[i, j] = f(beta * bias[i, j] + alpha * sum_k a[i, k] * b[k, j])`"""
    yield from formula("i j + i K, K j -> i j", bias, a, b, linear=[])


@rule(aten.matmul.default)
def matmul(a, b):
    """`c[..., i, j] = sum_k a[..., i, k] * b[..., k, j]`, without i or j where it is a vector"""
    left, i = ("* i k", "i") if a.ndim > 1 else ("k", "")
    right, j = ("* k j", "j") if b.ndim > 1 else ("k", "")
    yield from formula(f"{left}, {right} -> * {i} {j}", a, b)


@rule(aten._trilinear.default)
def trilinear(a, b, c, expand_a, expand_b, expand_c, summed, unroll_dim=1):
    """`out[i] = sum_k a[i, k] * b[i, k] * c[i, k]`, each without the dims where it is expanded"""

    def without(gone):
        return " ".join(f"d{d}" for d in range(a.ndim + len(expand_a)) if d not in gone)

    ins = ", ".join(map(without, (expand_a, expand_b, expand_c)))
    yield from formula(f"{ins} -> {without(summed)}", a, b, c)
