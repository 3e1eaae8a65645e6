"""Operands that an op refuses for their values: counted on each rank, refused on all of them.

Torch's kernels check indices, matrices that have no inverse and probabilities, and raise. A rank
that raised for its own block would leave the others waiting, or a mask would hide an entry that is
out of range. So a traced function has three ops of its own. `bounded` gives an operand with
harmless values in place of entries out of range, and their number; `require` states a condition;
and at the end of the program `check` raises on every rank if a count, summed over the ranks, is
not 0.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch

from fdtensor.layouts.errors import IndexRangeError, OperandError
from fdtensor.layouts.torch_private import packet_name, schema_of
from fdtensor.ops.batched_index import ADDED, COPIED, TAKEN
from fdtensor.ops.counted_index import LOOKED_UP, PUT
from fdtensor.ops.own_ops import own_op

__all__ = [
    "BOUNDED",
    "CHECK",
    "REQUIRE",
    "SHARED",
    "Bounds",
    "bounds_of",
    "fault_text",
    "range_text",
    "refuse_out_of_range",
    "require",
]

aten = torch.ops.aten
Tensor = torch.Tensor


def fault_text(what: str, place: str | None) -> str:
    """The text of a condition, as programs print it: `index of gather, 0 to 3 at train.py:44`."""
    return what if place is None else f"{what} at {place}"


def range_text(op: Any, bounds: Bounds, low: object, last: object) -> str:
    """The range of an operand of an op, in words."""
    return f"{bounds.kind} of {packet_name(op).strip('_')}, {low} to {last}"


class _Seen(threading.local):
    """An entry that was out of range on this rank, by the text of the fault."""

    def __init__(self) -> None:
        self.values: dict[str, float | int] = {}


_SEEN = _Seen()


def _bounded(
    x: Tensor, low: float, high: float, ignored: int | None, fault: str
) -> tuple[Tensor, Tensor]:
    safe, count = bounded_shared(x, low, high, ignored, fault)
    return (x.clone() if safe is x else safe), count


def bounded_shared(
    x: Tensor, low: float, high: float, ignored: int | None, fault: str
) -> tuple[Tensor, Tensor]:
    """The results of `bounded`, with the operand itself if all of it is in range.

    Integers from `low` to `high - 1` are in range, numbers from `low` to `high`, and `ignored`.
    """
    last = high if x.is_floating_point() else high - 1
    if not x.is_cuda and ignored is None and x.numel():
        extremes = x.aminmax()
        if extremes.min >= low and extremes.max <= last:  # never for nan
            return x, x.new_zeros((), dtype=torch.float32)
    inside = (x >= low) & (x <= last)
    if ignored is not None:
        inside = inside | (x == ignored)
    count = (~inside).sum(dtype=torch.float32)
    if x.is_cuda:  # the CPU does not wait for the count
        return torch.where(inside, x, low), count
    if not count:
        return x, count
    _SEEN.values[fault] = x[~inside][0].item()
    return torch.where(inside, x, low), count


_RANGE = "Scalar low, Scalar high, int? ignored"


def _required(holds: Tensor, fault: str) -> None:
    if not holds.all():
        raise _error(fault, int((~holds).sum()))


def _checked(counts: Tensor, faults: list[str]) -> None:
    if counts.is_cuda:  # asynchronous, as its kernels are
        aten._assert_async.msg((counts == 0).all(), f"needed: {'; '.join(faults)}")
    elif counts.any():
        n = int((counts != 0).nonzero()[0])
        raise _error(faults[n], int(counts[n]))


def _error(fault: str, count: int) -> Exception:
    """The error that all ranks raise, of the kind that torch raises."""
    kind = IndexRangeError if fault.startswith("index ") else OperandError
    value = _SEEN.values.pop(fault, None)
    what, _, place = fault.partition(" at ")
    return kind(
        f"{count} {'entry' if count == 1 else 'entries'} where it must not be: {what}.",
        line=place or "not known",
        **({} if value is None else {"one of them": value}),
        hint="All ranks raise this and return nothing. check_indices=False looks at no values.",
    )


def _required_of_each(_info: Any, _dims: Any, holds: Tensor, fault: str) -> Any:
    REQUIRE(holds, fault)
    return None, None


BOUNDED = own_op(
    f"bounded(Tensor x, {_RANGE}, str fault) -> (Tensor, Tensor)",
    _bounded,
    lambda x, *_: (torch.empty_like(x), x.new_empty((), dtype=torch.float32)),
)
"""An operand with `low` in place of entries out of range, and their number: f32, 0-d."""

REQUIRE = own_op(
    "require(Tensor holds, str fault) -> ()", _required, lambda *_: None, _required_of_each
)
"""States that all of a tensor of bools must be true."""

CHECK = own_op("check(Tensor counts, str[] faults) -> ()", _checked, lambda *_: None)
"""Raises where one of these counts is not 0; it has no result."""


SHARED: dict[Any, Callable[..., Any]] = {BOUNDED: bounded_shared, CHECK: _checked}
"""The function that a rank runs for an op; the first may return its operand itself."""


def require(holds: Tensor, what: str) -> None:
    """In a recorded function, makes all ranks raise where not all of `holds` is true."""
    REQUIRE(holds, what)


# --- the operands that are checked --------------------------------------------------------------

Arguments = Mapping[str, Any]
"""The arguments of a call by name."""


@attrs.frozen
class Bounds:
    """The range of an operand of an op."""

    operand: str
    """The name of the argument: a tensor, or a list of tensors that each have a range; or empty
    where the number of its elements alone matters."""
    range: Callable[[Arguments, int], tuple[float, float]]
    """The lowest and the highest value that the entries of tensor `k` may have."""
    ignored: Callable[[Arguments], int | None] = lambda _named: None
    """A value that stands for no index."""
    kind: str = "index"


def _size(t: Tensor, dim: int) -> int:
    return t.shape[dim] if t.ndim else 1


def _along_dim(named: Arguments, _: int) -> tuple[float, float]:
    return 0, _size(named["self"], named["dim"])


def _wrapping(named: Arguments, _: int) -> tuple[float, float]:
    size = _size(named["self"], named["dim"])
    return -size, size


def _in_batch(named: Arguments, _: int) -> tuple[float, float]:
    size = named["self"].shape[1]
    return -size if named["wraps"] else 0, size


def _each_dim(named: Arguments, k: int) -> tuple[float, float]:
    return -named["self"].shape[k], named["self"].shape[k]


def _flat(named: Arguments, _: int) -> tuple[float, float]:
    return -named["self"].numel(), named["self"].numel()


def _rows(name: str) -> Callable[[Arguments, int], tuple[float, float]]:
    def rows(named: Arguments, _: int) -> tuple[float, float]:
        of = named[name]
        return 0, of if isinstance(of, int) else of.shape[0]

    return rows


def _classes(named: Arguments, _: int) -> tuple[float, float]:
    scores = named["self"]
    return 0, scores.shape[1 if scores.ndim > 1 else 0]


def _places(named: Arguments, _: int) -> tuple[float, float]:
    return 0, math.prod(named["output_size"])


def _probable(_named: Arguments, _: int) -> tuple[float, float]:
    return 0.0, 1.0


def _wide(_named: Arguments, _: int) -> tuple[float, float]:
    return 0.0, math.inf


def _finite(named: Arguments, _: int) -> tuple[float, float]:
    return 0.0, torch.finfo(named["self"].dtype).max


def _ignored(named: Arguments) -> int | None:
    return named["ignore_index"]


def _overloads(names: str) -> list[Any]:
    ops = []
    for name in names.split():
        packet, _, overload = name.partition(".")
        ops.append(getattr(getattr(aten, packet), overload or "default"))
    return ops


_CHECKED: dict[Any, Bounds] = {
    op: bounds
    for names, bounds in (
        ("index.Tensor index_put", Bounds("indices", _each_dim)),
        ("index_select index_add index_copy index_reduce", Bounds("index", _along_dim)),
        ("index_fill.int_Scalar index_fill.int_Tensor", Bounds("index", _wrapping)),
        (
            "gather scatter.src scatter.value scatter.reduce scatter.value_reduce scatter_add "
            "scatter_reduce.two",
            Bounds("index", _along_dim),
        ),
        ("take put", Bounds("index", _flat)),
        ("embedding", Bounds("indices", _rows("weight"))),
        ("embedding_renorm", Bounds("indices", _rows("self"))),
        ("_embedding_bag _embedding_bag_forward_only", Bounds("indices", _rows("weight"))),
        ("embedding_dense_backward", Bounds("indices", _rows("num_weights"))),
        (
            "nll_loss_forward nll_loss2d_forward nll_loss_backward nll_loss2d_backward",
            Bounds("target", _classes, _ignored),
        ),
        ("multi_margin_loss multi_margin_loss_backward", Bounds("target", _classes)),
        ("max_unpool2d max_unpool3d", Bounds("indices", _places)),
        ("masked_scatter", Bounds("", _flat)),
        ("binary_cross_entropy", Bounds("self", _probable, kind="value")),
        ("bernoulli", Bounds("self", _probable, kind="probability")),
        ("bernoulli.Tensor", Bounds("p", _probable, kind="probability")),
        ("normal.float_Tensor normal.Tensor_Tensor", Bounds("std", _wide, kind="std")),
        ("multinomial", Bounds("self", _finite, kind="weight")),
    )
    for op in _overloads(names)
}
_CHECKED |= {op: Bounds("index", _in_batch) for op in (TAKEN, ADDED, COPIED)}
_CHECKED |= {op: Bounds("indices", _each_dim) for op in (LOOKED_UP, PUT)}
_CHECKED |= {  # ops that torch registers when they are first used
    f"torch_nn._linear_cross_entropy_batch_chunked{end}.default": Bounds(
        "target", _rows("linear_weight"), _ignored
    )
    for end in ("", "_no_reduction")
}
"""Ops whose kernels check the values of an operand, by op or by name."""


def bounds_of(op: Any) -> Bounds | None:
    """The range that the kernel of an op checks; None where it looks at no values."""
    return _CHECKED.get(op) or _CHECKED.get(str(op))


def refuse_out_of_range(op: Any, args: Sequence[Any]) -> None:
    """Raises for a call on real tensors whose checked operand, one of numbers, is out of range."""
    bounds = bounds_of(op)
    if bounds is None:
        return
    names = [a.name for a in schema_of(op).arguments]
    named = dict(zip(names, args, strict=False))
    low, high = bounds.range(named, 0)
    text = range_text(op, bounds, low, high)
    _, count = bounded_shared(named[bounds.operand], low, high, None, text)
    _checked(count.unsqueeze(0), [text])
