"""What one would write by hand for the cases on 2 by 2 ranks, 2i + j at (i, j): `SQUARE`."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests.bench.place import Place, Way, finish, gather, start

__all__ = ["SQUARE"]


def swap(x: torch.Tensor, at: Place) -> torch.Tensor:
    """Ranks 1 and 2 swap what they hold, 0 and 3 keep it."""
    return x.clone() if at.rank in (0, 3) else _swapped(x, 3 - at.rank)


def swap_quarters(x: torch.Tensor, at: Place) -> torch.Tensor:
    """Halves to quarters: ranks 0 and 3 hold theirs, 1 and 2 send each other's."""
    first, second = x.chunk(2)
    if at.rank in (0, 3):
        return (first if at.rank == 0 else second).clone()
    return _swapped(first if at.rank == 1 else second, 3 - at.rank)


def messages_quarters(x: torch.Tensor, at: Place) -> torch.Tensor:
    """Halves to quarters: both ranks that hold a quarter send half of it."""
    first, second = x.chunk(2)
    half = len(first) // 2
    wanted = [second[:half], first[:half], second[half:], first[half:]]
    sends = [((1, 2, 1, 2)[at.rank], wanted[at.rank])]
    if at.rank in (0, 3):
        works = start([], sends)
        out = (first if at.rank == 0 else second).clone()
    else:
        out = torch.empty_like(first)
        lower, upper = at.rank - 1, at.rank + 1
        works = start([(lower, out[:half]), (upper, out[half:])], sends)
    finish(works)
    return out


def _swapped(x: torch.Tensor, peer: int) -> torch.Tensor:
    out = torch.empty_like(x)
    finish(start([(peer, out)], [(peer, x)]))
    return out


def messages_halves(x: torch.Tensor, at: Place) -> torch.Tensor:
    """Quarters to halves: each goes straight to the two ranks that want it."""
    column, rows = at.rank % 2, len(x)
    out = x.new_empty(2 * rows, x.shape[1])
    parts = {2 * column: out[:rows], 2 * column + 1: out[rows:]}
    wanters = [at.rank // 2, 2 + at.rank // 2]
    works = start(
        [(q, part) for q, part in parts.items() if q != at.rank],
        [(w, x) for w in wanters if w != at.rank],
    )
    if at.rank in parts:
        parts[at.rank].copy_(x)
    finish(works)
    return out


def swap_all_gather(x: torch.Tensor, at: Place) -> torch.Tensor:
    """Quarters to halves: after a swap of ranks 1 and 2, each column gathers."""
    mine = x if at.rank in (0, 3) else _swapped(x, 3 - at.rank)
    out = x.new_empty(2 * len(x), x.shape[1])
    gather(out, mine, group=at.column)
    return out


def slice_all_reduce(x: torch.Tensor, at: Place) -> torch.Tensor:
    out = x[at.cuts(0, 2)[at.rank % 2]].clone()
    dist.all_reduce(out, group=at.column)
    return out


def messages_terms(x: torch.Tensor, at: Place) -> torch.Tensor:
    """Both ranks of a column get the other's term of their half."""
    peer = (at.rank + 2) % 4
    mine = x[at.cuts(0, 2)[at.rank % 2]]
    return _swapped(mine, peer).add_(mine)


def messages_terms_quarters(x: torch.Tensor, at: Place) -> torch.Tensor:
    """Each rank of a column adds up one half of their half, then they swap."""
    peer, row = (at.rank + 2) % 4, at.rank // 2
    mine = x[at.cuts(0, 2)[at.rank % 2]]
    out = torch.empty_like(mine)
    middle = len(mine) // 2
    cuts = (slice(0, middle), slice(middle, len(mine)))
    own, other = cuts[row], cuts[1 - row]
    term = torch.empty_like(mine[own])
    finish(start([(peer, term)], [(peer, mine[other])]))
    torch.add(mine[own], term, out=out[own])
    finish(start([(peer, out[other])], [(peer, out[own])]))
    return out


SQUARE: dict[str, tuple[Way, ...]] = {
    "(S0,S1)->(S1,S0)": (swap,),
    "(S0,S0)->(R,S0)": (messages_halves, swap_all_gather),
    "(P,R)->(R,S0)": (slice_all_reduce, messages_terms, messages_terms_quarters),
    "(R,S0)->(S0,S0)": (swap_quarters, messages_quarters),
}
"""The ways for each case, by its name."""
