"""Science: stencils, transforms, clusters, factorizations, particles, solvers and graphs."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fdtensor import Mesh
from fdtensor.collectives import (
    all_gather,
    all_to_all,
    axis_index,
    axis_size,
    ppermute,
    psum,
    reduce_scatter,
)
from tests.workloads.workload import Workload, at

__all__ = ["SCIENCE"]

Tensor = torch.Tensor

LINE, SQUARE = Mesh(x=8), Mesh(x=2, y=4)
ROWS, WHOLE = at("x"), at()


def rows_around(u: Tensor, is_ring: bool) -> Tensor:
    """A block with a row of each neighbour, or zeros where there is none."""
    count = axis_size("x")
    after = [(i, (i + 1) % count) for i in range(count)]
    before = [(b, a) for a, b in after]
    if not is_ring:
        after, before = after[:-1], before[:-1]
    return torch.cat([ppermute(u[-1:], "x", after), u, ppermute(u[:1], "x", before)])


# --- heat in a periodic box ----------------------------------------------------------------------


def heat(u: Tensor) -> Tensor:
    around = sum(u.roll(shift, dim) for dim in range(3) for shift in (1, -1))
    return u + 0.1 * (around - 6 * u)


def heat_by_hand(u: Tensor) -> Tensor:
    wide = rows_around(u, True)
    around = sum(u.roll(shift, dim) for dim in (1, 2) for shift in (1, -1))
    return u + 0.1 * (around + wide[:-2] + wide[2:] - 6 * u)


HEAT = Workload(
    "heat in a periodic box, 512^3",
    LINE,
    heat,
    heat_by_hand,
    lambda n: (torch.randn(n["n"], n["n"], n["n"]),),
    ROWS,
    ROWS,
    {"n": 512},
    {"n": 16},
)


# --- waves between walls -------------------------------------------------------------------------


def wave(u: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    p = F.pad(u, (1, 1, 1, 1, 1, 1))
    x = p[2:, 1:-1, 1:-1] + p[:-2, 1:-1, 1:-1]
    y = p[1:-1, 2:, 1:-1] + p[1:-1, :-2, 1:-1]
    z = p[1:-1, 1:-1, 2:] + p[1:-1, 1:-1, :-2]
    return 2 * u - before + 0.1 * (x + y + z - 6 * u), u


def wave_by_hand(u: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    wide = rows_around(u, False)
    p = F.pad(u, (1, 1, 1, 1))
    y = p[:, 2:, 1:-1] + p[:, :-2, 1:-1]
    z = p[:, 1:-1, 2:] + p[:, 1:-1, :-2]
    return 2 * u - before + 0.1 * (wide[2:] + wide[:-2] + y + z - 6 * u), u


WAVE = Workload(
    "waves between walls, 512^3",
    LINE,
    wave,
    wave_by_hand,
    lambda n: (torch.randn(n["n"], n["n"], n["n"]), torch.randn(n["n"], n["n"], n["n"])),
    ROWS,
    ROWS,
    {"n": 512},
    {"n": 16},
)


# --- a smoothing in a ring -----------------------------------------------------------------------


def smooth(u: Tensor, kernel: Tensor) -> Tensor:
    return F.conv3d(F.pad(u[None, None], (1,) * 6, mode="circular"), kernel)[0, 0]


def smooth_by_hand(u: Tensor, kernel: Tensor) -> Tensor:
    wide = F.pad(rows_around(u, True)[None, None], (1, 1, 1, 1, 0, 0), mode="circular")
    return F.conv3d(wide, kernel)[0, 0]


SMOOTH = Workload(
    "a convolution with circular padding, 512^3",
    LINE,
    smooth,
    smooth_by_hand,
    lambda n: (torch.randn(n["n"], n["n"], n["n"]), torch.randn(1, 1, 3, 3, 3)),
    (ROWS, WHOLE),
    ROWS,
    {"n": 512},
    {"n": 16},
)


# --- transforms ----------------------------------------------------------------------------------


def blur(image: Tensor, spectrum: Tensor) -> Tensor:
    return torch.fft.ifft2(torch.fft.fft2(image) * spectrum).real


def blur_by_hand(image: Tensor, spectrum: Tensor) -> Tensor:
    columns = all_to_all(torch.fft.fft(image, dim=1), "x", 1, 0)
    product = torch.fft.fft(columns, dim=0) * spectrum
    rows = all_to_all(torch.fft.ifft(product, dim=0), "x", 0, 1)
    return torch.fft.ifft(rows, dim=1).real


BLUR = Workload(
    "convolution by FFT, 8192^2",
    LINE,
    blur,
    blur_by_hand,
    lambda n: (torch.randn(n["n"], n["n"]), torch.randn(n["n"], n["n"], dtype=torch.complex64)),
    (ROWS, at(None, "x")),
    ROWS,
    {"n": 8192},
    {"n": 16},
)


def pencils_by_hand(x: Tensor) -> Tensor:
    x = all_to_all(torch.fft.fft(x, dim=2), "y", 2, 1)
    x = all_to_all(torch.fft.fft(x, dim=1), "x", 1, 0)
    return torch.fft.fft(x, dim=0)


PENCILS = Workload(
    "FFT of pencils, 512^3 on 2 x 4",
    SQUARE,
    torch.fft.fftn,
    pencils_by_hand,
    lambda n: (torch.randn(n["n"], n["n"], n["n"], dtype=torch.complex64),),
    at("x", "y"),
    at(None, "x", "y"),
    {"n": 512},
    {"n": 8},
)


# --- clusters ------------------------------------------------------------------------------------


def _nearest(points: Tensor, centers: Tensor) -> Tensor:
    return (centers.square().sum(1) - 2 * points @ centers.T).argmin(1)


def _sums(points: Tensor, centers: Tensor) -> tuple[Tensor, Tensor]:
    which = _nearest(points, centers)
    sums = torch.zeros_like(centers).index_add(0, which, points)
    return sums, points.new_zeros(len(centers)).index_add(0, which, points.new_ones(len(points)))


def cluster(points: Tensor, centers: Tensor) -> Tensor:
    sums, counts = _sums(points, centers)
    return sums / counts.clamp(min=1)[:, None]


def cluster_by_hand(points: Tensor, centers: Tensor) -> Tensor:
    sums, counts = _sums(points, centers)
    sums, counts = psum(sums, "x"), psum(counts, "x")
    return sums / counts.clamp(min=1)[:, None]


CLUSTER = Workload(
    "k-means, 8M points of 64, 256 means",
    LINE,
    cluster,
    cluster_by_hand,
    lambda n: (torch.randn(n["points"], 64), torch.randn(n["means"], 64)),
    (ROWS, WHOLE),
    WHOLE,
    {"points": 1 << 23, "means": 256},
    {"points": 64, "means": 8},
)


# --- factorizations of tall matrices -------------------------------------------------------------


def _unique(q: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    """The factors with nothing below 0 on the diagonal."""
    signs = torch.where(r.diagonal() < 0, -1.0, 1.0).to(r.dtype)
    return q * signs, signs[:, None] * r


def orthogonal(a: Tensor) -> tuple[Tensor, Tensor]:
    return _unique(*torch.linalg.qr(a))


def orthogonal_by_hand(a: Tensor) -> tuple[Tensor, Tensor]:
    """Demmel et al., "Communication-optimal Parallel and Sequential QR" (2012), on one level."""
    q, r = torch.linalg.qr(a)
    outer, r = torch.linalg.qr(all_gather(r, "x"))
    k = a.shape[1]
    (own,) = outer.unflatten(0, (-1, k))[axis_index("x")[None]]
    return _unique(q @ own, r)


QR = Workload(
    "QR, 2^20 x 64",
    LINE,
    orthogonal,
    orthogonal_by_hand,
    lambda n: (torch.randn(n["rows"], n["columns"], dtype=torch.float64),),
    ROWS,
    (ROWS, WHOLE),
    {"rows": 1 << 20, "columns": 64},
    {"rows": 128, "columns": 8},
    at_most=1.3,
    slower=1.15,
    why="the first rows of Q tell the signs of one process, which the hand does without: 57 kB",
)


def ranked(a: Tensor, probe: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Halko, Martinsson and Tropp, "Finding Structure with Randomness" (2011), algorithm 5.1."""
    q, _ = orthogonal(a @ probe)
    u, s, v = torch.linalg.svd(q.T @ a, full_matrices=False)
    return q @ u, s, v


