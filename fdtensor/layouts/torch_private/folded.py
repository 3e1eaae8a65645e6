"""`folding`: attention under `vmap`, as one of a batch that is as many times larger."""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

import torch
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
from torch.utils import _pytree

__all__ = ["folding"]

_C: Any = torch._C
_functorch: Any = _C._functorch

_NAMES = (
    "flash_attention_for_cpu",
    "flash_attention_for_cpu_backward",
    "flash_attention_backward",
    "efficient_attention_backward",
    "cudnn_attention_backward",
)
KERNELS = tuple([getattr(torch.ops.aten, f"_scaled_dot_product_{n}").default for n in _NAMES])
"""The kernels for which torch has no batching rule."""


@contextlib.contextmanager
def folding() -> Generator[None]:
    """A context in which `vmap` folds its dim into the batch of the kernels of attention.

    Torch has no batching rule for them. The batch is the first dim of the results and of operands
    of three dims or more; a tensor of two is a mask, smaller ones are the same for all.
    """
    library = torch.library.Library("aten", "IMPL")
    try:
        for op in KERNELS:
            if not _C._dispatch_has_kernel_for_dispatch_key(op.name(), "FuncTorchBatched"):
                library.impl(op, _folded(op), "FuncTorchBatched")
        yield
    finally:
        library._destroy()


def _folded(op: Any) -> Any:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        interpreter: Any = retrieve_current_functorch_interpreter()
        level, count = interpreter.level(), interpreter.batch_size()
        leaves, spec = _pytree.tree_flatten((args, kwargs))
        with _C._ExcludeDispatchKeyGuard(_C.DispatchKeySet(_C.DispatchKey.FuncTorchBatched)):
            apart = [_apart(leaf, level, count) for leaf in leaves]
            sizes = [t.shape[1] for t in apart if isinstance(t, torch.Tensor) and t.dim() > 3]
            args, kwargs = _pytree.tree_unflatten([_flat(t, max(sizes)) for t in apart], spec)
            outs, tree = _pytree.tree_flatten(op(*args, **kwargs))
            parts = [t.unflatten(0, (count, -1)) if _has_batch(t) else t for t in outs]
        mapped = [_functorch._add_batch_dim(t, 0, level) if _has_batch(t) else t for t in parts]
        return _pytree.tree_unflatten(mapped, tree)

    return kernel


def _has_batch(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 2


def _apart(leaf: Any, level: int, count: int) -> Any:
    """An operand that has a batch, or is another one for each entry, with a dim of the entries."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    tensor, at = _functorch._unwrap_batched(leaf, level)
    if at is not None:
        tensor = tensor.movedim(at, 0)
        return tensor[:, None, None] if tensor.dim() == 3 else tensor
    return tensor.expand(count, *tensor.shape) if tensor.dim() > 2 else tensor


def _flat(leaf: Any, batch: int) -> Any:
    """The operand with the entries of the `vmap` in its first dim."""
    if not isinstance(leaf, torch.Tensor) or leaf.dim() < 4:
        return leaf
    return leaf.expand(-1, batch, *leaf.shape[2:]).flatten(0, 1)
