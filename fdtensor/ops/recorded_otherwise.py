"""`OTHERWISE`: ops that are recorded as other ops, or on other operands, for some arguments.

Torch's fakes, functionalization and derivatives each know more of a tensor than its shape: whether
it is a number, its strides, its base if it is a view. A program has shapes alone, and so these ops
are recorded as ops that need no more.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch

from fdtensor.layouts.errors import TraceError
from fdtensor.layouts.torch_private import current_autograd_node
from fdtensor.ops.counted_index import LOOKED_UP, PUT, counting
from fdtensor.ops.graph import Call, Full, Var
from fdtensor.ops.strided import part_of, put_back, shape_of, sliced
from fdtensor.ops.unfolded import unfolded

__all__ = ["OTHERWISE"]

aten = torch.ops.aten
_C: Any = torch  # what torch does not declare


class Recorder(Protocol):
    """A recorder of calls; used as a context, it records the ops that torch functions call."""

    types: list[Full]
    calls: list[Call]
    vars: dict[int, Var]
    alive: list[torch.Tensor]

    def recorded(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of a call, which is recorded."""
        ...

    def known(self, tensor: torch.Tensor) -> Var:
        """The value that stands for a tensor."""
        ...

    def plain(self, tree: Any) -> Any:
        """Arguments with expressions for numbers that depend on sizes which are not known."""
        ...

    def __enter__(self) -> Any: ...

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> Any: ...


OTHERWISE: dict[Any, Callable[[Recorder, Any, Any, Any], Any]] = {}
"""By op, a function of a recorder and a call; NotImplemented where nothing special is needed."""


def _of(*ops: Any) -> Callable[[Callable], Callable]:
    def register(f: Callable) -> Callable:
        OTHERWISE.update(dict.fromkeys(ops, f))
        return f

    return register


@_of(aten._new_zeros_with_same_feature_meta.default)
def _zeros_beside(recorder: Recorder, _func: Any, args: Any, kwargs: Any) -> Any:
    """Zeros for a tangent: of the memory of a tensor a program knows nothing."""
    tangent, like = args
    batch = tangent.shape[: kwargs.get("self_num_batch_dims", 0)]
    if not batch:
        return recorder.recorded(aten.zeros_like.default, (like,), {})
    # torch fails on a tangent whose memory is in another order than that of its tensor
    order = sorted(range(like.ndim), key=like.stride, reverse=True)
    sizes = [*batch, *(like.shape[d] for d in order)]
    zeros = recorder.recorded(aten.new_zeros.default, (tangent, sizes), {})
    if order == sorted(order):
        return zeros
    dims = [*range(len(batch)), *(len(batch) + order.index(d) for d in range(like.ndim))]
    return recorder.recorded(aten.permute.default, (zeros, dims), {})


