"""`Received`: counts the bytes that collectives bring to this rank, whoever calls them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Received"]


_SILENT = {"wait_tensor", "_wrap_tensor_autograd", "send", "barrier"}
"""What brings nothing to the rank that calls it."""


class Received(TorchDispatchMode):
    """While active, adds up `bytes` and lists `ops`, from the tensors that collectives are given.

    Padding counts. For k ranks: an all_gather brings (k-1)b for blocks of b, a reduce_scatter
    b(k-1)/k and an all_reduce 2b(k-1)/k of its input, rounded down, an all_to_all and a message
    what arrives from others. Collectives that it does not know raise.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self.ops: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # its ops come again, on local tensors
        out = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func._opname
            if name not in _SILENT:
                self.bytes += _received(name, args, out)
                self.ops.append(name)
        return out


def _received(name: str, args: tuple[Any, ...], out: Any) -> int:
    match name, args:
        case "all_gather_into_tensor", (block, *_):
            return out.nbytes - block.nbytes
        case "_allgather_base_", (whole, block, *_):
            return whole.nbytes - block.nbytes
        case "all_reduce" | "all_reduce_", (term, _, group):
            return _reduced(term.nbytes, _group(group).size())
        case "allreduce_", ([term], group, *_):
            return _reduced(term.nbytes, _group(group).size())
        case "reduce_scatter_tensor", (term, *_):
            return term.nbytes - out.nbytes
        case "_reduce_scatter_base_", (block, term, *_):
            return term.nbytes - block.nbytes
        case "all_to_all_single", (_, sizes, _, group):
            return _from_others(out, sizes, _group(group))
        case "alltoall_base_", (whole, _, group, sizes, *_):
            return _from_others(whole, sizes, _group(group))
        case "recv_", (tensors, *_):
            return sum(tensor.nbytes for tensor in tensors)
    raise NotImplementedError(f"the bytes of {name} are not known.")


def _reduced(nbytes: int, count: int) -> int:
    return 2 * nbytes * (count - 1) // count


def _from_others(whole: torch.Tensor, sizes: Sequence[int], group: dist.ProcessGroup) -> int:
    """The bytes of the parts of an all_to_all, of `sizes` along dim 0, that are not this rank's."""
    if not sizes or not len(whole):
        return whole.nbytes * (group.size() - 1) // group.size()
    return whole.nbytes // len(whole) * (sum(sizes) - sizes[group.rank()])


def _group(group: Any) -> dist.ProcessGroup:
    """The group of a name or of a boxed group."""
    if isinstance(group, str):
        return _resolve_process_group(group)  # type: ignore[arg-type]
    return group if isinstance(group, dist.ProcessGroup) else dist.ProcessGroup.unbox(group)
