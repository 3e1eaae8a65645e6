"""Tensors that fill a type, cut and put together without the library's own index code.

Values are small integers, so that every reduction is exact in every dtype that has it, in any
order. Arithmetic is done in the widest dtype of the same kind and cast back. Other tensors may be
spread too: the terms of their elements are of about the size of the element.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import compress

import torch

from fdtensor.layouts.mesh import Coord
from fdtensor.layouts.placement import ReduceOp
from fdtensor.layouts.tensor_type import TensorType

__all__ = ["block", "full_tensor", "gather_full", "reduced", "scatter"]


def full_tensor(type: TensorType, seed: int) -> torch.Tensor:
    """A random tensor of the type's shape and dtype: integers from -9 to 9, or 0 to 9, or bools.

    >>> fd.testing.full_tensor(TensorType((4,), torch.int64, Mesh(x=2).layout()), seed=0)
    tensor([ 6, -5, -9, -9])
    """
    generator = torch.Generator().manual_seed(2 * seed)
    return _random(type.shape, type.dtype, 9, generator).to(type.dtype)


def block(tensor: torch.Tensor, type: TensorType, rank: int) -> torch.Tensor:
    """The block of `rank` of a tensor that is not pending: its rows, columns, ..., by its type.

    >>> rows = TensorType((5,), torch.int64, Mesh(x=2).layout("x"))
    >>> fd.testing.block(torch.arange(5), rows, rank=1)
    tensor([3, 4])
    """
    part = tensor.to(_wide(type.dtype))
    for dim, indices in enumerate(type.index(rank)):
        part = part.index_select(dim, torch.tensor(indices, dtype=torch.int64))
    return part.to(type.dtype, copy=True)


def scatter(tensor: torch.Tensor, type: TensorType, seed: int) -> tuple[torch.Tensor, ...]:
    """Each rank's local tensor of `tensor`, in mesh order.

    Pending terms are random, and different for every coordinate along the partial axes; reduced
    over all those axes they give `tensor` exactly, or, where it has floats that are not integers,
    but for rounding. Replicas hold the same term.

        local = scatter(torch.arange(6), TensorType((6,), torch.int64, layout), seed=0)
        x = DTensor(local, type, SimulatedComm(layout.mesh))

    >>> terms = TensorType((4,), torch.int64, Mesh(x=2).layout(partial={"x": "sum"}))
    >>> left, right = fd.testing.scatter(torch.arange(4), terms, seed=0)
    >>> left + right
    tensor([0, 1, 2, 3])
    """
    generator = torch.Generator().manual_seed(2 * seed + 1)
    places = list(type.mesh.indices(tuple(type.layout.partial)))
    op = next(iter(type.layout.partial.values()), None)
    wide = tensor.to(_wide(type.dtype))
    terms = _split(wide, op, len(places), type.dtype, generator) if op else wide[None]
    term = dict(zip(places, terms.to(type.dtype), strict=True))
    return tuple(block(term[_pending(type, rank)], type, rank) for rank in type.mesh.ranks)


def gather_full(blocks: Sequence[torch.Tensor], type: TensorType) -> torch.Tensor:
    """The full tensor of each rank's local tensor, given in mesh order.

    Asserts that every block has its shape and dtype, that replicas agree, nan with nan, and that
    some rank holds every element of every pending term. Terms are reduced in the order of the mesh.

    >>> rows = TensorType((5,), torch.int64, Mesh(x=2).layout("x"))
    >>> fd.testing.gather_full((torch.tensor([0, 1, 2]), torch.tensor([3, 4])), rows)
    tensor([0, 1, 2, 3, 4])
    """
    terms: dict[Coord, tuple[torch.Tensor, torch.Tensor]] = {}
    for rank, local in zip(type.mesh.ranks, blocks, strict=True):
        kind = (tuple(local.shape), local.dtype)
        expected = (tuple(map(len, type.index(rank))), type.dtype)
        assert kind == expected, f"rank {rank} holds {kind}, but its block of {type} is {expected}."
        wide = local.to(_wide(type.dtype))
        empty = torch.zeros(type.shape, dtype=wide.dtype)
        term, known = terms.setdefault(_pending(type, rank), (empty, empty != empty))
        where = _where(type.index(rank))
        again = known[where]
        before, now = term[where][again], wide[again]
        same = (before == now) | ((before != before) & (now != now))  # nan equals nan
        assert same.all(), f"rank {rank} is no replica in {type}."
        term[where], known[where] = wide, True
    assert all(known.all() for _, known in terms.values()), f"the blocks of {type} leave holes."
    stacked = torch.stack([term for term, _ in terms.values()])
    op = next(iter(type.layout.partial.values()), None)
    return (reduced(stacked, op) if op else stacked[0]).to(type.dtype)


def _where(index: Sequence[Sequence[int]]) -> tuple[slice, ...] | tuple[torch.Tensor, ...]:
    """The indices of a block as what selects it from the full tensor."""
    if all(isinstance(indices, range) for indices in index):
        return tuple(
            slice(indices[0], indices[-1] + 1) if indices else slice(0) for indices in index
        )
    places = [torch.tensor(indices, dtype=torch.int64) for indices in index]
    return torch.meshgrid(*places, indexing="ij")


def reduced(terms: torch.Tensor, reduce_op: ReduceOp) -> torch.Tensor:
    """The reduction of `terms` over dim 0. Of bools the sum is `or` and the product `and`.

    >>> fd.testing.reduced(torch.tensor([[1, 5], [2, 3]]), "max")
    tensor([2, 5])
    """
    wide = terms.to(_wide(terms.dtype))
    match reduce_op:
        case "sum":
            total = wide.sum(0)
        case "avg":
            total = wide.sum(0) / len(wide)
        case "product":
            total = wide.prod(0)
        case "max":
            total = wide.amax(0)
        case "min":
            total = wide.amin(0)
        case "band":
            total = functools.reduce(torch.bitwise_and, wide)
        case "bor":
            total = functools.reduce(torch.bitwise_or, wide)
        case "bxor":
            total = functools.reduce(torch.bitwise_xor, wide)
    return total.to(terms.dtype)


def _split(
    full: torch.Tensor, op: ReduceOp, count: int, dtype: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    """`count` random terms that reduce to `full`; which one makes up the rest is random too."""
    shape = (count, *full.shape)
    noise = _random(shape, dtype, 3, generator)
    owner = torch.randint(count, (1, *full.shape), generator=generator)
    others = torch.arange(count).reshape(-1, *[1] * full.ndim) != owner
    match op:
        case "sum" | "max" if dtype is torch.bool:
            return torch.where(others, full & noise, full)
        case "product" | "min" if dtype is torch.bool:
            return torch.where(others, full | noise, full)
        case "sum":
            noise = noise * others * _unit(full)
            return torch.where(others, noise, full - noise.sum(0))
        case "avg":  # the noise of any block of ranks is a multiple of its size: means are exact
            return full + count * (noise - noise.roll(1, 0)) * _unit(full)
        case "product":
            signs = (
                torch.where(noise.real > 0, -1, 1) if noise.is_complex() else 1 - 2 * (noise > 0)
            )
            signs = torch.where(others, signs, 1)
            return torch.where(others, signs, full * signs.prod(0))
        case "max":
            return torch.where(others, torch.minimum(full, noise), full)
        case "min":
            return torch.where(others, torch.maximum(full, noise), full)
        case "band":
            return torch.where(others, full | noise, full)
        case "bor":
            return torch.where(others, full & noise, full)
        case "bxor":
            noise = noise * others
            return torch.where(others, noise, full ^ functools.reduce(torch.bitwise_xor, noise))


def _unit(full: torch.Tensor) -> torch.Tensor | int:
    """The power of two below each element, for those that are not all integers, else 1."""
    if full.dtype is torch.int64:
        return 1
    parts = torch.view_as_real(full) if full.is_complex() else full
    size = full.abs()
    finite = size.isfinite() & (size > 0)
    if torch.equal(parts.nan_to_num(), parts.nan_to_num().round()) or not finite.any():
        return 1
    largest = size.where(finite, 0).max()
    exponent = torch.frexp(size.where(finite, largest)).exponent
    return torch.ldexp(torch.ones_like(size), exponent - 1)


def _random(
    shape: Sequence[int], dtype: torch.dtype, most: int, generator: torch.Generator
) -> torch.Tensor:
    """Random integers of at most `most` that `dtype` has, in the wide dtype of its kind."""
    if dtype.is_complex:
        parts = [_random(shape, torch.float64, most, generator) for _ in range(2)]
        return torch.complex(*parts)
    most = 1 if dtype is torch.bool else most
    least = -most if dtype.is_signed else 0
    drawn = torch.randint(least, most + 1, tuple(shape), generator=generator)
    return drawn.to(_wide(dtype))


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The widest dtype of the same kind, which holds all values of `dtype`."""
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else torch.int64


def _pending(type: TensorType, rank: int) -> Coord:
    """The index of `rank` along each partial axis."""
    coord = type.mesh.coord(rank)
    assert coord is not None
    return tuple(compress(coord, [axis in type.layout.partial for axis in type.mesh.axes]))
