"""`checked_write`: runs a call, and refuses writes in place or to `out=` that torch refuses.

Functionalization computes a new value and puts it in the place of the old one. It does not check
whether the tensor could take the value: a real tensor cannot take a complex result, nor can
elements that share memory with each other or, shifted, with an operand.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from fdtensor.layouts.callsite import user_line
from fdtensor.layouts.dtypes import dtype_name
from fdtensor.layouts.errors import TraceError
from fdtensor.layouts.torch_private import FOREACH
from fdtensor.ops.overlap import elements_overlap, is_expanded, memory_of, overlap_partly
from fdtensor.ops.parts import is_part, note_view, refuse_written, whole_written
from fdtensor.ops.torch_refusal import (
    dtypes_of,
    refuse_cast,
    refuse_out,
    refuse_overlap,
    tensors_in_arguments,
)

__all__ = ["checked_write"]

_AUGMENTED = frozenset(
    f"__i{name}__"
    for name in (
        *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"),
        *("and", "or", "xor", "lshift", "rshift", "matmul"),
    )
)

_OF_SHAPES = frozenset(
    (
        *("requires_grad_", "detach_", "rename_", "share_memory_", "set_", "swap_"),
        *("t_", "transpose_", "swapaxes_", "swapdims_", "squeeze_", "unsqueeze_"),
        *("resize_", "resize_as_", "as_strided_"),
    )
)
"""Methods that change the shape or the attributes of a tensor, and write no values."""

_ADDING = frozenset(
    (
        *("sum", "nansum", "mean", "nanmean", "prod", "var", "std", "norm"),
        *("cumsum", "cumprod", "logcumsumexp"),
    )
)
"""Functions whose result in another dtype is another one if operands are cast before."""

_SHARED = "_fdtensor_shares_memory"


def checked_write(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The result of the call; raises `RuntimeError` or `TraceError` for a write that cannot be."""
    name = getattr(func, "__name__", "")
    if kwargs.get("out") is not None:
        return _to_out(func, args, kwargs)
    if FOREACH in name and name.endswith("_"):
        whole_written(tensors_in_arguments(args[:1]))
        if _share_memory(args, kwargs):
            return _one_by_one(func, args, kwargs)
    target = args[0] if args and isinstance(args[0], torch.Tensor) else None
    if target is not None and name in ("resize_", "resize_as_"):
        _refuse_out_of_order(name, target)
    if name == "__setitem__" and target is not None and _is_number(args[1]):
        value: Any = args[2]  # torch would read the value of the index
        whole_written((target,))
        target.copy_(torch.where(args[1], value, target))
        return None
    if target is None or not _writes(name):
        return _marked(_as_plain_view(name, func(*args, **kwargs), args), target)
    before, part = target.shape, None
    if name == "__setitem__":
        part, value = _view(target, args[1]), args[2]
        if part is not None and isinstance(value, torch.Tensor):
            refuse_overlap(torch.Tensor.copy_, (part, value), {})
    else:
        refuse_overlap(func, args, kwargs)
        refuse_cast(func, args, kwargs)
    _refuse_shared(name, target)
    whole_written((target,))
    if part is None and _loses_order(func, target):
        row_major = target.clone(memory_format=torch.contiguous_format)
        func(row_major, *args[1:], **kwargs)
        _check_shape(row_major, before)
        target.copy_(row_major)
        return None if name == "__setitem__" else target
    out = func(*args, **kwargs)
    _check_shape(target, before)
    return out


