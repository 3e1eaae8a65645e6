"""Long sequences: attention with the sequence cut, windows, scans of states."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from fdtensor import Mesh
from fdtensor.collectives import all_gather, all_to_all, axis_index, axis_size, ppermute
from tests.workloads.workload import Workload, at

__all__ = ["SEQUENCES"]

Tensor = torch.Tensor

LINE = Mesh(sp=8)
ALONG, WHOLE = at(None, None, "sp"), at()

REAL = {"heads": 32, "groups": 8, "length": 65536, "head": 128}
SMALL = {"heads": 8, "groups": 8, "length": 32, "head": 4}


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])


def gathered_by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Fewer heads of keys and values than of queries are gathered."""
    return attention(q, all_gather(k, "sp", 2), all_gather(v, "sp", 2))


def turned_by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Jacobs et al., "DeepSpeed Ulysses" (2023): heads are cut while the sequence is whole."""
    q, k, v = (all_to_all(t, "sp", 1, 2) for t in (q, k, v))
    return all_to_all(attention(q, k, v), "sp", 2, 1)


def heads(n: Mapping[str, int]) -> tuple[Tensor, ...]:
    shapes = [(1, n[name], n["length"], n["head"]) for name in ("heads", "groups", "groups")]
    return tuple([torch.randn(shape, dtype=torch.bfloat16) for shape in shapes])


GROUPED = Workload(
    "attention of 64k, 32 heads and 8 of keys",
    LINE,
    attention,
    turned_by_hand,
    heads,
    ALONG,
    ALONG,
    REAL,
    SMALL,
)

SINGLE = Workload(
    "attention of 64k, one head of keys",
    LINE,
    attention,
    gathered_by_hand,
    heads,
    ALONG,
    ALONG,
    {**REAL, "groups": 1},
    {**SMALL, "groups": 1},
)


# --- windows -------------------------------------------------------------------------------------

WIDTH = 4


def mixed(x: Tensor, kernel: Tensor) -> Tensor:
    """A causal convolution of each channel over `WIDTH` places, as in Mamba."""
    padded = F.pad(x, (0, 0, WIDTH - 1, 0))
    parts = [padded[:, k : k + x.shape[1]] * kernel[k] for k in range(WIDTH)]
    return F.silu(torch.stack(parts).sum(0))


def mixed_by_hand(x: Tensor, kernel: Tensor) -> Tensor:
    after = [(i, i + 1) for i in range(axis_size("sp") - 1)]
    before = ppermute(x[:, 1 - WIDTH :], "sp", after)
    padded = torch.cat([before, x], 1)
    parts = [padded[:, k : k + x.shape[1]] * kernel[k] for k in range(WIDTH)]
    return F.silu(torch.stack(parts).sum(0))


MIXED = Workload(
    "causal convolution of 64k over 4 places",
    LINE,
    mixed,
    mixed_by_hand,
    lambda n: (torch.randn(1, n["length"], n["width"]), torch.randn(WIDTH, n["width"])),
    (at(None, "sp"), WHOLE),
    at(None, "sp"),
    {"length": 65536, "width": 4096},
    {"length": 64, "width": 4},
    at_most=2.0,
    why="the slices bring 1, 2 and 3 places, where the hand brings 3: 49 kB, of 3.4 ms 0.03",
)


# --- scans ---------------------------------------------------------------------------------------


def states(decay: Tensor, x: Tensor) -> Tensor:
    """`h[t] = exp(decay[t]) * h[t - 1] + x[t]`, by sums of logarithms: `decay` is at most 0."""
    total = decay.cumsum(0)
    return total.exp() * (x * (-total).exp()).cumsum(0)


def states_by_hand(decay: Tensor, x: Tensor) -> Tensor:
    """Each rank scans its own, and adds the states of those before it."""
    rank = axis_index("sp")
    local = decay.cumsum(0)
    ends = all_gather(local[-1:], "sp")
    before = (ends * (torch.arange(axis_size("sp")) < rank)[:, None]).sum(0)
    total = local + before
    sums = (x * (-total).exp()).cumsum(0)
    others = (all_gather(sums[-1:], "sp") * (torch.arange(axis_size("sp")) < rank)[:, None]).sum(0)
    return total.exp() * (sums + others)


STATES = Workload(
    "states of 64k steps",
    LINE,
    states,
    states_by_hand,
    lambda n: (
        -torch.rand(n["length"], n["width"], dtype=torch.float64) / n["length"],
        torch.randn(n["length"], n["width"], dtype=torch.float64),
    ),
    at("sp"),
    at("sp"),
    {"length": 65536, "width": 4096},
    {"length": 64, "width": 4},
)

SEQUENCES = (GROUPED, SINGLE, MIXED, STATES)
