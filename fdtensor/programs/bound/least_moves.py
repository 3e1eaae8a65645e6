"""`least_seconds`: what moves of a value take at least, between all placements at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from fdtensor.layouts.placement import Cut, Partial
from fdtensor.ops.graph import Full
from fdtensor.ops.precision import HALVES, is_sum, wide_of
from fdtensor.plans.cost import CostModel
from fdtensor.programs.bound.space import Floats, Sites
from fdtensor.programs.moves import LEAST
from fdtensor.programs.nodes import Place
from fdtensor.programs.rough_moves import fastest

__all__ = ["least_seconds"]


def least_seconds(
    full: Full,
    sizes: Sequence[int],
    src: Sites,
    dst: Sites,
    cost: CostModel,
    reduce_dtype: torch.dtype | None,
) -> Floats:
    """The seconds that moves take at least: a row for each of `src`, a column for each of `dst`.

    A rank receives what it wants but for the part that it holds. An element of n pending terms
    that k ranks want takes n - 1 messages of terms and k - 1 of sums, in the mean over the ranks.
    """
    factors = np.ones((1, 1, len(_factors(1, "free", "free"))))
    for n, ps, qs in zip(sizes, src.along, dst.along, strict=True):
        own = np.array([[_factors(n, p, q) for q in qs] for p in ps])
        rows, columns = (a * b for a, b in zip(factors.shape[:2], own.shape[:2], strict=True))
        both = np.einsum("pqf,rsf->prqsf", factors, own)
        factors = both.reshape((rows, columns, -1))
    after, elsewhere, kept, terms, readers, ranks, without_sums = np.moveaxis(factors, 2, 0)
    wide = 1.0
    if reduce_dtype is not None and full.dtype in HALVES:
        wide = wide_of(full.dtype, reduce_dtype).itemsize / full.dtype.itemsize
    sent = (terms - 1) * np.where(without_sums == 0, wide, 1.0)
    reduced = kept / ranks * (sent + readers - 1)
    moved = np.where(terms > 1, reduced, after * (1 - 1 / elsewhere)) * full.nbytes
    launch, bandwidth = fastest(cost)
    moved *= 1 - _unevenness(full, sizes, src, dst)
    seconds: Floats = np.where(moved > 0, moved / bandwidth + launch, 0.0)
    seconds = seconds[np.ix_(src.in_grid, dst.in_grid)]
    if all(n > 1 for n in sizes) and not any("free" in places for places in dst.along):
        seconds = np.maximum(seconds, LEAST * src.differ(dst))  # a change of the order too
    return seconds


def _unevenness(full: Full, sizes: Sequence[int], src: Sites, dst: Sites) -> float:
    """The part that blocks of a dim may lack of their mean, at most."""
    places = zip(sizes, src.along, dst.along, strict=True)
    cuts = {(n, p.dim) for n, ps, qs in places for p in (*ps, *qs) if isinstance(p, Cut)}
    sides = [(n, full.shape[d]) for n, d in cuts if full.shape[d] % n]
    return max((min(1.0, n / size) for n, size in sides), default=0.0)


def _factors(n: int, p: Place, q: Place) -> tuple[float, ...]:
    """What an axis of n ranks does to a move from placement `p` to `q`: seven factors.

    The part that a rank wants; among how many ranks what it wants lies; the part that stays cut;
    terms, ranks that want their sum, ranks of the move; 0 where a sum is pending, else 1.
    """
    stays = q in (p, "free") or (isinstance(q, Partial) and not isinstance(p, Partial))
    if stays:  # what is not pending becomes so in place: each rank may hold a part of it
        part = 1 / n if isinstance(p, Cut) or p != q != "free" else 1.0
        return part, 1.0, part, 1.0, 1.0, 1.0, 1.0
    wanted = 1 / n if isinstance(q, (Cut, Partial)) else 1.0
    # two cuts of one dim may have most in common
    same = isinstance(p, Cut) and isinstance(q, Cut) and p.dim == q.dim
    elsewhere = n if isinstance(p, Cut) and not same else 1.0
    terms = n if isinstance(p, Partial) else 1.0
    return wanted, elsewhere, 1.0, terms, wanted * n, n, float(not is_sum(p))  # type: ignore[arg-type]