@_of(aten.zeros_like.default, aten.ones_like.default, aten.full_like.default)
def _like_a_number(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """A number that is like another one, which need not be known: for a gradient, the loss."""
    like, *value = args
    if like.ndim:
        return NotImplemented
    number = value or [int(func is aten.ones_like.default)]
    how = {"dtype": kwargs.get("dtype") or like.dtype, "device": like.device}
    return recorder.recorded(aten.full.default, ([], *number), how)


@_of(aten._to_copy.default)
def _number(recorder: Recorder, _func: Any, args: Any, kwargs: Any) -> Any:
    """A number that becomes a tensor."""
    if isinstance(args[0], torch.Tensor):
        return NotImplemented
    return recorder.recorded(aten.scalar_tensor.default, args, {"dtype": kwargs.get("dtype")})


@_of(aten.copy.default)
def _filled(recorder: Recorder, _func: Any, args: Any, kwargs: Any) -> Any:
    """A copy of a number."""
    if isinstance(args[1], torch.Tensor):
        return NotImplemented
    return recorder.recorded(aten.fill.Scalar, args[:2], kwargs)


@_of(aten.nansum.default)
def _over_all_dims(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """A sum over no dims, which is one over all; its fake keeps them all."""
    if args[1:2] != ([],):
        return NotImplemented
    return recorder.recorded(func, (args[0], None, *args[2:]), kwargs)


@_of(
    aten.mse_loss_backward.default,
    aten.smooth_l1_loss_backward.default,
    aten.huber_loss_backward.default,
)
def _of_nothing(recorder: Recorder, _func: Any, args: Any, _kwargs: Any) -> Any:
    """The gradient of a mean of no elements, by whose number the fakes divide."""
    if 0 not in args[1].shape:
        return NotImplemented
    return recorder.recorded(aten.zeros_like.default, (args[1],), {})


@_of(aten._linalg_det.default, aten._linalg_slogdet.default)
def _of_transposed(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """A determinant of a matrix that is not contiguous, as that of its transpose.

    Kernels factorize the transpose of a real matrix that is contiguous, and other matrices as they
    are; derivatives, which solve by the factors, read the strides of the matrix while they are
    recorded. `operand_memory.CONTIGUOUS` gives these ops contiguous blocks.
    """
    if not _is_factorized_as_it_is(args[0]):
        return NotImplemented
    turned = recorder.recorded(aten.transpose.int, (args[0], -2, -1), {})
    return recorder.recorded(func, (turned, *args[1:]), kwargs)


@_of(aten._linalg_solve_ex.default)
def _solved(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """A solution, with the factors that the derivative expects, as for determinants."""
    complex_right = args[0].is_complex() and not kwargs.get("left", True)
    if not complex_right and not _is_factorized_as_it_is(args[0]):
        return NotImplemented
    solved, lu, pivots, info = recorder.recorded(func, args, kwargs)
    if complex_right:  # the kernel conjugates it by a view, whose bit no program has
        turned = recorder.recorded(aten.conj_physical.default, (solved,), {})
        solved = recorder.recorded(aten.conj_physical.default, (turned,), {})
    else:
        lu, pivots, _ = recorder.recorded(aten.linalg_lu_factor_ex.default, args[:1], {})
    return solved, lu, pivots, info


def _is_factorized_as_it_is(matrix: torch.Tensor) -> bool:
    return not (matrix.is_contiguous() or matrix.is_complex())


@_of(aten.index.Tensor, aten._unsafe_index.Tensor)
def _looked_up(recorder: Recorder, _func: Any, args: Any, _kwargs: Any) -> Any:
    """Entries at indices of which one counts its dim, as `vmap` makes them."""
    counted = _counting(recorder, *args)
    if not counted:
        return NotImplemented
    with recorder:
        return LOOKED_UP(*args, counted)


@_of(aten.index_put.default, aten._unsafe_index_put.default)
def _put(recorder: Recorder, _func: Any, args: Any, kwargs: Any) -> Any:
    """A write to such entries."""
    counted = _counting(recorder, *args[:2])
    if not counted:
        return NotImplemented
    accumulate = kwargs.get("accumulate", args[3] if len(args) > 3 else False)
    with recorder:
        return PUT(*args[:3], accumulate, counted)


def _counting(recorder: Recorder, x: torch.Tensor, indices: Any) -> tuple[int, ...]:
    known = [None if t is None else recorder.known(t) for t in indices]
    return counting(recorder.calls, recorder.types, recorder.known(x), known)


@_of(aten.as_strided.default, aten.as_strided_copy.default, aten.as_strided_scatter.default)
def _of_memory(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """An op that counts elements in memory, on the tensor with its dims in the order of memory."""
    tensor, *rest = args
    out = _as_slices(recorder, func, args, kwargs)
    if out is not None:
        return out
    order = sorted(range(tensor.ndim), key=lambda d: -tensor.stride(d))
    if tensor.is_contiguous() or order == list(range(tensor.ndim)):
        _whole_memory(tensor)
        return recorder.recorded(func, args, kwargs)
    tensor = recorder.recorded(aten.permute.default, (tensor, order), {})
    _whole_memory(tensor)
    out = recorder.recorded(func, (tensor, *rest), kwargs)
    if func is not aten.as_strided_scatter.default:
        return out
    back = [order.index(d) for d in range(tensor.ndim)]
    return recorder.recorded(aten.permute.default, (out, back), {})


def _as_slices(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> torch.Tensor | None:
    """The same by slices, which keep cuts; None where no slices do it."""
    tensor, *values = args[: 2 if func is aten.as_strided_scatter.default else 1]
    size, stride, *at = args[1 + len(values) :]
    offset = kwargs.get("storage_offset", at[0] if at else None)
    if not tensor.is_contiguous() or tensor.storage_offset() or tensor.ndim == 0:
        return None
    for shape in (tensor.shape, shape_of(tensor.numel(), size, stride)):
        part = None if shape is None else part_of(shape, size, stride, offset or 0)
        if part is not None:
            with recorder:
                x = tensor if shape is tensor.shape else tensor.view(shape)
                if not values:
                    return sliced(x, part, size)
                return put_back(x, values[0], part).view(tensor.shape)
    return None


def _whole_memory(tensor: torch.Tensor) -> None:
    """Refuses strides over a part of a storage: a rank's block has a storage of its own."""
    nbytes = tensor.untyped_storage().nbytes()
    if not tensor.is_contiguous() or nbytes != tensor.numel() * tensor.itemsize:
        raise TraceError(
            f"as_strided of a view of shape {tuple(tensor.shape)} depends on its place in memory.",
            hint="Take clone(memory_format=torch.contiguous_format) of it, or slice and transpose.",
        )


@_of(aten.unfold_backward.default)
def _with_windows(recorder: Recorder, func: Any, args: Any, _kwargs: Any) -> Any:
    """A tensor after a write to its `unfold`, where functionalization would leave zeros between."""
    if _is_derivative("UnfoldBackward"):
        return NotImplemented
    windows, sizes, *window = args
    spread = functools.partial(recorder.recorded, func, kwargs={})
    written = spread(args)
    base = unfolded(recorder, sizes, tuple(window))
    if base is None:
        return written
    with recorder:
        ones = torch.ones_like(windows, dtype=torch.float32)
    covered = spread((ones, sizes, *window))
    with recorder:
        out = torch.where(covered > 0, written, base)
    if out.stride() == base.stride():
        return out
    return recorder.recorded(aten.copy.default, (base, out), {})  # with the strides of the tensor


def _is_derivative(name: str) -> bool:
    """Whether autograd is running a node of this name: the op is a derivative, and no write."""
    node = current_autograd_node()
    return node is not None and node.name().startswith(name)
