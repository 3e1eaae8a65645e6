"""Samples: sorts, thresholds of pruning, options priced by Monte Carlo."""

from __future__ import annotations

import torch

from fdtensor import Mesh, random
from fdtensor.collectives import all_to_all, axis_index, axis_size, ppermute, psum
from tests.workloads.workload import Workload, at, widest

__all__ = ["SAMPLES"]

Tensor = torch.Tensor

LINE = Mesh(x=8)
ROWS, WHOLE = at("x"), at()


# --- sorts ---------------------------------------------------------------------------------------


def ordered(x: Tensor) -> Tensor:
    return x.sort().values


def ordered_by_hand(x: Tensor) -> Tensor:
    """Leighton, "Tight Bounds on the Complexity of Parallel Sorting" (1985), columnsort."""
    count, half = axis_size("x"), len(x) // 2
    dealt = all_to_all(ordered(x).view(-1, count), "x", 1, 0)
    x = ordered(dealt.flatten()).view(count, -1)
    x = ordered(all_to_all(x, "x", 0, 0).view(count, -1).T.flatten())
    after = [(i, i + 1) for i in range(count - 1)]
    across = ordered(torch.cat([ppermute(x[half:], "x", after), x[:half]]))
    is_first, is_last = (axis_index("x") == i for i in (0, count - 1))
    back = ppermute(across[:half], "x", [(b, a) for a, b in after])
    return torch.cat(
        [torch.where(is_first, x[:half], across[half:]), torch.where(is_last, x[half:], back)]
    )


SORT = Workload(
    "sort of 2^27 floats",
    LINE,
    ordered,
    ordered_by_hand,
    lambda n: (torch.randn(n["n"]),),
    ROWS,
    ROWS,
    {"n": 1 << 27},
    {"n": 128},
)


# --- pruning -------------------------------------------------------------------------------------


def pruned(w: Tensor) -> Tensor:
    """The weights but for the tenth of them that are nearest to 0."""
    size = w.abs()
    least = size.flatten().kthvalue(w.numel() // 10).values
    return torch.where(size > least, w, 0)


def pruned_by_hand(w: Tensor) -> Tensor:
    """Bits of floats that are not negative are in their order: digits are counted one by one."""
    kind = torch.int64 if w.dtype == torch.float64 else torch.int32
    keys = w.abs().view(kind)
    k = torch.full((), w.numel() * axis_size("x") // 10, dtype=torch.int64)
    known = torch.zeros((), dtype=kind)
    for shift in range(8 * kind.itemsize - 8, -1, -8):
        digits = (keys >> shift).flatten()
        among = (digits >> 8 == known).long()
        counts = torch.zeros(256, dtype=torch.int64).index_add(0, digits.long() & 255, among)
        counts = psum(counts, "x")
        digit = (counts.cumsum(0) < k).sum()
        k = k - torch.where(torch.arange(256) < digit, counts, 0).sum()
        known = (known << 8 | digit).to(kind)
    return torch.where(keys > known, w, 0)


PRUNING = Workload(
    "pruning of a tenth of 2^28 weights",
    LINE,
    pruned,
    pruned_by_hand,
    lambda n: (torch.randn(n["rows"], n["rows"]),),
    ROWS,
    ROWS,
    {"rows": 1 << 14},
    {"rows": 256},
)


# --- options -------------------------------------------------------------------------------------


def priced(keys: Tensor, spot: Tensor, strikes: Tensor) -> tuple[Tensor, Tensor]:
    """Asian options of all strikes, over a batch of paths of each key; and the standard errors."""
    steps = 64

    def payoffs(key: Tensor) -> Tensor:
        moves = widest(random.normal(key, (1024, steps))) * 0.2 / steps**0.5 - 0.02 / steps
        path = spot * moves.cumsum(1).exp()
        return (path.mean(1)[:, None] - strikes).clamp(min=0)

    paid = torch.func.vmap(payoffs)(keys).flatten(0, 1)
    mean, square = paid.mean(0), paid.square().mean(0)
    return mean, ((square - mean.square()) / len(paid)).sqrt()


def priced_by_hand(keys: Tensor, spot: Tensor, strikes: Tensor) -> tuple[Tensor, Tensor]:
    mean, error = priced(keys, spot, strikes)
    count = 1024 * len(keys)
    square = error.square() * count + mean.square()
    mean, square = psum(torch.stack([mean, square]), "x") / axis_size("x")
    return mean, ((square - mean.square()) / (count * axis_size("x"))).sqrt()


OPTIONS = Workload(
    "Asian options of 32 strikes, 2^24 paths of 64 steps",
    LINE,
    priced,
    priced_by_hand,
    lambda n: (
        random.split(torch.zeros(2, dtype=torch.int64), n["keys"]),
        torch.full((), 100.0),
        torch.linspace(80, 120, 32),
    ),
    (ROWS, WHOLE, WHOLE),
    WHOLE,
    {"keys": 1 << 14},
    {"keys": 8},
)

SAMPLES = (SORT, PRUNING, OPTIONS)
