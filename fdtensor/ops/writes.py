"""`checked_write`: a call as it is, but for writes in place or to `out=` that torch refuses.

Functionalization computes the value apart and puts it in its place afterwards. So nobody asks
whether the tensor written to can take it: a real tensor a complex result, elements that several
places share, or memory that the operands lie across. Where one of these may be, torch itself is
asked, with tensors of few elements that have the same fault.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import optree
import torch

from fdtensor.layouts.callsite import user_line
from fdtensor.layouts.errors import TraceError

__all__ = ["checked_write"]

_C: Any = torch  # what torch does not declare

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
"""Methods that change the shape of a tensor, or what is known of it, and write no values."""

_SHARED = "_fdtensor_shares_places"

FEW = 2**16
"""The most elements that operands of torch have when it is asked; beyond, they have no values."""

_NO_CAST = ("can't be cast", "cannot be converted", "out tensor", "dtype", "scalar type")


def checked_write(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The result of the call; raises `RuntimeError` or `TraceError` for a write that cannot be."""
    name = getattr(func, "__name__", "")
    if kwargs.get("out") is not None:
        return _to_out(func, args, kwargs)
    target = args[0] if args and isinstance(args[0], torch.Tensor) else None
    if target is not None and name in ("resize_", "resize_as_") and not target.is_contiguous():
        raise TraceError(
            f"{name} of a tensor whose elements do not lie in the order of its shape depends on "
            "where they lie.",
            line=user_line() or "not known",
            hint="Take contiguous() of it, or reshape().",
        )
    if name == "__setitem__" and target is not None and _is_number(args[1]):
        value: Any = args[2]  # torch would read whether the index is true
        target.copy_(torch.where(args[1], value, target))
        return None
    if target is None or not _writes(name):
        return _followed(_unrepeated(name, func(*args, **kwargs), args), target)
    before, part = target.shape, None
    if name == "__setitem__":
        part, value = _view(target, args[1]), args[2]
        if part is not None and isinstance(value, torch.Tensor):
            _refuse_overlap(torch.Tensor.copy_, (part, value), {})
    else:
        _refuse_overlap(func, args, kwargs)
        if _may_need_a_cast(target, args[1:], kwargs):
            _raise(_asked(func, args, kwargs, _of_one), _NO_CAST)
    if getattr(target, _SHARED, False):
        raise TraceError(
            f"{name} writes to a tensor of which several elements share one place in memory.",
            line=user_line() or "not known",
            hint="Write to the tensor before expand() or unfold(), or to a clone().",
        )
    if part is None and _loses_order(func, target):
        row_major = target.clone(memory_format=torch.contiguous_format)
        func(row_major, *args[1:], **kwargs)
        _keeps(row_major, before)
        target.copy_(row_major)
        return None if name == "__setitem__" else target
    out = func(*args, **kwargs)
    _keeps(target, before)
    return out


def _is_number(index: Any) -> bool:
    """Whether an index is a bool tensor without dims, which takes all of a tensor or nothing."""
    return isinstance(index, torch.Tensor) and index.dtype == torch.bool and not index.ndim


def _loses_order(func: Any, target: torch.Tensor) -> bool:
    """Whether a write would give its target the order of memory of a tensor that is row-major.

    The functional op computes a new tensor, which takes the place of the target, strides included;
    what asks for them later, as `contiguous()` does, would answer for that one.
    """
    name = func.__name__
    if name == "fill_diagonal_":  # which counts places in memory
        return True
    return not target.is_contiguous() and _is_dense(target) and not _pointwise(name)


