"""`Tiling`: how a tensor is cut into even blocks that lie one after the other, and put together."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import attrs
import torch

from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.remembered import remembered
from fdtensor.layouts.tensor_type import TensorType

__all__ = ["Tiling", "along", "join", "outermost", "split", "tiling"]

Ints = tuple[int, ...]


@attrs.frozen(eq=False)
class Tiling:
    """Even blocks of a tensor of shape `full`, one after the other along dim 0: shape `blocks`.

    `cut` is the full shape with a dim for each cut, `order` the permutation that puts those first,
    which gives the shape `stacked`.
    """

    full: Ints
    blocks: Ints
    cut: Ints
    order: Ints
    stacked: Ints
    strides: Ints
    """Those that make `stacked` of a contiguous full tensor."""
    back: Ints
    """Those that make `cut` of the contiguous blocks."""
    straight: bool
    """Whether the blocks lie one after the other already."""


@remembered(4096)
def tiling(full: Ints, counts: Ints, dims: Ints, stack: Ints | None = None) -> Tiling:
    """The blocks that cuts of `dims[i]` into `counts[i]` make; cuts of one dim from outer to inner.

    Blocks go with the last cut fastest, or in the order of the cuts that `stack` lists.
    """
    shape: list[int] = []
    cuts = [0] * len(counts)
    rest: list[int] = []
    for d, size in enumerate(full):
        for i, (count, dim) in enumerate(zip(counts, dims, strict=True)):
            if dim == d:
                cuts[i] = len(shape)
                shape.append(count)
                size //= count
        rest.append(len(shape))
        shape.append(size)
    order = [cuts[i] for i in (range(len(cuts)) if stack is None else stack)] + rest
    inverse = [order.index(i) for i in range(len(order))]
    stacked = [shape[i] for i in order]
    block = [shape[i] for i in rest]
    large = [i for i in order if shape[i] > 1]
    return Tiling(
        full,
        (prod(counts) * block[0], *block[1:]),
        tuple(shape),
        tuple(order),
        tuple(stacked),
        tuple([_strides(shape)[i] for i in order]),
        tuple([_strides(stacked)[i] for i in inverse]),
        large == sorted(large),
    )


@remembered(4096)
def along(mesh: Mesh, axes: tuple[str, ...], full: Ints, dims: Ints) -> Tiling:
    """The blocks of the ranks along `axes`, which cut `dims`, in the order of a process group.

    A group has its ranks in ascending order, and so its axes in that of the mesh.
    """
    stack = sorted(range(len(axes)), key=lambda i: mesh.axis(axes[i]))
    return tiling(full, tuple([mesh.axis_size(axis) for axis in axes]), dims, tuple(stack))


def outermost(type: TensorType, rank: int, axes: tuple[str, ...], dims: Ints) -> bool:
    """Whether the blocks of the ranks along `axes` lie one after the other in a local tensor."""
    if type.mesh.position(rank) is None:
        return True
    return along(type.mesh, axes, type.local_shape(rank), dims).straight


def _strides(shape: Sequence[int]) -> list[int]:
    return [prod(shape[i + 1 :]) for i in range(len(shape))]


def split(tensor: torch.Tensor, tiles: Tiling) -> torch.Tensor:
    """The blocks of a tensor, contiguous: a view where it can be."""
    if tiles.straight:
        return _shaped(tensor.contiguous(), tiles.blocks)
    if tensor.is_contiguous():
        stacked = tensor.as_strided(tiles.stacked, tiles.strides)
    else:
        stacked = tensor.view(tiles.cut).permute(tiles.order)
    return stacked.reshape(tiles.blocks).contiguous()


def join(blocks: torch.Tensor, tiles: Tiling) -> torch.Tensor:
    """The tensor of blocks, contiguous: the inverse of `split`."""
    blocks = blocks.contiguous()  # `torch.cat` of channels_last blocks is not
    if tiles.straight:
        return _shaped(blocks, tiles.full)
    return blocks.as_strided(tiles.cut, tiles.back).reshape(tiles.full).contiguous()


def _shaped(tensor: torch.Tensor, shape: Ints) -> torch.Tensor:
    return tensor if tensor.shape == shape else tensor.view(shape)
