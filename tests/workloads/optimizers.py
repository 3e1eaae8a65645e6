"""Steps of optimizers: AdamW with cut states, accumulation, Adafactor, Muon, Shampoo."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from fdtensor import Mesh
from fdtensor.collectives import all_gather, all_to_all, axis_index, axis_size, psum, reduce_scatter
from tests.workloads.workload import Workload, at, half, single

__all__ = ["OPTIMIZERS"]

Tensor = torch.Tensor
Tensors = Mapping[str, Tensor]

LINE = Mesh(dp=8)
WHOLE, ROWS, COLUMNS = at(), at("dp"), at(None, "dp")
NAMES = ("up", "down")


def loss(p: Tensors, x: Tensor) -> Tensor:
    return (F.gelu(x @ p["up"]) @ p["down"]).square().mean()


def matrices(n: Mapping[str, int]) -> dict[str, Tensor]:
    m, h = n["width"], n["hidden"]
    return {"up": torch.randn(m, h) / m**0.5, "down": torch.randn(h, m) / h**0.5}


MLP = {"width": 2048, "hidden": 8192, "batch": 16384}
SMALL = {"width": 16, "hidden": 32, "batch": 32}


# --- AdamW, with the norm of all gradients clipped -----------------------------------------------


def adamw(p: Tensor, m: Tensor, v: Tensor, g: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
    g = g * scale
    m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g.square()
    return p - 1e-3 * (m / (v.sqrt() + 1e-8) + 0.1 * p), m, v


def _stepped(p: Tensors, m: Tensors, v: Tensors, grads: Tensors, scale: Tensor) -> Any:
    new = {n: adamw(p[n], m[n], v[n], grads[n], scale) for n in NAMES}
    return tuple([{n: new[n][k] for n in NAMES} for k in range(3)])


def _scale(squares: Tensor) -> Tensor:
    return (1 / (squares.sqrt() + 1e-6)).clamp(max=1)


def step(p: Tensors, m: Tensors, v: Tensors, x: Tensor) -> Any:
    grads = torch.func.grad(loss)(p, x)
    squares = sum((g.square().sum() for g in grads.values()), x.new_zeros(()))
    return _stepped(p, m, v, grads, _scale(squares))


def step_by_hand(p: Tensors, m: Tensors, v: Tensors, x: Tensor) -> Any:
    """ZeRO-3: masters and moments are cut, matrices gathered, gradients scattered."""
    wholes = {n: all_gather(t, "dp") for n, t in p.items()}
    local = torch.func.grad(loss)(wholes, x)
    grads = {n: reduce_scatter(g, "dp") / axis_size("dp") for n, g in local.items()}
    squares = sum((g.square().sum() for g in grads.values()), x.new_zeros(()))
    return _stepped(p, m, v, grads, _scale(psum(squares, "dp")))


def states(n: Mapping[str, int]) -> tuple[Any, ...]:
    m = {name: t * 1e-3 for name, t in matrices(n).items()}
    v = {name: t.square() for name, t in m.items()}
    return matrices(n), m, v, torch.randn(n["batch"], n["width"])


CUT = Workload(
    "AdamW with all states cut, clipped",
    LINE,
    step,
    step_by_hand,
    states,
    ROWS,
    ROWS,
    MLP,
    SMALL,
)


def moments_by_hand(p: Tensors, m: Tensors, v: Tensors, x: Tensor) -> Any:
    """ZeRO-1: moments alone are cut; what they make of a part of the gradients is gathered."""
    local = torch.func.grad(loss)(p, x)
    grads = {n: reduce_scatter(g, "dp") / axis_size("dp") for n, g in local.items()}
    own = {n: t.unflatten(0, (axis_size("dp"), -1))[axis_index("dp")] for n, t in p.items()}
    squares = sum((g.square().sum() for g in grads.values()), x.new_zeros(()))
    p, m, v = _stepped(own, m, v, grads, _scale(psum(squares, "dp")))
    return {n: all_gather(t, "dp") for n, t in p.items()}, m, v


MOMENTS = Workload(
    "AdamW with its moments cut, clipped",
    LINE,
    step,
    moments_by_hand,
    states,
    (WHOLE, ROWS, ROWS, ROWS),
    (WHOLE, ROWS, ROWS),
    MLP,
    SMALL,
)


# --- gradients of several batches ----------------------------------------------------------------


def accumulated(p: Tensors, batches: Tensor) -> Tensors:
    total = {n: torch.zeros_like(t) for n, t in p.items()}
    for x in batches:
        grads = torch.func.grad(loss)(p, x)
        total = {n: total[n] + grads[n] / len(batches) for n in NAMES}
    return total


def accumulated_by_hand(p: Tensors, batches: Tensor) -> Tensors:
    """One sum over the ranks, of what all batches add up to."""
    return {n: psum(t, "dp") / axis_size("dp") for n, t in accumulated(p, batches).items()}


ACCUMULATED = Workload(
    "gradients of four batches, one sum",
    LINE,
    accumulated,
    accumulated_by_hand,
    lambda n: (matrices(n), torch.randn(4, n["batch"], n["width"])),
    (WHOLE, COLUMNS),
    WHOLE,
    MLP,
    SMALL,
)


# --- Adafactor -----------------------------------------------------------------------------------


def factored(p: Tensor, rows: Tensor, columns: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    """Shazeer and Stern, "Adafactor" (2018): second moments by rows and columns."""
    squares = g.square() + 1e-30
    rows, columns = 0.9 * rows + 0.1 * squares.mean(1), 0.9 * columns + 0.1 * squares.mean(0)
    v = rows[:, None] * columns / rows.mean()
    update = g * v.rsqrt()
    update = update / (update.square().mean().sqrt()).clamp(min=1)
    return p - 1e-2 * update, rows, columns


def mean(t: Tensor) -> Tensor:
    """The mean of the blocks of all ranks."""
    return psum(t, "dp") / axis_size("dp")


def factored_by_hand(p: Tensor, rows: Tensor, columns: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    squares = g.square() + 1e-30
    rows = 0.9 * rows + 0.1 * squares.mean(1)
    columns = 0.9 * columns + 0.1 * mean(squares.mean(0))
    v = rows[:, None] * columns / mean(rows.mean())
    update = g * v.rsqrt()
    update = update / mean(update.square().mean()).sqrt().clamp(min=1)
    return p - 1e-2 * update, rows, columns


ADAFACTOR = Workload(
    "Adafactor of a matrix of 8192 x 8192",
    LINE,
    factored,
    factored_by_hand,
    lambda n: (
        torch.randn(n["n"], n["n"]),
        torch.rand(n["n"]),
        torch.rand(n["n"]),
        torch.randn(n["n"], n["n"]),
    ),
    (ROWS, ROWS, WHOLE, ROWS),
    (ROWS, ROWS, WHOLE),
    {"n": 8192},
    {"n": 16},
    at_most=1.5,
    why="columns are updated in blocks, and gathered with what they are multiplied by: 29 kB",
)


# --- Muon and Shampoo ----------------------------------------------------------------------------


def orthogonal(g: Tensor) -> Tensor:
    """Jordan et al., "Muon" (2024): five steps of Newton and Schulz, in bf16."""
    x = half(g)
    x = x / half(single(x).square().sum((-2, -1), keepdim=True).sqrt() + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.775 * a + 2.0315 * (a @ a)) @ x
    return x


def muon(p: Tensor, m: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    m = 0.95 * m + g
    return p - 0.02 * orthogonal(0.95 * m + g).to(p.dtype), m


def muon_by_hand(p: Tensor, m: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Each matrix is whole on one rank, in bf16."""
    m = 0.95 * m + g
    own = all_to_all(half(0.95 * m + g), "dp", 0, 1)
    return p - 0.02 * all_to_all(orthogonal(own), "dp", 1, 0).to(p.dtype), m


