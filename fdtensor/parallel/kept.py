"""`Kept`: what autograd keeps of a tensor for its backward: itself, or this rank's block of it."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Any

import attrs
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from fdtensor.layouts.dtypes import known
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import Replicate, Shard
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.layouts.torch_private import version_of, without_modes
from fdtensor.plans.planner import plan
from fdtensor.runtime.interpreter import run
from fdtensor.runtime.replication import storage_of

__all__ = [
    "Block",
    "Kept",
    "View",
    "Whole",
    "kept_block",
    "kept_whole",
    "type_of_blocks",
    "unpacked",
]


@attrs.frozen(eq=False)
class Whole:
    """A tensor that stays as it is."""

    tensor: torch.Tensor
    version: int


@attrs.frozen(eq=False)
class Block:
    """This rank's block of a tensor."""

    value: Any
    cut: TensorType
    comm: Any
    memory: StorageWeakRef
    """No other memory takes its number while this is there."""

    def gathered(self) -> torch.Tensor:
        """The full tensor of the blocks, contiguous; collective."""
        replicated = Layout(self.cut.mesh, [Replicate()])
        gather = plan(self.cut, replicated, cost=self.comm.cost)
        return self.comm.leaves(run(gather, self.value, self.comm, check="never"))[0]


@attrs.frozen(eq=False)
class View:
    """A tensor that is kept as a block of it, or of another view of the same elements."""

    block: Block
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def whole(self) -> torch.Tensor:
        """The tensor as it lay in memory, so that the backward computes the same to the bit."""
        tensor = self.block.gathered().view(_bare(self.shape, self.stride))
        if any(
            n > 1 and s != t
            for n, s, t in zip(tensor.shape, self.stride, tensor.stride(), strict=True)
        ):
            bare = [0 if n == 1 else s for n, s in zip(tensor.shape, self.stride, strict=True)]
            laid = torch.empty_strided(tensor.shape, bare, dtype=tensor.dtype, device=tensor.device)
            tensor = laid.copy_(tensor)
        return tensor.expand(self.shape)


Kept = Whole | View


def kept_whole(tensor: torch.Tensor) -> Whole:
    """The tensor itself."""
    return Whole(tensor, version_of(tensor))


def kept_block(
    tensor: torch.Tensor, cut: TensorType, comm: Any, held: MutableMapping[Any, Block]
) -> View:
    """The tensor as this rank's block of it; `held` has what is kept now, so that none is twice."""
    shape, stride = tuple(tensor.shape), tensor.stride()
    lying = tensor.numel() if tensor.is_contiguous() else (shape, stride)
    place = storage_of(tensor), tensor.storage_offset(), version_of(tensor)
    key = (*place, tensor.dtype, lying)
    block = held.get(key)
    if block is None:
        with without_modes():
            block = held[key] = _block(comm, cut, tensor)
    return View(block, shape, stride)


def unpacked(kept: Kept) -> torch.Tensor:
    """The tensor that was kept; collective where it is a block.

    Raises RuntimeError, as torch does, where it has been changed in place.
    """
    if isinstance(kept, View):
        with torch.no_grad():
            return kept.whole()
    if version_of(kept.tensor) != kept.version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: a tensor of shape {tuple(kept.tensor.shape)} is at version "
            f"{version_of(kept.tensor)}; expected version {kept.version} instead."
        )
    return kept.tensor


def type_of_blocks(tensor: torch.Tensor, line: Mesh, dim: int) -> TensorType | None:
    """The type of a tensor that the ranks of a line cut along `dim`.

    None where it cannot be cut, or where the largest block would be no smaller.
    """
    dim = dim + tensor.ndim if dim < 0 else dim
    if (
        type(tensor) is not torch.Tensor
        or tensor.layout is not torch.strided
        or not known(tensor.dtype)
        or not 0 <= dim < tensor.ndim
        or tensor.shape[dim] < 2
    ):
        return None
    lying = sorted(
        (s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if s and n > 1
    )
    if tensor.stride(dim) == 0 or _overlaps(lying):
        return None
    shape = _bare(tensor.shape, tensor.stride())
    cut = TensorType(shape, tensor.dtype, Layout(line, [Shard(dim)]))
    largest = cut.local_nbytes(line.order[0])
    return cut if largest < tensor.untyped_storage().nbytes() else None


def _overlaps(lying: Sequence[tuple[int, int]]) -> bool:
    """Whether dims of these strides and sizes, in ascending order, meet the same memory twice."""
    reach = 0
    for stride, size in lying:
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def _bare(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """The shape with one index along each dim that was expanded."""
    return tuple([1 if s == 0 and n > 1 else n for n, s in zip(shape, stride, strict=True)])


def _block(comm: Any, cut: TensorType, tensor: torch.Tensor) -> Block:
    replicated = cut.with_layout(Layout(cut.mesh, [Replicate()]))
    own = tensor.as_strided(cut.shape, tensor.stride())
    value = comm.value([own] * comm.width(replicated))
    slicing = plan(replicated, cut, cost=comm.cost)
    blocks = run(slicing, value, comm, check="never")
    memory = StorageWeakRef(tensor.untyped_storage())
    return Block(blocks, cut, comm, memory)
