"""Products, convolutions, pools and linear algebra."""

from __future__ import annotations

from tests.hunt.draw import Draw, Op, Unfit

__all__ = ["OPS"]


def _matmul(d: Draw, x: str) -> str:
    inner = d.shape(x)[-1]
    options = [d.sized(x, inner), d.sized(x, inner, d.between(0, 4))]
    if d[x].ndim > 2:
        options.append(d.sized(x, d.shape(x)[-3], inner, d.between(1, 3)))
    return f"{x} @ {d.one(options)}"


def _mm(d: Draw, x: str) -> str:
    m, k = d.shape(x)
    n = d.between(0, 5)
    return d.one(
        (
            f"torch.mm({x}, {d.sized(x, k, n)})",
            f"torch.addmm({d.sized(x, n)}, {x}, {d.sized(x, k, n)}, beta=2)",
            f"F.linear({x}, {d.sized(x, n, k)}, {d.sized(x, n)})",
            f"torch.mv({x}, {d.sized(x, k)})",
            f"{x}.t() @ {x}",
            f"torch.addr({x}, {d.sized(x, m)}, {d.sized(x, k)})",
        )
    )


def _bmm(d: Draw, x: str) -> str:
    b, m, k = d.shape(x)
    n = d.between(0, 3)
    return d.one(
        (
            f"torch.bmm({x}, {d.sized(x, b, k, n)})",
            f"torch.baddbmm({d.sized(x, b, m, n)}, {x}, {d.sized(x, b, k, n)}, alpha=2)",
            f"torch.addbmm({d.sized(x, m, n)}, {x}, {d.sized(x, b, k, n)})",
        )
    )


def _einsum(d: Draw, x: str) -> str:
    letters = "abcde"[: d[x].ndim]
    sizes = dict(zip(letters, d.shape(x))) | {"z": d.between(1, 3)}
    other = "".join(d.random.sample(letters, d.between(0, len(letters)))) + d.one(("", "z"))
    y = d.sized(x, *(sizes[c] for c in other))
    every = list(dict.fromkeys(letters + other))
    out = "".join(d.random.sample(every, d.between(0, min(4, len(every)))))
    return f"torch.einsum('{letters},{other}->{out}', {x}, {y})"


def _tensordot(d: Draw, x: str) -> str:
    count = d.between(0, min(2, d[x].ndim))
    shape = d.shape(x)[d[x].ndim - count :]
    return f"torch.tensordot({x}, {d.sized(x, *shape, 2)}, {count})"


def _vectors(d: Draw, x: str) -> str:
    n = d.shape(x)[0]
    y = d.sized(x, n)
    return d.one(
        (
            f"torch.dot({x}, {y})",
            f"torch.outer({x}, {y})",
            f"torch.vdot({x}, {y})",
            f"torch.inner({x}, {y})",
            f"torch.vander({x}, 3)",
        )
    )


def _kron(d: Draw, x: str) -> str:
    return f"torch.kron({x}, {d.sized(x, *[d.between(1, 2) for _ in range(d[x].ndim)])})"