def stack(n: Mapping[str, int]) -> Tensor:
    return torch.randn(n["layers"], n["rows"], n["columns"])


MUON = Workload(
    "Muon of 8 matrices of 2048 x 4096",
    LINE,
    muon,
    muon_by_hand,
    lambda n: (stack(n), stack(n), stack(n)),
    COLUMNS,
    COLUMNS,
    {"layers": 8, "rows": 2048, "columns": 4096},
    {"layers": 8, "rows": 16, "columns": 16},
)


def root(a: Tensor) -> Tensor:
    """The inverse fourth root of symmetric matrices."""
    values, vectors = torch.linalg.eigh(a)
    return (vectors * values.clamp(min=1e-6).pow(-0.25).unsqueeze(-2)) @ vectors.mT


def shampoo(p: Tensor, left: Tensor, right: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gupta et al., "Shampoo" (2018): the statistics of each matrix are whole on one rank."""
    left, right = left + g @ g.mT, right + g.mT @ g
    return p - 1e-2 * root(left) @ g @ root(right), left, right


def shampoo_by_hand(p: Tensor, left: Tensor, right: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    own = all_to_all(g, "dp", 0, 1)
    left, right = left + own @ own.mT, right + own.mT @ own
    update = all_to_all(root(left) @ own @ root(right), "dp", 1, 0)
    return p - 1e-2 * update, left, right


def statistics(n: Mapping[str, int]) -> tuple[Tensor, ...]:
    g = stack(n)
    eyes = [torch.eye(n[k]).expand(n["layers"], -1, -1).contiguous() for k in ("rows", "columns")]
    return g / 2, *eyes, g


SHAMPOO = Workload(
    "Shampoo of 8 matrices of 2048 x 4096",
    LINE,
    shampoo,
    shampoo_by_hand,
    statistics,
    (COLUMNS, ROWS, ROWS, COLUMNS),
    (COLUMNS, ROWS, ROWS),
    {"layers": 8, "rows": 2048, "columns": 4096},
    {"layers": 8, "rows": 16, "columns": 16},
)


def soap(p: Tensor, m: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
    """Vyas et al., "SOAP" (2024): Adam in the eigenvectors of the statistics of Shampoo."""
    *state, g = state
    m = 0.9 * m + 0.1 * g
    update, state = soap_update(m, g, *state)
    return p - 3e-3 * update, m, *state


def soap_update(
    m: Tensor, g: Tensor, v: Tensor, left: Tensor, right: Tensor, a: Tensor, b: Tensor
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The update, and the state with vectors that follow the statistics by one step of QR."""
    v = 0.95 * v + 0.05 * (a.mT @ g @ b).square()
    update = a @ ((a.mT @ m @ b) / (v.sqrt() + 1e-8)) @ b.mT
    left, right = 0.95 * left + 0.05 * g @ g.mT, 0.95 * right + 0.05 * g.mT @ g
    a, b = torch.linalg.qr(left @ a).Q, torch.linalg.qr(right @ b).Q
    return update, (v, left, right, a, b)


def soap_by_hand(p: Tensor, m: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
    """Each matrix, its momentum and its statistics are whole on one rank."""
    *state, g = state
    own = all_to_all(g, "dp", 0, 1)
    m = 0.9 * m + 0.1 * own
    update, state = soap_update(m, own, *state)
    return p - 3e-3 * all_to_all(update, "dp", 1, 0), m, *state


def soap_state(n: Mapping[str, int]) -> tuple[Tensor, ...]:
    _, left, right, g = statistics(n)
    return g / 2, g / 3, g.square(), left, right, left, right, g


SOAP = Workload(
    "SOAP of 8 matrices of 2048 x 4096",
    LINE,
    soap,
    soap_by_hand,
    soap_state,
    (COLUMNS, *[ROWS] * 6, COLUMNS),
    (COLUMNS, *[ROWS] * 6),
    {"layers": 8, "rows": 2048, "columns": 4096},
    {"layers": 8, "rows": 16, "columns": 16},
)

OPTIMIZERS = (CUT, MOMENTS, ACCUMULATED, ADAFACTOR, MUON, SHAMPOO, SOAP)
