"""Linear algebra on stacks of matrices: each matrix is whole, right-hand sides are free."""

from __future__ import annotations

import torch

from fdtensor.ops.householder import SIGNS
from fdtensor.ops.notation.core import P, R, S, rule
from fdtensor.ops.notation.empty import unless_empty
from fdtensor.ops.notation.formula import formula
from fdtensor.ops.notation.ops import on, tensors

aten = torch.ops.aten


def _rows(text, *operands, linear=()):
    """The rows of a formula: of its outputs only the first may be pending.

    Those after it are factors, which do not depend on dims that they lack; `0` is an empty output.
    """
    for ins, outs in formula(text, *operands, linear=linear):
        first = R if "-> 0" in text else outs[0]
        yield ins, (first, *[R if p == P else p for p in outs[1:]])


FORMULAS = {
    "* N N -> * N": "_linalg_eigvals",
    "* N N -> * N N": "cholesky cholesky_inverse linalg_matrix_exp",
    "* N N -> * N N, *": "linalg_cholesky_ex linalg_inv_ex",
    "* N N -> * N, * N N": "linalg_eig",
    "* N N -> *, * N N, * N": "_linalg_det",
    "* N N -> *, *, * N N, * N": "_linalg_slogdet",
    "* M N -> * M N, * K": "geqrf",
    "* M N -> * M N, * K, *": "linalg_ldl_factor_ex linalg_lu_factor_ex",
    "* M N, * K -> * M N": "linalg_householder_product",
    "* M N, *, * -> * N M": "linalg_pinv.atol_rtol_tensor",
    "* i M, * j M -> * i j": "_cdist_forward _euclidean_dist",
}
"""The index formulas of the ops of matrices."""

LINEAR = {
    ("* N k, * N N -> * N k", 0): "cholesky_solve",
    ("* N k, * N N -> * N k, * N N", 0): "triangular_solve",
    ("* N N, * N, * N k -> * N k", 2): "linalg_ldl_solve",
    ("Q, N m, Q -> N m", 0): "_pdist_backward",
}
"""The ops that are linear in one operand: by their formula and its number."""


def _registered(names: str, text: str, linear: tuple[int, ...]) -> None:
    def rows(*args, **named):
        yield from _rows(text, *tensors((*args, *named.values())), linear=linear)

    rows.__doc__ = f"`{text}`"
    on(names)(rows)


for text, names in FORMULAS.items():
    _registered(names, text, ())
for (text, operand), names in LINEAR.items():
    _registered(names, text, (operand,))


@rule(aten._linalg_eigh.default)
def eigh(a, UPLO="L", compute_v=True):
    """`a = v @ diag(w) @ v^H`: `w, v`"""
    yield from _rows(f"* N N -> * N, {'* N N' if compute_v else '0'}", a)


@rule(aten._linalg_svd.default)
def svd(a, full_matrices=False, compute_uv=True, *, driver=None):
    """`a = u @ diag(s) @ v^H`: `u, s, v^H`"""
    yield from _rows("* M N -> * M K, * K, * K N" if compute_uv else "* M N -> 0, * K, 0", a)


@rule(aten.linalg_qr.default)
def qr(a, mode="reduced"):
    """`a = q @ r`: `q, r`"""
    yield from _rows(f"* M N -> {'0' if mode == 'r' else '* M K'}, * K N", a)


@rule(SIGNS)
def signs(top, diagonal):
    """`s[k]` is the sign with which a reflector takes column k of what is left to an axis."""
    yield from _rows("* N N, * N -> * N", top, diagonal)


@rule(aten.linalg_lu.default)
def lu(a, *, pivot=True):
    """`a = p @ l @ u`: `p, l, u`"""
    yield from _rows(f"* M N -> {'* M M' if pivot else '0'}, * M K, * K N", a)


@rule(aten.lu_unpack.default)
def lu_unpack(factors, pivots, unpack_data=True, unpack_pivots=True):
    """`p, l, u` of packed factors"""
    p, both = "* M M" if unpack_pivots else "0", "* M K, * K N" if unpack_data else "0, 0"
    yield from _rows(f"* M N, * K -> {p}, {both}", factors, pivots)


def _sides(left: bool) -> str:
    """Right-hand sides as columns, or as rows, with the unknown on the left."""
    return "* N k" if left else "* k N"


@rule(aten.linalg_lu_solve.default)
def lu_solve(factors, pivots, b, *, left=True, adjoint=False):
    """`x` with `a @ x = b`, or `x @ a = b`"""
    text = f"* N N, * N, {_sides(left)} -> {_sides(left)}"
    yield from _rows(text, factors, pivots, b, linear=[2])


@rule(aten.linalg_solve_triangular.default)
def solve_triangular(a, b, *, upper, left=True, unitriangular=False):
    """`x` with `a @ x = b`, or `x @ a = b`"""
    yield from _rows(f"* N N, {_sides(left)} -> {_sides(left)}", a, b, linear=[1])


@rule(aten._linalg_solve_ex.default)
def solve(a, b, *, left=True, check_errors=False):
    """`x` with `a @ x = b`, or `x @ a = b`, and the factors of `a`, placed like `a`"""
    sides = "* N" if b.ndim == 1 or b.shape == a.shape[:-1] else _sides(left)
    for ins, outs in _rows(f"* N N, {sides} -> {sides}", a, b, linear=[1]):
        yield ins, (*outs, *[ins[0]] * 3)


@rule(aten.ormqr.default)
def ormqr(a, tau, other, left=True, transpose=False):
    """`q @ other`, or `other @ q`, where reflectors make `q`"""
    yield from _rows(f"* N K, * K, {_sides(left)} -> {_sides(left)}", a, tau, other, linear=[2])


@rule(aten.linalg_cross.default)
def cross(a, b, *, dim=-1):
    """`c[i, :]` perpendicular to `a[i, :]` and `b[i, :]`"""
    for ins, outs in formula("*, * -> *", a, b):
        if outs[0] != S(dim % max(a.ndim, b.ndim)):
            yield ins, outs


@rule(aten._cdist_backward.default, local=unless_empty(aten._cdist_backward.default))
def cdist_backward(grad, a, b, p, distances):
    """`da[i, m] = sum_j grad[i, j] * f(a[i, m] - b[j, m], distances[i, j])`"""
    if grad.numel:  # else it has the shape of `a`, not broadcast
        yield from formula("* i j, * i m, * j m, * i j -> * i m", grad, a, b, distances, linear=[0])
