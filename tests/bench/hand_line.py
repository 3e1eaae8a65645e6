"""What one would write by hand for the cases on a line of 4 ranks: `LINE`."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests.bench.place import Place, Way, finish, gather, length, scatter_sum, start

__all__ = ["LINE"]


def all_gather(x: torch.Tensor, at: Place) -> torch.Tensor:
    out = x.new_empty(at.shape)
    gather(out, x)
    return out


def messages_gather(x: torch.Tensor, at: Place) -> torch.Tensor:
    out, rows = x.new_empty(at.shape), at.cuts(0)
    works = start([(p, out[rows[p]]) for p in at.peers], [(p, x) for p in at.peers])
    out[rows[at.rank]] = x
    finish(works)
    return out


def all_to_all_rows(x: torch.Tensor, at: Place) -> torch.Tensor:
    """Rows to columns: packs the columns for each rank, which arrive as rows."""
    rows, columns = map(length, at.cuts(0)), at.cuts(1)
    mine = length(columns[at.rank])
    packed = x.new_empty(x.numel())
    sizes = [len(x) * length(cut) for cut in columns]
    for part, cut in zip(packed.split(sizes), columns, strict=True):
        part.view(len(x), -1).copy_(x[:, cut])
    out = x.new_empty(at.shape[0], mine)
    dist.all_to_all_single(out.view(-1), packed, [n * mine for n in rows], sizes)
    return out


def messages_rows(x: torch.Tensor, at: Place) -> torch.Tensor:
    """Rows to columns: what arrives is in its place."""
    rows, columns = at.cuts(0), at.cuts(1)
    out = x.new_empty(at.shape[0], length(columns[at.rank]))
    recvs = [(p, out[rows[p]]) for p in at.peers]
    works = start(recvs, [(p, x[:, columns[p]].contiguous()) for p in at.peers])
    out[rows[at.rank]] = x[:, columns[at.rank]]
    finish(works)
    return out


def all_to_all_columns(x: torch.Tensor, at: Place) -> torch.Tensor:
    """Columns to rows: the rows for each rank lie together, what arrives is put in its columns."""
    rows, columns = at.cuts(0), at.cuts(1)
    mine = length(rows[at.rank])
    sizes = [mine * length(cut) for cut in columns]
    arrived = x.new_empty(mine * at.shape[1])
    dist.all_to_all_single(arrived, x.view(-1), sizes, [length(cut) * x.shape[1] for cut in rows])
    return torch.cat([part.view(mine, -1) for part in arrived.split(sizes)], 1)


def messages_columns(x: torch.Tensor, at: Place) -> torch.Tensor:
    """Columns to rows: sends rows as they lie."""
    rows, columns = at.cuts(0), at.cuts(1)
    out = x.new_empty(length(rows[at.rank]), at.shape[1])
    arrived = [(p, x.new_empty(len(out), length(columns[p]))) for p in at.peers]
    works = start(arrived, [(p, x[rows[p]]) for p in at.peers])
    out[:, columns[at.rank]] = x[rows[at.rank]]
    for (peer, part), work in zip(arrived, works):
        work.wait()
        out[:, columns[peer]] = part
    finish(works[3:])
    return out


def all_reduce(x: torch.Tensor, at: Place) -> torch.Tensor:
    out = x.clone()
    dist.all_reduce(out)
    return out


def all_gather_sum(x: torch.Tensor, at: Place) -> torch.Tensor:
    terms = x.new_empty(4, *x.shape)
    gather(terms.view(-1, x.shape[1]), x)
    return terms.sum(0)


def messages_reduce_gather(x: torch.Tensor, at: Place) -> torch.Tensor:
    out, rows = x.new_empty(at.shape), at.cuts(0)
    mine = out[rows[at.rank]]
    _messages_sum(x, at, mine)
    finish(start([(p, out[rows[p]]) for p in at.peers], [(p, mine) for p in at.peers]))
    return out


def reduce_scatter(x: torch.Tensor, at: Place) -> torch.Tensor:
    out = x.new_empty(length(at.cuts(0)[at.rank]), at.shape[1])
    scatter_sum(out, x)
    return out


def all_to_all_sum(x: torch.Tensor, at: Place) -> torch.Tensor:
    terms = torch.empty_like(x)
    dist.all_to_all_single(terms, x)
    return terms.view(4, -1, x.shape[1]).sum(0)


def messages_sum(x: torch.Tensor, at: Place) -> torch.Tensor:
    out = x.new_empty(length(at.cuts(0)[at.rank]), at.shape[1])
    _messages_sum(x, at, out)
    return out


def _messages_sum(x: torch.Tensor, at: Place, out: torch.Tensor) -> None:
    """The sum of all ranks' terms for this rank's rows, added as they arrive."""
    rows = at.cuts(0)
    arrived = [(p, torch.empty_like(out)) for p in at.peers]
    works = start(arrived, [(p, x[rows[p]]) for p in at.peers])
    total = x[rows[at.rank]]
    for (_, term), work in zip(arrived, works):
        work.wait()
        total = torch.add(total, term, out=out)
    finish(works[3:])


def clone(x: torch.Tensor, at: Place) -> torch.Tensor:
    return x[at.cuts(0)[at.rank]].clone()


LINE: dict[str, tuple[Way, ...]] = {
    "S0->R": (all_gather, messages_gather),
    "S0->S1": (all_to_all_rows, messages_rows),
    "S1->S0": (all_to_all_columns, messages_columns),
    "S0->S1 uneven": (all_to_all_rows, messages_rows),
    "P->R": (all_reduce, messages_reduce_gather, all_gather_sum),
    "P->S0": (reduce_scatter, all_to_all_sum, messages_sum),
    "R->S0": (clone,),
}
"""The ways for each case, by its name."""