def _is_dense(t: torch.Tensor) -> bool:
    """Whether the elements fill their memory, in whatever order of the dims."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(t.stride(), t.shape, strict=True) if n > 1):
        if stride != expected:
            return False
        expected *= size
    return True


@functools.cache
def _pointwise(name: str) -> bool:
    """Whether torch tags the op of a method as one by elements, which keeps the order of memory."""
    packet = getattr(torch.ops.aten, name, None) or getattr(torch.ops.aten, name.rstrip("_"), None)
    if name in _AUGMENTED or packet is None:
        return name in _AUGMENTED and name != "__imatmul__"
    return any(torch.Tag.pointwise in getattr(packet, o).tags for o in packet.overloads())


def _writes(name: str) -> bool:
    """Whether a function or method of torch with this name writes values to its first operand."""
    if name in _AUGMENTED or name == "__setitem__":
        return True
    return name.endswith("_") and not name.endswith("__") and name not in _OF_SHAPES


def _unrepeated(name: str, out: Any, args: Sequence[Any]) -> Any:
    """What `expand` and its like gave, as a plain view where they repeat nothing.

    A write to a view of `expand` adds the change of the elements up: nan and infinity stay nan,
    and next to a large number a small one is lost.
    """
    if name in ("expand", "expand_as", "broadcast_to"):
        return args[0].reshape(out.shape) if out.numel() == args[0].numel() else out
    if name == "broadcast_tensors":
        given = args[0] if isinstance(args[0], (tuple, list)) else args
        pairs = zip(given, out, strict=True)
        return type(out)([a.reshape(b.shape) if a.numel() == b.numel() else b for a, b in pairs])
    return out


def _followed(out: Any, source: torch.Tensor | None) -> Any:
    """The result, marked where it is a view of which several elements share one place."""
    if source is None:
        return out
    marked = getattr(source, _SHARED, False)
    for t in out if isinstance(out, (tuple, list)) else (out,):
        if isinstance(t, torch.Tensor) and t is not source and (marked or _overlaps(t)):
            view, base = _place(t), _place(source)
            if view is not None and base is not None and view.memory == base.memory:
                setattr(t, _SHARED, True)
    return out


def _to_out(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The result of a call with `out=`; raises what torch raises where tensors cannot take it."""
    outs, operands = _tensors(kwargs["out"]), _tensors(args)
    for out in outs:
        if _covers_itself(out) or any(_partly_on(out, t) for t in operands):
            raise TraceError(
                f"out= of {getattr(func, '__name__', func)} shares memory, among its elements or "
                "with an operand.",
                line=user_line() or "not known",
                hint="Give it a tensor of its own, or leave out= away.",
            )
    if outs and _may_need_a_cast(outs[0], (args, outs), {}):
        few = sum(t.numel() for t in (*outs, *operands)) <= FEW
        _raise(_asked(func, args, kwargs, _of_ones if few else _without_values), _NO_CAST)
    if not all(t.is_contiguous() for t in (*outs, *operands)):
        row_major = [out.clone(memory_format=torch.contiguous_format) for out in outs]
        alone = isinstance(kwargs["out"], torch.Tensor)
        given = func(*args, **{**kwargs, "out": row_major[0] if alone else tuple(row_major)})
        if all(a.shape == b.shape for a, b in zip(outs, row_major, strict=True)):
            for out, value in zip(outs, row_major, strict=True):
                out.copy_(value)
            return outs[0] if alone else type(given)(outs)
    read = [(out, out.shape) for out in outs if any(out is t for t in operands)]
    result = func(*args, **kwargs)
    for out, before in read:
        _keeps(out, before)
    return result


def _keeps(target: torch.Tensor, before: torch.Size) -> None:
    if target.shape != before:
        raise RuntimeError(
            f"output with shape {list(before)} doesn't match the broadcast shape "
            f"{list(target.shape)}"
        )