def ranked_by_hand(a: Tensor, probe: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, _ = orthogonal_by_hand(a @ probe)
    u, s, v = torch.linalg.svd(psum(q.T @ a, "x"), full_matrices=False)
    return q @ u, s, v


SVD = Workload(
    "randomized SVD, 2^20 x 1024 to rank 32",
    LINE,
    ranked,
    ranked_by_hand,
    lambda n: (
        torch.randn(n["rows"], n["columns"], dtype=torch.float64),
        torch.randn(n["columns"], n["rank"], dtype=torch.float64),
    ),
    (ROWS, WHOLE),
    (ROWS, WHOLE, WHOLE),
    {"rows": 1 << 20, "columns": 1024, "rank": 32},
    {"rows": 128, "columns": 16, "rank": 4},
    at_most=1.15,
    why="the signs of its QR, as above: 57 kB",
)


# --- particles -----------------------------------------------------------------------------------


def _pulls(x: Tensor, others: Tensor) -> Tensor:
    """What each of `x` is pulled by all of `others`, of mass 1; softened, a few at a time."""
    total = torch.zeros_like(x)
    for some in others.chunk(16):
        away = some - x[:, None]
        total = total + (away * (away.square().sum(-1, keepdim=True) + 0.01) ** -1.5).sum(1)
    return total


def bodies(x: Tensor) -> Tensor:
    return _pulls(x, x)


def bodies_by_hand(x: Tensor) -> Tensor:
    return _pulls(x, all_gather(x, "x"))


BODIES = Workload(
    "N bodies, 65,536",
    LINE,
    bodies,
    bodies_by_hand,
    lambda n: (torch.randn(n["bodies"], 3),),
    ROWS,
    ROWS,
    {"bodies": 1 << 16},
    {"bodies": 64},
    max_bytes=1 << 30,
)


# --- solvers -------------------------------------------------------------------------------------


def solve(a: Tensor, b: Tensor) -> Tensor:
    """Ten steps of conjugate gradients."""
    x, r = torch.zeros_like(b), b
    p, rr = r, r @ r
    for _ in range(10):
        ap = a @ p
        alpha = rr / (p @ ap)
        x, r = x + alpha * p, r - alpha * ap
        last, rr = rr, r @ r
        p = r + rr / last * p
    return x


def solve_by_hand(a: Tensor, b: Tensor) -> Tensor:
    x, r = torch.zeros_like(b), b
    p, rr = r, psum(r @ r, "x")
    for _ in range(10):
        ap = a @ all_gather(p, "x")
        alpha = rr / psum(p @ ap, "x")
        x, r = x + alpha * p, r - alpha * ap
        last, rr = rr, psum(r @ r, "x")
        p = r + rr / last * p
    return x


def _definite(n: int) -> Tensor:
    a = torch.randn(n, n, dtype=torch.float64)
    return a @ a.T / n + torch.eye(n, dtype=torch.float64)


SOLVE = Workload(
    "conjugate gradients, 16,384, ten steps",
    LINE,
    solve,
    solve_by_hand,
    lambda n: (_definite(n["n"]), torch.randn(n["n"], dtype=torch.float64)),
    ROWS,
    ROWS,
    {"n": 1 << 14},
    {"n": 64},
)


def sparse(rows: Tensor, columns: Tensor, values: Tensor, x: Tensor) -> Tensor:
    return torch.zeros_like(x).index_add(0, rows, values * x[columns])


def sparse_by_hand(rows: Tensor, columns: Tensor, values: Tensor, x: Tensor) -> Tensor:
    x = all_gather(x, "x")
    return reduce_scatter(torch.zeros_like(x).index_add(0, rows, values * x[columns]), "x")


SPARSE = Workload(
    "sparse matrix times vector, 2^24 entries of 2^20 rows",
    LINE,
    sparse,
    sparse_by_hand,
    lambda n: (
        torch.randint(n["n"], (n["entries"],)),
        torch.randint(n["n"], (n["entries"],)),
        torch.randn(n["entries"]),
        torch.randn(n["n"]),
    ),
    ROWS,
    ROWS,
    {"entries": 1 << 24, "n": 1 << 20},
    {"entries": 128, "n": 32},
)


# --- graphs --------------------------------------------------------------------------------------


def messages(h: Tensor, weight: Tensor, start: Tensor, end: Tensor) -> Tensor:
    return h + torch.relu(torch.zeros_like(h).index_add(0, end, h[start]) @ weight)


def messages_by_hand(h: Tensor, weight: Tensor, start: Tensor, end: Tensor) -> Tensor:
    nodes = all_gather(h, "x")
    sums = reduce_scatter(torch.zeros_like(nodes).index_add(0, end, nodes[start]), "x")
    return h + torch.relu(sums @ weight)


GRAPH = Workload(
    "messages in a graph, 2^17 nodes of 128, 2^22 edges",
    LINE,
    messages,
    messages_by_hand,
    lambda n: (
        torch.randn(n["nodes"], 128),
        torch.randn(128, 128) / 16,
        torch.randint(n["nodes"], (n["edges"],)),
        torch.randint(n["nodes"], (n["edges"],)),
    ),
    (ROWS, WHOLE, ROWS, ROWS),
    ROWS,
    {"nodes": 1 << 17, "edges": 1 << 22},
    {"nodes": 32, "edges": 128},
)

SCIENCE = (
    HEAT,
    WAVE,
    SMOOTH,
    BLUR,
    PENCILS,
    CLUSTER,
    QR,
    SVD,
    BODIES,
    SOLVE,
    SPARSE,
    GRAPH,
)
