"""`Move`: a named collective on tensors that each rank has for itself, as data.

To the ranks along its axes a move is a change of layout of one tensor, and a plan runs it:

    psum            P(sum)  -> R            transpose   P(sum)  -> R
    all_gather      S(d)    -> R                        P(sum)  -> S(d)
    reduce_scatter  P(sum)  -> S(d)                     S(d)    -> R
    all_to_all      S(i)    -> S(j)                     S(j)    -> S(i)

The transpose goes back, with P for R and R for P: each rank's cotangent is that of its own copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch

from fdtensor.layouts.blocks import chunk
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Coord, Mesh
from fdtensor.layouts.placement import Partial, Placement, Ragged, Replicate, Shard
from fdtensor.layouts.remembered import remembered
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.plans.cost import NAMED_LINKS, CostModel
from fdtensor.plans.planner import Plan, plan

__all__ = ["Move", "Permute", "LocalCollective", "blocks", "plan_of", "quoted"]


@attrs.frozen
class Move:
    """A tensor that goes from one placement to another on the ranks along `axes`, major first."""

    axes: tuple[str, ...]
    src: Placement
    dst: Placement
    """Blocks are always `Ragged`, which says the size of each."""

    def transposed(self) -> Move:
        """The move of the cotangents."""
        return Move(self.axes, _dual(self.dst), _dual(self.src))

    def shifted(self) -> Move:
        """The same move of tensors stacked along a new first dim."""
        return Move(self.axes, _shifted(self.src), _shifted(self.dst))


@attrs.frozen
class Permute:
    """Index `src` along `axes` gives its tensor to index `dst`, for pairs; others get zeros."""

    axes: tuple[str, ...]
    perm: tuple[tuple[int, int], ...]

    def transposed(self) -> Permute:
        """The move of the cotangents."""
        return Permute(self.axes, tuple(sorted((dst, src) for src, dst in self.perm)))

    def shifted(self) -> Permute:
        """The same move of tensors stacked along a new first dim."""
        return self


LocalCollective = Move | Permute
"""The movement of a named collective, of one tensor of each rank."""


def _dual(placement: Placement) -> Placement:
    match placement:
        case Replicate():
            return Partial("sum")
        case Partial():
            return Replicate()
        case _:
            return placement


def _shifted(placement: Placement) -> Placement:
    match placement:
        case Ragged(dim, sizes):
            return Ragged(dim + 1, sizes)
        case _:
            return placement


def quoted(axes: Sequence[str]) -> str:
    """Axes as an error names them: `'dp'`, `('dp', 'tp')`."""
    return repr(axes[0] if len(axes) == 1 else tuple(axes))


# --- on the ranks along its axes -------------------------------------------------------------


def blocks(size: int, count: int) -> tuple[int, ...]:
    """The sizes of the blocks that `Shard` makes of a dim."""
    spans = [chunk(size, count, i) for i in range(count)]
    return tuple([stop - start for start, stop in spans])


def plan_of(
    move: LocalCollective, mesh: Mesh, coord: Coord, like: torch.Tensor, cost: CostModel
) -> Plan | None:
    """The plan of a move on the coset of `coord`, whose ranks hold tensors like this one.

    None where none moves. The tensors of a `Permute` are the rows of one, on other meshes.
    """
    ranks = mesh.coset(move.axes, coord)
    return _plan(move, ranks, _slowest(move.axes, mesh, cost), tuple(like.shape), like.dtype, cost)


def _slowest(axes: Sequence[str], mesh: Mesh, cost: CostModel) -> str | None:
    """The name of the slowest link of some axes; None where the mesh does not name it."""
    links = dict(mesh.links)
    named = [links.get(axis) for axis in axes]
    rates = [cost.bandwidth if link is None else NAMED_LINKS[link].bandwidth for link in named]
    return min(zip(rates, named, strict=True), key=lambda pair: pair[0], default=(0.0, None))[1]


@remembered(8192)
def _plan(
    move: LocalCollective,
    ranks: tuple[int, ...],
    link: str | None,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    cost: CostModel,
) -> Plan | None:
    """The plan of a move where a rank holds a tensor of `shape`; None where none moves."""
    if isinstance(move, Permute):
        if not move.perm:
            return None
        src = _line([ranks[i] for i, _ in move.perm], "rank", link)
        dst = _line([ranks[i] for _, i in move.perm], "rank", link)
        rows = TensorType((len(move.perm), *shape), dtype, Layout(src, [Shard(0)]))
        return plan(rows, Layout(dst, [Shard(0)]), cost=cost)
    line = _line(ranks, move.axes[0] if len(move.axes) == 1 else "rank", link)
    full = list(shape)
    if isinstance(move.src, Ragged):
        full[move.src.dim] = sum(move.src.sizes)
    start, end = (Layout(line, [_even(p)]) for p in (move.src, move.dst))
    return plan(TensorType(tuple(full), dtype, start), end, cost=cost)


def _line(ranks: Sequence[int], axis: str, link: str | None) -> Mesh:
    return Mesh.from_ranks(list(ranks), axis, links={axis: link} if link else None)


def _even(placement: Placement) -> Placement:
    """Blocks as `Shard` where it makes the same ones: that has the faster collectives."""
    if isinstance(placement, Ragged):
        sizes = placement.sizes
        return Shard(placement.dim) if sizes == blocks(sum(sizes), len(sizes)) else placement
    return placement