def _refuse_overlap(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    target, others = args[0], _tensors((args[1:], kwargs))
    across = [t for t in others if _partly_on(target, t)]
    if not across and not _covers_itself(target):
        return
    memory = functools.cache(lambda: torch.ones(3, dtype=target.dtype))

    def twin(t: torch.Tensor) -> torch.Tensor:
        if t is target:
            return memory()[1:] if across else memory()[:1].expand(2)
        if any(t is other for other in across):
            return memory()[:-1]
        return torch.ones(2, dtype=t.dtype)

    _raise(_asked(func, args, kwargs, twin), ("single memory location",))


def _may_need_a_cast(target: torch.Tensor, others: Any, kwargs: Any) -> bool:
    """Whether a result may be of another kind than the tensor that takes it."""
    if not (target.is_floating_point() or target.is_complex()):
        return True
    if any(t.dtype is not target.dtype for t in _tensors((others, kwargs))):
        return True
    numbers = [leaf for leaf in _leaves((others, kwargs)) if isinstance(leaf, (float, complex))]
    most = torch.finfo(target.dtype).max
    return any(isinstance(n, complex) or most < abs(n) < float("inf") for n in numbers)


def _asked(
    func: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    twin: Callable[[torch.Tensor], torch.Tensor],
) -> BaseException | None:
    """What torch raises for such tensors, in a thread, where no mode or transform is on."""
    raised: list[BaseException] = []
    whole: Any = (tuple(args), kwargs)

    def ask() -> None:
        def of(leaf: Any) -> Any:
            return twin(leaf) if isinstance(leaf, torch.Tensor) else leaf

        try:
            with warnings.catch_warnings(), torch.random.fork_rng(devices=()):
                warnings.simplefilter("ignore")
                given, named = optree.tree_map(of, whole, none_is_leaf=True)
                func(*given, **named)
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    return raised[0] if raised else None


def _raise(error: BaseException | None, said: Sequence[str]) -> None:
    """Raises the error if it is the one that was asked for; a twin may meet others."""
    known = isinstance(error, (RuntimeError, TypeError))
    if known and any(part in str(error) for part in said):
        raise type(error)(str(error)) from None


def _of_one(t: torch.Tensor) -> torch.Tensor:
    return torch.ones((1,) * t.ndim, dtype=t.dtype)


def _of_ones(t: torch.Tensor) -> torch.Tensor:
    return torch.ones(t.shape, dtype=t.dtype)


def _without_values(t: torch.Tensor) -> torch.Tensor:
    return torch.empty(t.shape, dtype=t.dtype, device="meta")


def _leaves(tree: Any) -> list[Any]:
    return optree.tree_leaves(tree, none_is_leaf=True)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in _leaves(tree) if isinstance(leaf, torch.Tensor)]


def _view(tensor: torch.Tensor, index: Any) -> torch.Tensor | None:
    """The view that a basic index gives; None for one that copies."""
    entries = index if isinstance(index, tuple) else (index,)
    basic = all(e is None or e is ... or type(e) in (int, slice) for e in entries)
    return tensor[index] if basic and isinstance(tensor, torch.Tensor) else None


@attrs.frozen
class _Place:
    """Where the elements of a tensor lie, in elements from the start of a memory."""

    memory: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int
    itemsize: int

    @property
    def bytes(self) -> tuple[int, int]:
        count = 1
        for size in self.shape:
            count *= size
        return self.start * self.itemsize, (self.start + count) * self.itemsize

    @property
    def is_dense(self) -> bool:
        """Whether the elements fill one piece of memory, each its own place, in whatever order."""
        step = 1
        for stride, size in sorted(
            (s, n) for s, n in zip(self.strides, self.shape, strict=True) if n != 1
        ):
            if stride != step:
                return False
            step *= size
        return True


def _place(tensor: torch.Tensor) -> _Place | None:
    """None under vmap, and for tensors that are not functional."""
    while _C._C._functorch.is_gradtrackingtensor(tensor):
        tensor = _C._C._functorch.get_unwrapped(tensor)
    if not _C._is_functional_tensor(tensor) or 0 in tensor.shape:
        return None
    return _Place(
        tensor.untyped_storage()._cdata,
        tuple(tensor.shape),
        tuple(tensor.stride()),
        int(tensor.storage_offset()),
        tensor.itemsize,
    )


def _covers_itself(tensor: torch.Tensor) -> bool:
    """Whether torch sees at once that several elements are one place: those of `expand`."""
    place = _place(tensor)
    return place is not None and any(
        stride == 0 and size > 1 for stride, size in zip(place.strides, place.shape, strict=True)
    )


def _overlaps(tensor: torch.Tensor) -> bool:
    """Whether several elements may be one place: of `expand`, or of windows that overlap."""
    place, reach = _place(tensor), 0
    dims = [] if place is None else sorted(zip(place.strides, place.shape, strict=True))
    for stride, size in dims:
        if size > 1 and stride <= reach:
            return True
        reach += (size - 1) * stride
    return False


def _partly_on(target: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two dense tensors share a part of a memory, and are not the same elements."""
    a, b = _place(target), _place(other)
    if a is None or b is None or a.memory != b.memory or not (a.is_dense and b.is_dense):
        return False
    (start, stop), (start_b, stop_b) = a.bytes, b.bytes
    if (start, stop) == (start_b, stop_b):
        return a.strides != b.strides
    return start < stop_b and start_b < stop
