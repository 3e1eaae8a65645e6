"""What one would write by hand with torch.distributed for each case: `HAND`, in several ways.

Each takes this rank's tensor and its `Place` and returns a new tensor, as a redistribution does.
Names say how: `messages` are isend and irecv, into views of the result where that can be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs
import torch
import torch.distributed as dist

from fdtensor.bench.cases import Shape

__all__ = ["HAND", "Place", "Way"]

# torch 2.13 renames these two; the functions are the same
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_sum = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@attrs.frozen
class Place:
    """A rank of 4, the full shape and, on 2 by 2, the group of the ranks that share its column."""

    rank: int
    shape: Shape
    column: Any = None

    @property
    def peers(self) -> list[int]:
        """The other ranks, starting after this one, so that not all send to the first at once."""
        return [(self.rank + i) % 4 for i in (1, 2, 3)]

    def cuts(self, dim: int, count: int = 4) -> list[slice]:
        """The blocks of a dim in `count`, as `torch.chunk` cuts."""
        size = self.shape[dim]
        step = -(-size // count)
        return [slice(min(size, step * i), min(size, step * (i + 1))) for i in range(count)]


Way = Callable[[torch.Tensor, Place], torch.Tensor]
Tensors = Iterable[tuple[int, torch.Tensor]]


def _start(recvs: Tensors, sends: Tensors) -> list[Any]:
    works = [dist.irecv(tensor, peer) for peer, tensor in recvs]
    return works + [dist.isend(tensor, peer) for peer, tensor in sends]


def _finish(works: Sequence[Any]) -> None:
    for work in works:
        work.wait()


def _length(cut: slice) -> int:
    return cut.stop - cut.start


# --- a line of 4 -----------------------------------------------------------------------------


def all_gather(x: torch.Tensor, at: Place) -> torch.Tensor:
    out = x.new_empty(at.shape)
    _gather(out, x)
    return out


def messages_gather(x: torch.Tensor, at: Place) -> torch.Tensor:
    out, rows = x.new_empty(at.shape), at.cuts(0)
    works = _start([(p, out[rows[p]]) for p in at.peers], [(p, x) for p in at.peers])
    out[rows[at.rank]] = x
    _finish(works)
    return out


def all_to_all_rows(x: torch.Tensor, at: Place) -> torch.Tensor:
    """Rows to columns: packs the columns for each rank, which arrive as rows."""
    rows, columns = map(_length, at.cuts(0)), at.cuts(1)
    mine = _length(columns[at.rank])
    packed = x.new_empty(x.numel())
    sizes = [len(x) * _length(cut) for cut in columns]
    for part, cut in zip(packed.split(sizes), columns, strict=True):
        part.view(len(x), -1).copy_(x[:, cut])
    out = x.new_empty(at.shape[0], mine)
    dist.all_to_all_single(out.view(-1), packed, [n * mine for n in rows], sizes)
    return out


def messages_rows(x: torch.Tensor, at: Place) -> torch.Tensor:
    """Rows to columns: what arrives is in its place."""
    rows, columns = at.cuts(0), at.cuts(1)
    out = x.new_empty(at.shape[0], _length(columns[at.rank]))
    recvs = [(p, out[rows[p]]) for p in at.peers]
    works = _start(recvs, [(p, x[:, columns[p]].contiguous()) for p in at.peers])
    out[rows[at.rank]] = x[:, columns[at.rank]]
    _finish(works)
    return out


def all_to_all_columns(x: torch.Tensor, at: Place) -> torch.Tensor:
    """Columns to rows: the rows for each rank lie together, what arrives is put in its columns."""
    rows, columns = at.cuts(0), at.cuts(1)
    mine = _length(rows[at.rank])
    sizes = [mine * _length(cut) for cut in columns]
    arrived = x.new_empty(mine * at.shape[1])
    dist.all_to_all_single(arrived, x.view(-1), sizes, [_length(cut) * x.shape[1] for cut in rows])
    return torch.cat([part.view(mine, -1) for part in arrived.split(sizes)], 1)


def messages_columns(x: torch.Tensor, at: Place) -> torch.Tensor:
    """Columns to rows: sends rows as they lie."""
    rows, columns = at.cuts(0), at.cuts(1)
    out = x.new_empty(_length(rows[at.rank]), at.shape[1])
    arrived = [(p, x.new_empty(len(out), _length(columns[p]))) for p in at.peers]
    works = _start(arrived, [(p, x[rows[p]]) for p in at.peers])
    out[:, columns[at.rank]] = x[rows[at.rank]]
    for (peer, part), work in zip(arrived, works):
        work.wait()
        out[:, columns[peer]] = part
    _finish(works[3:])
    return out


def all_reduce(x: torch.Tensor, at: Place) -> torch.Tensor:
    out = x.clone()
    dist.all_reduce(out)
    return out


def all_gather_sum(x: torch.Tensor, at: Place) -> torch.Tensor:
    terms = x.new_empty(4, *x.shape)
    _gather(terms.view(-1, x.shape[1]), x)
    return terms.sum(0)


def messages_reduce_gather(x: torch.Tensor, at: Place) -> torch.Tensor:
    out, rows = x.new_empty(at.shape), at.cuts(0)
    mine = out[rows[at.rank]]
    _messages_sum(x, at, mine)
    _finish(_start([(p, out[rows[p]]) for p in at.peers], [(p, mine) for p in at.peers]))
    return out


def reduce_scatter(x: torch.Tensor, at: Place) -> torch.Tensor:
    out = x.new_empty(_length(at.cuts(0)[at.rank]), at.shape[1])
    _scatter_sum(out, x)
    return out


def all_to_all_sum(x: torch.Tensor, at: Place) -> torch.Tensor:
    terms = torch.empty_like(x)
    dist.all_to_all_single(terms, x)
    return terms.view(4, -1, x.shape[1]).sum(0)


def messages_sum(x: torch.Tensor, at: Place) -> torch.Tensor:
    out = x.new_empty(_length(at.cuts(0)[at.rank]), at.shape[1])
    _messages_sum(x, at, out)
    return out


def _messages_sum(x: torch.Tensor, at: Place, out: torch.Tensor) -> None:
    """The sum of all ranks' terms for this rank's rows, added as they arrive."""
    rows = at.cuts(0)
    arrived = [(p, torch.empty_like(out)) for p in at.peers]
    works = _start(arrived, [(p, x[rows[p]]) for p in at.peers])
    total = x[rows[at.rank]]
    for (_, term), work in zip(arrived, works):
        work.wait()
        total = torch.add(total, term, out=out)
    _finish(works[3:])


def clone(x: torch.Tensor, at: Place) -> torch.Tensor:
    return x[at.cuts(0)[at.rank]].clone()


# --- 2 by 2: rank 2 * i + j is at (i, j) -----------------------------------------------------


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
        works = _start([], sends)
        out = (first if at.rank == 0 else second).clone()
    else:
        out = torch.empty_like(first)
        lower, upper = at.rank - 1, at.rank + 1
        works = _start([(lower, out[:half]), (upper, out[half:])], sends)
    _finish(works)
    return out


def _swapped(x: torch.Tensor, peer: int) -> torch.Tensor:
    out = torch.empty_like(x)
    _finish(_start([(peer, out)], [(peer, x)]))
    return out


def messages_halves(x: torch.Tensor, at: Place) -> torch.Tensor:
    """Quarters to halves: each goes straight to the two ranks that want it."""
    row, column = divmod(at.rank, 2)
    rows = len(x)
    out = x.new_empty(2 * rows, x.shape[1])
    parts = {2 * column: out[:rows], 2 * column + 1: out[rows:]}
    wanters = [at.rank // 2, 2 + at.rank // 2]
    works = _start(
        [(q, part) for q, part in parts.items() if q != at.rank],
        [(w, x) for w in wanters if w != at.rank],
    )
    if at.rank in parts:
        parts[at.rank].copy_(x)
    _finish(works)
    return out


def swap_all_gather(x: torch.Tensor, at: Place) -> torch.Tensor:
    """Quarters to halves: after a swap of ranks 1 and 2, each column gathers."""
    mine = x if at.rank in (0, 3) else _swapped(x, 3 - at.rank)
    out = x.new_empty(2 * len(x), x.shape[1])
    _gather(out, mine, group=at.column)
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
    _finish(_start([(peer, term)], [(peer, mine[other])]))
    torch.add(mine[own], term, out=out[own])
    _finish(_start([(peer, out[other])], [(peer, out[own])]))
    return out


HAND: dict[str, tuple[Way, ...]] = {
    "S0->R": (all_gather, messages_gather),
    "S0->S1": (all_to_all_rows, messages_rows),
    "S1->S0": (all_to_all_columns, messages_columns),
    "S0->S1 uneven": (all_to_all_rows, messages_rows),
    "P->R": (all_reduce, messages_reduce_gather, all_gather_sum),
    "P->S0": (reduce_scatter, all_to_all_sum, messages_sum),
    "R->S0": (clone,),
    "(S0,S1)->(S1,S0)": (swap,),
    "(S0,S0)->(R,S0)": (messages_halves, swap_all_gather),
    "(P,R)->(R,S0)": (slice_all_reduce, messages_terms, messages_terms_quarters),
    "(R,S0)->(S0,S0)": (swap_quarters, messages_quarters),
}
"""The ways for each case, by its name; the fastest at a size stands for what can be done."""