def _conv(d: Draw, x: str) -> str:
    n = d[x].ndim - 2
    channels = d.shape(x)[1]
    groups = d.one(g for g in (1, 1, 1, 2, 3, channels) if g and channels % g == 0)
    kernel = [d.between(1, 3) for _ in range(n)]
    stride, padding, dilation = d.between(1, 2), d.between(0, 2), d.one((1, 1, 2))
    if d.chance(0.3):
        weight = d.fresh([channels, d.between(1, 2), *kernel], d[x].dtype)
        given = f"{weight}, None, {stride}, {d.between(0, 1)}, groups={groups}"
        return f"F.conv_transpose{n}d({x}, {given})"
    out = groups * d.between(1, 3)
    weight = d.fresh([out, channels // groups, *kernel], d[x].dtype)
    bias = d.one(("None", d.fresh([out], d[x].dtype)))
    return f"F.conv{n}d({x}, {weight}, {bias}, {stride}, {padding}, {dilation}, {groups})"


def _image(d: Draw, x: str) -> str:
    """An input for a convolution."""
    n = d.between(1, 2) if d.chance(0.85) else 3
    side = {1: 6, 2: 5, 3: 3}[n]
    shape = [d.between(1, 3), d.one((1, 2, 3, 4)), *[d.between(1, side) for _ in range(n)]]
    return f"{d.fresh(shape)} * 1"


def _pool(d: Draw, x: str) -> str:
    n = d[x].ndim - 2
    k, stride = d.between(1, 3), d.between(1, 2)
    return d.one(
        (
            f"F.max_pool{n}d({x}, {k}, {stride})",
            f"F.max_pool{n}d({x}, {k}, {stride}, {d.between(0, k // 2)}, ceil_mode=True)",
            f"F.avg_pool{n}d({x}, {k}, {stride}, {d.between(0, k // 2)})",
            f"F.adaptive_avg_pool{n}d({x}, {d.between(1, 3)})",
            f"F.adaptive_max_pool{n}d({x}, {d.between(1, 3)})",
            f"F.lp_pool{min(n, 3)}d({x}, 2, {k})",
        )
    )


def _resized(d: Draw, x: str) -> str:
    mode = {
        3: ("nearest", "linear"),
        4: ("nearest", "bilinear", "bicubic", "area", "nearest-exact"),
        5: ("nearest", "trilinear"),
    }
    size = [d.between(1, 6) for _ in range(d[x].ndim - 2)]
    return f"F.interpolate({x}, {size}, mode={d.one(mode[d[x].ndim])!r})"


def _fold(d: Draw, x: str) -> str:
    _n, c, h, w = d.shape(x)
    if min(h, w) < 2 or not c:
        raise Unfit
    spread = f"F.unfold({x}, 2, padding={d.between(0, 1)}, stride={d.between(1, 2)})"
    return d.one((spread, f"F.fold(F.unfold({x}, 2), ({h}, {w}), 2)"))


def _square(d: Draw, x: str) -> str:
    """A matrix that is far from singular."""
    n = d.shape(x)[-1]
    return f"({x} @ {x}.mT + {4 + n} * torch.eye({d.shape(x)[-2]}, dtype={x}.dtype))"


def _linalg(d: Draw, x: str) -> str:
    a = _square(d, x)
    return d.one(
        (
            f"torch.linalg.inv({a})",
            f"torch.linalg.det({a} / 4)",
            f"torch.linalg.slogdet({a})",
            f"torch.linalg.solve({a}, {x})",
            f"torch.linalg.cholesky({a})",
            f"torch.linalg.eigvalsh({a})",
            f"torch.linalg.matrix_power({x} @ {x}.mT, 2)",
            f"torch.linalg.svdvals({x})",
            f"torch.linalg.pinv({a})",
            f"torch.linalg.solve_triangular({a}.tril(), {x}, upper=False)",
            f"torch.matrix_exp({a} / 64)",
            f"torch.linalg.matrix_norm({x}, {d.one(('1', 'inf', repr('fro'), repr('nuc')))})",
            f"torch.linalg.qr({a})[1].abs()",
            f"torch.cholesky_inverse(torch.linalg.cholesky({a}))",
            f"torch.linalg.lu_factor({a})[0]",
        )
    )


def _pairs(d: Draw, x: str) -> str:
    m, k = d.shape(x)
    return d.one(
        (
            f"torch.cdist({x}, {d.sized(x, d.between(1, 4), k)}, p={d.one((1.0, 2.0))})",
            f"F.pairwise_distance({x}, {d.sized(x, m, k)})",
            f"F.pdist({x})",
            f"F.cosine_similarity({x}, {d.sized(x, m, k)}, dim={d.dim(x)})",
        )
    )


def _fft(d: Draw, x: str) -> str:
    how = d.one(("fft", "ifft") if d[x].is_complex() else ("fft", "rfft", "hfft"))
    return d.one((f"torch.fft.{how}({x}, dim={d.dim(x)})", f"torch.fft.fftn({x})"))


OPS = (
    Op("matmul", _matmul, "fic", least=1, weight=2),
    Op("mm", _mm, "fic", least=2, most=2, weight=2),
    Op("bmm", _bmm, "fi", least=3, most=3),
    Op("einsum", _einsum, "fi", least=1, weight=2),
    Op("tensordot", _tensordot, "fi", least=1),
    Op("vectors", _vectors, "fi", least=1, most=1),
    Op("kron", _kron, "fi", least=1, most=3),
    Op("trace", lambda d, x: f"torch.trace({x})", "fi", least=2, most=2),
    Op("cross", lambda d, x: f"torch.linalg.cross({x}, {d.twin(x)}, dim={d.dim(x)})", "f", least=1),
    Op("image", _image, "f"),
    Op("conv", _conv, "f", least=3, most=5, weight=4),
    Op("pool", _pool, "f", False, least=3, most=5, weight=2),
    Op("interpolate", _resized, "f", False, least=3, most=5),
    Op("fold", _fold, "f", least=4, most=4),
    Op("linalg", _linalg, "f", False, least=2, most=3, weight=2),
    Op("pairs", _pairs, "f", False, least=2, most=2),
    Op("fft", _fft, "fc", False, least=1),
    Op(
        "bilinear",
        lambda d, x: (
            f"F.bilinear({x}, {x}, {d.fresh([2, d.shape(x)[-1], d.shape(x)[-1]], d[x].dtype)})"
        ),
        "f",
        least=2,
        most=3,
    ),
)
