"""Operands that an op refuses for their values: counted on each rank, refused on all of them.

Torch's kernels look at indices, at matrices that have no inverse, at probabilities, and raise. Of a
block a rank sees its part alone: others would wait for it, or a mask hide what is out of range. So
a traced function has three ops of its own. `bounded` gives an operand with harmless values in place
of what is out of range, and how many there were; `require` says what must hold; and at the end of
the program `check` raises on every rank where a count, summed over the ranks, is not 0.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import attrs
import torch

from fdtensor.layouts.errors import IndexRangeError, OperandError

__all__ = [
    "BOUNDED",
    "CHECK",
    "CHECKED",
    "REQUIRE",
    "SHARED",
    "Bounds",
    "fault_text",
    "range_text",
    "require",
]

aten = torch.ops.aten
Tensor = torch.Tensor


def fault_text(what: str, place: str | None) -> str:
    """What must hold, as programs print it: `index of gather, 0 to 3 at train.py:44`."""
    return what if place is None else f"{what} at {place}"


def range_text(op: Any, bounds: Bounds, low: float, high: float) -> str:
    """The range of an operand of an op, in words."""
    last = high - 1 if bounds.kind == "index" else high
    return f"{bounds.kind} of {op._opname.strip('_')}, {low} to {last}"


class _Seen(threading.local):
    """A value that was out of range on this rank, by the text of the fault."""

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
    """What `bounded` gives, where the operand itself if all of it is in range.

    Integers from `low` to `high - 1` are in range, numbers from `low` to `high`, and `ignored`.
    """
    last = high if x.is_floating_point() else high - 1
    if not x.is_cuda and ignored is None and x.numel():
        ends = x.aminmax()
        if ends.min >= low and ends.max <= last:  # not so for nan
            return x, x.new_zeros((), dtype=torch.float32)
    fine = (x >= low) & (x <= last)
    if ignored is not None:
        fine = fine | (x == ignored)
    count = (~fine).sum(dtype=torch.float32)
    if x.is_cuda:  # whether all is fine is not waited for
        return torch.where(fine, x, low), count
    if not count:
        return x, count
    _SEEN.values[fault] = x[~fine][0].item()
    return torch.where(fine, x, low), count


_RANGE = "Scalar low, Scalar high, int? ignored"
for _name, _text in (
    ("bounded", f"(Tensor x, {_RANGE}, str fault) -> (Tensor, Tensor)"),
    ("require", "(Tensor holds, str fault) -> ()"),
    ("check", "(Tensor counts, str[] faults) -> ()"),
):
    torch.library.define(f"fdtensor::{_name}", _text)


@torch.library.register_fake("fdtensor::bounded")
def _(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty((), dtype=torch.float32)


@torch.library.register_fake("fdtensor::require")
def _(holds: Tensor, fault: str) -> None:
    pass


@torch.library.register_fake("fdtensor::check")
def _(counts: Tensor, faults: list[str]) -> None:
    pass


def _required(holds: Tensor, fault: str) -> None:
    if not holds.all():
        raise _error(fault, int((~holds).sum()))


def _checked(counts: Tensor, faults: list[str]) -> None:
    if counts.is_cuda:  # as kernels do there: nobody waits
        aten._assert_async.msg((counts == 0).all(), f"needed: {'; '.join(faults)}")
    elif counts.any():
        n = int((counts != 0).nonzero()[0])
        raise _error(faults[n], int(counts[n]))


def _error(fault: str, count: int) -> Exception:
    """The error of the kind that torch raises, on this rank and on all others."""
    kind = IndexRangeError if fault.startswith("index ") else OperandError
    value = _SEEN.values.pop(fault, None)
    what, _, place = fault.partition(" at ")
    return kind(
        f"{count} {'entry' if count == 1 else 'entries'} where it must not be: {what}.",
        line=place or "not known",
        **({} if value is None else {"one of them": value}),
        hint="All ranks raise this and return nothing. check_indices=False looks at no values.",
    )


for _name, _run in (("bounded", _bounded), ("require", _required), ("check", _checked)):
    torch.library.impl(f"fdtensor::{_name}", "CompositeExplicitAutograd", _run)

BOUNDED = torch.ops.fdtensor.bounded.default
"""An operand with `low` in place of what is out of range, and how much that was: f32, 0-d."""

REQUIRE = torch.ops.fdtensor.require.default
"""Says that all of a tensor of bools must be true."""

CHECK = torch.ops.fdtensor.check.default
"""Raises where one of these counts is not 0; it gives nothing."""


SHARED: dict[Any, Callable[..., Any]] = {BOUNDED: bounded_shared, CHECK: _checked}
"""What a rank runs for an op; the first may give the very tensor that it takes."""


def _required_of_each(_info: Any, _dims: Any, holds: Tensor, fault: str) -> Any:
    REQUIRE(holds, fault)
    return None, None


torch.library.register_vmap("fdtensor::require", _required_of_each)


def require(holds: Tensor, what: str) -> None:
    """Lets all ranks raise where not all of `holds` is true. For functions that are recorded."""
    REQUIRE(holds, what)


# --- which operands are looked at --------------------------------------------------------------

Given = Mapping[str, Any]
"""The arguments of a call by name."""


@attrs.frozen
class Bounds:
    """The range of an operand of an op."""

    operand: str
    """The name of the argument: a tensor, or a list of tensors of which each has a range; or none
    where only the number of its elements matters."""
    range: Callable[[Given, int], tuple[float, float]]
    """From which value, and up to which one, the entries of tensor `k` may be."""
    ignored: Callable[[Given], int | None] = lambda _given: None
    """A value that may stand for none."""
    kind: str = "index"


def _size(t: Tensor, dim: int) -> int:
    return t.shape[dim] if t.ndim else 1


def _along_dim(given: Given, _: int) -> tuple[float, float]:
    return 0, _size(given["self"], given["dim"])


def _wrapping(given: Given, _: int) -> tuple[float, float]:
    size = _size(given["self"], given["dim"])
    return -size, size


def _each_dim(given: Given, k: int) -> tuple[float, float]:
    return -given["self"].shape[k], given["self"].shape[k]


def _flat(given: Given, _: int) -> tuple[float, float]:
    return -given["self"].numel(), given["self"].numel()


def _rows(name: str) -> Callable[[Given, int], tuple[float, float]]:
    def rows(given: Given, _: int) -> tuple[float, float]:
        of = given[name]
        return 0, of if isinstance(of, int) else of.shape[0]

    return rows


def _classes(given: Given, _: int) -> tuple[float, float]:
    scores = given["self"]
    return 0, scores.shape[1 if scores.ndim > 1 else 0]


def _places(given: Given, _: int) -> tuple[float, float]:
    return 0, prod(given["output_size"])


def _ignored(given: Given) -> int | None:
    return given["ignore_index"]


def _overloads(names: str) -> list[Any]:
    found = []
    for name in names.split():
        packet, _, overload = name.partition(".")
        found.append(getattr(getattr(aten, packet), overload or "default"))
    return found


CHECKED: dict[Any, Bounds] = {
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
        (
            "binary_cross_entropy",
            Bounds("self", lambda _given, _k: (0.0, 1.0), kind="value"),
        ),
    )
    for op in _overloads(names)
}
"""Ops whose kernels look at the values of an operand."""
