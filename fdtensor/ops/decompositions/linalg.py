"""Transforms dim by dim, distances as norms, factors by blocks of rows: any dim may be cut."""

from __future__ import annotations

import torch

from fdtensor.ops.decompositions.core import decomposition
from fdtensor.ops.decompositions.scan import in_blocks, joined_blocks
from fdtensor.ops.householder import SIGNS

aten = torch.ops.aten


def _others(x, dims, normalization, forward):
    """The transforms of the other dims, one by one: the cut moves from one to another in between.

    The last dim comes first, and inversely the first: from rows, by way of columns, to rows again.
    """
    if not dims:
        raise NotImplementedError("the transform of one dim has no pieces")
    for d in reversed(dims) if forward else dims:
        x = aten._fft_c2c(x, [d], normalization, forward)
    return x


@decomposition(aten._fft_c2c.default)
def fft_c2c(x, dim, normalization, forward):
    """`out[k] = sum_j w^(j * k) * x[j]`, one dim after the other."""
    first, others = (dim[-1:], dim[:-1]) if forward else (dim[:1], dim[1:])
    x = aten._fft_c2c(x, first, normalization, forward)
    return _others(x, others, normalization, forward)


@decomposition(aten._fft_r2c.default)
def fft_r2c(x, dim, normalization, onesided):
    """The last dim from real numbers, then the others."""
    x = aten._fft_r2c(x, dim[-1:], normalization, onesided)
    return _others(x, dim[:-1], normalization, True)


@decomposition(aten._fft_c2r.default)
def fft_c2r(x, dim, normalization, last_dim_size):
    """The other dims, then the last one to real numbers."""
    x = _others(x, dim[:-1], normalization, False)
    return aten._fft_c2r(x, dim[-1:], normalization, last_dim_size)


@decomposition(aten.linalg_qr.default, blocked=True)
def qr(blocks, a, mode="reduced"):
    """`a[b] = q[b] @ r[b]`, and so for the rows of all `r`; signs are those of one QR of `a`.

    Demmel et al., "Communication-optimal Parallel and Sequential QR and LU Factorizations" (2012).
    """
    rows, columns = a.shape[-2:]
    if mode == "complete" or a.is_complex() or not 0 < columns <= -(-rows // blocks):
        raise NotImplementedError("blocks of fewer rows than columns have no triangle")
    q, r = aten.linalg_qr(in_blocks(a, a.ndim - 2, blocks, 0.0))
    outer, r = aten.linalg_qr(r.flatten(-3, -2))
    outer = outer.unflatten(-2, (blocks, columns))
    top = (q[..., :columns, :] @ outer)[..., 0, :, :]
    signs = SIGNS(top, r.diagonal(dim1=-2, dim2=-1))
    r = signs.unsqueeze(-1) * r
    if mode == "r":
        return a.new_empty([0]), r
    q = q @ (outer * signs.unsqueeze(-2).unsqueeze(-2))
    return joined_blocks(q, a.ndim - 2, rows), r


@decomposition(aten._linalg_svd.default, blocked=True)
def svd(blocks, a, full_matrices=False, compute_uv=True, *, driver=None):
    """`a = q @ r`, `r = u @ diag(s) @ v^H`, as kernels do with matrices that are tall enough."""
    if full_matrices and compute_uv:
        raise NotImplementedError("blocks of rows are not those of a square matrix")
    q, r = qr(blocks, a, "reduced" if compute_uv else "r")
    u, s, v = aten._linalg_svd(r, False, compute_uv, driver=driver)
    return (q @ u if compute_uv else u), s, v


@decomposition(aten.linalg_pinv.atol_rtol_tensor, blocked=True)
def pinv(blocks, a, *, atol=None, rtol=None, hermitian=False):
    """`a = q @ r`, `out = pinv(r) @ q^H`; small singular values are small beside those of `a`."""
    if hermitian:
        raise NotImplementedError("a symmetric matrix is not tall")
    q, r = qr(blocks, a)
    if rtol is None:
        least = a.new_full((), torch.finfo(a.dtype).eps * max(a.shape[-2:]), dtype=torch.float64)
        rtol = least if atol is None else torch.where(atol > 0, 0.0, least)
    return aten.linalg_pinv.atol_rtol_tensor(r, atol=atol, rtol=rtol) @ q.mT


@decomposition(aten.dist.default)
def dist(a, b, p=2):
    """`c = norm(a - b)`"""
    return torch.linalg.vector_norm(a - b, p)


@decomposition(aten._cdist_forward.default)
def cdist(a, b, p, compute_mode):
    """`c[i, j] = norm(a[i] - b[j])`"""
    return torch.linalg.vector_norm(a.unsqueeze(-2) - b.unsqueeze(-3), p, -1)


@decomposition(aten._pdist_forward.default)
def pdist(a, p=2):
    """`c[i, j] = norm(a[i] - a[j])` for `i < j`"""
    i, j = torch.triu_indices(a.shape[0], a.shape[0], 1, device=a.device)
    return torch.linalg.vector_norm(a[i] - a[j], p, -1)