def _share_memory(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether tensors that an op of lists writes to share memory, with each other or operands."""

    def storages(tree: Any) -> list[int]:
        regions = map(memory_of, tensors_in_arguments(tree))
        return [region.storage for region in regions if region is not None]

    targets = args[0] if args else kwargs.get("self")
    others = args[1:], {name: a for name, a in kwargs.items() if name != "self"}
    written = storages(targets)
    return len({*written}) < len(written) or not {*written}.isdisjoint(storages(others))


def _one_by_one(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Runs an op of lists for each entry, so that each write is seen by the next one."""
    targets = args[0] if args else kwargs["self"]
    lists = [a for a in (*args, *kwargs.values()) if isinstance(a, (list, tuple))]
    if any(len(a) != len(targets) for a in lists):
        return func(*args, **kwargs)  # which torch refuses
    for i, target in enumerate(targets):
        own, named = [_entry(a, i) for a in args], {n: _entry(a, i) for n, a in kwargs.items()}
        others = (t for t in tensors_in_arguments((own, named)) if t is not target)
        if any(overlap_partly(target, t) for t in others):
            raise TraceError(
                f"{func.__name__} writes to a tensor that shares a part of an operand's memory.",
                line=user_line() or "not known",
                hint="Give it a clone() of the operand.",
            )
        func(*own, **named)
    return list(targets)


def _entry(argument: Any, i: int) -> Any:
    """The list of entry `i` alone; what is no list stays."""
    return argument[i : i + 1] if isinstance(argument, (list, tuple)) else argument


def _refuse_out_of_order(name: str, target: torch.Tensor) -> None:
    if not target.is_contiguous():
        raise TraceError(
            f"{name} of a tensor whose elements do not lie in the order of its shape depends on "
            "where they lie.",
            line=user_line() or "not known",
            hint="Take contiguous() of it, or reshape().",
        )


def _refuse_shared(name: str, target: torch.Tensor) -> None:
    refuse_written(name, target)
    if getattr(target, _SHARED, False):
        part = "" if elements_overlap(target) else "a view of "
        raise TraceError(
            f"{name} writes to {part}a tensor of which several elements share one place in memory.",
            line=user_line() or "not known",
            hint="Write to the tensor before expand() or unfold(), or to a clone().",
        )


def _is_number(index: Any) -> bool:
    """Whether an index is a bool tensor without dims, which takes all of a tensor or nothing."""
    return isinstance(index, torch.Tensor) and index.dtype == torch.bool and not index.ndim


def _loses_order(func: Any, target: torch.Tensor) -> bool:
    """Whether a write would make the strides of its target those of a row-major tensor.

    The functional op computes a new tensor, which takes the place of the target, strides included;
    a later `contiguous()` would read the new strides.
    """
    name = func.__name__
    if name == "fill_diagonal_":  # which counts elements in memory
        return True
    return not target.is_contiguous() and _is_dense(target) and not _pointwise(name)


def _is_dense(t: torch.Tensor) -> bool:
    """Whether the elements fill their memory, in any order of the dims."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(t.stride(), t.shape, strict=True) if n > 1):
        if stride != expected:
            return False
        expected *= size
    return True


@functools.cache
def _pointwise(name: str) -> bool:
    """Whether the op of a method is elementwise by its tags, and so keeps the order of memory."""
    packet = getattr(torch.ops.aten, name, None) or getattr(torch.ops.aten, name.rstrip("_"), None)
    if name in _AUGMENTED or packet is None:
        return name in _AUGMENTED and name != "__imatmul__"
    return any(torch.Tag.pointwise in getattr(packet, o).tags for o in packet.overloads())


def _writes(name: str) -> bool:
    """Whether a function or method of torch with this name writes values to its first operand."""
    if name in _AUGMENTED or name == "__setitem__":
        return True
    return name.endswith("_") and not name.endswith("__") and name not in _OF_SHAPES


def _as_plain_view(name: str, out: Any, args: Sequence[Any]) -> Any:
    """The result of `expand` and its like, as a plain view where they repeat nothing.

    A write to a view of `expand` adds the changes of its elements up: nan and infinity stay nan,
    and a small number is lost beside a large one.
    """
    if name in ("expand", "expand_as", "broadcast_to"):
        return args[0].reshape(out.shape) if out.numel() == args[0].numel() else out
    if name == "broadcast_tensors":
        operands = args[0] if isinstance(args[0], (tuple, list)) else args
        pairs = zip(operands, out, strict=True)
        return type(out)([a.reshape(b.shape) if a.numel() == b.numel() else b for a, b in pairs])
    return out


def _marked(out: Any, source: torch.Tensor | None) -> Any:
    """The result, marked where it is a view whose elements share memory."""
    if source is None:
        return out
    marked, is_of_part = getattr(source, _SHARED, False), is_part(source)
    for t in out if isinstance(out, (tuple, list)) else (out,):
        if not isinstance(t, torch.Tensor) or t is source:
            continue
        overlaps = marked or elements_overlap(t)
        if not overlaps and not is_of_part:
            continue
        view, base = memory_of(t), memory_of(source)
        if view is not None and base is not None and view.storage == base.storage:
            if overlaps:
                setattr(t, _SHARED, True)
            if is_of_part:
                note_view(t, source)
    return out


def _to_out(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The result of a call with `out=`; raises what torch raises where tensors cannot take it."""
    outs, operands = tensors_in_arguments(kwargs["out"]), tensors_in_arguments(args)
    for out in outs:
        refuse_written("out=", out)
    whole_written(outs)
    for out in outs:
        if is_expanded(out) or any(overlap_partly(out, t) for t in operands):
            raise TraceError(
                f"out= of {getattr(func, '__name__', func)} shares memory, among its elements or "
                "with an operand.",
                line=user_line() or "not known",
                hint="Give it a tensor of its own, or leave out= away.",
            )
    refuse_out(func, args, kwargs)
    _refuse_other_dtype(func, args, kwargs, outs)
    if not all(t.is_contiguous() for t in (*outs, *operands)):
        row_major = [out.clone(memory_format=torch.contiguous_format) for out in outs]
        alone = isinstance(kwargs["out"], torch.Tensor)
        result = func(*args, **{**kwargs, "out": row_major[0] if alone else tuple(row_major)})
        if all(a.shape == b.shape for a, b in zip(outs, row_major, strict=True)):
            for out, value in zip(outs, row_major, strict=True):
                out.copy_(value)
            return outs[0] if alone else type(result)(outs)
    read = [(out, out.shape) for out in outs if any(out is t for t in operands)]
    result = func(*args, **kwargs)
    for out, before in read:
        _check_shape(out, before)
    return result


def _refuse_other_dtype(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], outs: Sequence[torch.Tensor]
) -> None:
    """Raises for a sum, or the like, into another dtype: torch may cast before it adds."""
    if getattr(func, "__name__", "") not in _ADDING:
        return
    own = dtypes_of(func, args, {name: a for name, a in kwargs.items() if name != "out"})
    for out, dtype in zip(outs, own, strict=False):
        if out.dtype != dtype:
            taken = dtype_name(out.dtype)
            raise TraceError(
                f"{func.__name__} gives {dtype_name(dtype)}, and out= takes {taken}.",
                line=user_line() or "not known",
                hint="Give it an out= of that dtype, or copy_() the result to the tensor.",
            )


def _check_shape(target: torch.Tensor, before: torch.Size) -> None:
    """Raises what torch raises where a write in place has changed a shape."""
    if target.shape != before:
        raise RuntimeError(
            f"output with shape {list(before)} doesn't match the broadcast shape "
            f"{list(target.shape)}"
        )


def _view(tensor: torch.Tensor, index: Any) -> torch.Tensor | None:
    """The view that a basic index gives; None for one that copies."""
    entries = index if isinstance(index, tuple) else (index,)
    basic = all(e is None or e is ... or type(e) in (int, slice) for e in entries)
    return tensor[index] if basic and isinstance(tensor, torch.Tensor) else None
