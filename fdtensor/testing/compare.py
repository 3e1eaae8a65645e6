"""`Difference`: where what ranks hold is not what a single process gives."""

from __future__ import annotations

import math
from typing import Any

import attrs
import torch

from fdtensor.layouts.dtypes import dtype_name
from fdtensor.layouts.tree import paths
from fdtensor.tensors.dtensor import DTensor
from fdtensor.testing.case import Case, Outcome
from fdtensor.testing.values import block, gather_full

__all__ = ["Difference", "Tolerance", "difference"]


@attrs.frozen
class Tolerance:
    """How far numbers may be apart; None is what `torch.testing.assert_close` allows a dtype."""

    rtol: float | None = None
    atol: float | None = None

    def of(self, dtype: torch.dtype) -> tuple[float, float]:
        """The relative and the absolute tolerance; integers are exact."""
        if not (dtype.is_floating_point or dtype.is_complex):
            return 0.0, 0.0
        rtol, atol = _DEFAULTS.get(dtype, (0.0, 0.0))
        return rtol if self.rtol is None else self.rtol, atol if self.atol is None else self.atol


_DEFAULTS = {
    torch.float16: (1e-3, 1e-5),
    torch.bfloat16: (1.6e-2, 1e-5),
    torch.float32: (1.3e-6, 1e-5),
    torch.float64: (1e-7, 1e-7),
    torch.complex32: (1e-3, 1e-5),
    torch.complex64: (1.3e-6, 1e-5),
    torch.complex128: (1e-7, 1e-7),
}


@attrs.frozen
class Difference:
    """Something that differs, and in what."""

    where: str
    """Its name: `the result`, `result[0]`, `the gradient of argument 1`."""
    what: str
    """How it differs, with its worst element and the rank that holds it."""
    by: str = ""
    """The largest differences, and what is allowed; empty where nothing was compared."""

    def __str__(self) -> str:
        return f"{self.where} {self.what}"


def difference(
    case: Case, actual: Outcome, expected: Outcome, tolerance: Tolerance
) -> Difference | None:
    """The first difference between an outcome on ranks and the one that is due, or None."""
    if actual.tree != expected.tree:
        return Difference("the result", f"is a {actual.tree}, not a {expected.tree}")
    for fault in actual.faults:
        return Difference(*fault)
    names = paths(expected.tree, "result")
    names = ["the result"] if names == ["result"] else names
    for name, a, b in zip(names, actual.leaves, expected.leaves, strict=True):
        seen = _differing(name, a, b, tolerance)
        if seen:
            return seen
    smooth = [
        name
        for name, t in zip(case.where(), case.tensors, strict=True)
        if case.grad and (t.is_floating_point() or t.is_complex())
    ]
    for name, a, b in zip(smooth, actual.grads, expected.grads, strict=True):
        seen = _differing(f"the gradient of {name}", a, b, tolerance)
        if seen:
            return seen
    return None


def _differing(name: str, actual: Any, expected: Any, tolerance: Tolerance) -> Difference | None:
    if isinstance(actual, DTensor) and isinstance(expected, torch.Tensor):
        if (actual.shape, actual.dtype) != (tuple(expected.shape), expected.dtype):
            kinds = [_kind(t) for t in (actual, expected)]
            return Difference(name, f"is {kinds[0]}, not {kinds[1]}")
        return _of_blocks(name, actual, expected, tolerance) or _of_whole(name, actual)
    same = type(actual) is type(expected) and _equal(actual, expected, tolerance)
    return None if same else Difference(name, f"is {_text(actual)}, not {_text(expected)}")


def _equal(actual: Any, expected: Any, tolerance: Tolerance) -> bool:
    if isinstance(expected, torch.Tensor):
        return actual.dtype == expected.dtype and torch.equal(actual, expected)
    if isinstance(expected, float):
        rtol, atol = tolerance.of(torch.float32)
        both_nan = math.isnan(actual) and math.isnan(expected)
        return both_nan or math.isclose(actual, expected, rel_tol=rtol, abs_tol=atol)
    return bool(actual == expected)


def _text(leaf: Any) -> str:
    if isinstance(leaf, DTensor):
        return f"a DTensor {leaf.type}"
    if isinstance(leaf, torch.Tensor):
        return f"a plain tensor {_kind(leaf)}"
    return repr(leaf)


def _kind(tensor: torch.Tensor | DTensor[Any]) -> str:
    return f"{dtype_name(tensor.dtype)}[{','.join(map(str, tensor.shape))}]"


def _of_blocks(
    name: str, actual: DTensor[Any], expected: torch.Tensor, tolerance: Tolerance
) -> Difference | None:
    """The difference of a tensor that is held as blocks, each rank's compared with its due."""
    type = actual.type
    rtol, atol = tolerance.of(type.dtype)
    worst: tuple[float, int, int] | None = None
    bad: dict[int, int] = {}
    apart = relative = 0.0
    for place, (rank, local) in enumerate(zip(type.mesh.ranks, actual.local, strict=True)):
        wanted = block(expected, type, rank)
        if tuple(local.shape) != tuple(wanted.shape) or local.dtype != wanted.dtype:
            kinds = [_kind(t) for t in (local, wanted)]
            return Difference(name, f"is held by rank {rank} as {kinds[0]}, not {kinds[1]}")
        a, b = _wide(local), _wide(wanted)
        near = torch.isclose(a, b, rtol=rtol, atol=atol, equal_nan=True)
        wrong = ~near if local.is_floating_point() or local.is_complex() else local != wanted
        if not wrong.any():
            continue
        bad[rank] = int(wrong.sum())
        gaps = torch.where(wrong, (a - b).abs().nan_to_num(math.inf, math.inf), -1)
        apart = max(apart, float(gaps.max()))
        relative = max(
            relative, float((gaps / b.abs())[wrong].nan_to_num(math.inf, math.inf).max())
        )
        if worst is None or float(gaps.max()) > worst[0]:
            worst = float(gaps.max()), place, int(gaps.argmax())
    if worst is None:
        return None
    element = _element(actual, expected, *worst[1:])
    return Difference(
        name,
        f"is {element}{_others(bad, actual)}",
        f"{apart:.3g} at most, {relative:.3g} of the value (rtol={rtol:g}, atol={atol:g})",
    )


def _element(actual: DTensor[Any], expected: torch.Tensor, place: int, flat: int) -> str:
    """What one element of a block is and should be, with its index in the full tensor."""
    type = actual.type
    rank, local = type.mesh.ranks[place], actual.local[place]
    inside = torch.unravel_index(torch.tensor(flat), local.shape) if local.ndim else ()
    index = [indices[int(i)] for indices, i in zip(type.index(rank), inside, strict=True)]
    where = f" at {index}" if index else ""
    pair = _number(local[tuple(inside)]), _number(expected[tuple(index)])
    return f"{pair[0]} instead of {pair[1]}{where} on rank {rank}"


def _of_whole(name: str, actual: DTensor[Any]) -> Difference | None:
    """The difference of what `full()` puts together from what the blocks are."""
    if actual.layout.partial or any((t != t).any() for t in actual.local):  # of nan there are many
        return None
    whole, blocks = actual.full(), gather_full(actual.local, actual.type)
    wrong = int((whole != blocks).sum())
    text = f"has {wrong} of {blocks.numel()} elements of full() elsewhere than its blocks say"
    return Difference(name, text) if wrong else None


def _others(bad: dict[int, int], actual: DTensor[Any]) -> str:
    """How much else is wrong."""
    count = sum(local.numel() for local in actual.local)
    ranks = f"rank{'s' if len(bad) > 1 else ''} {', '.join(map(str, bad))}"
    return f"; {sum(bad.values())} of {count} elements are wrong, on {ranks}"


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.to(torch.float64)


def _number(tensor: torch.Tensor) -> str:
    value = tensor.item()
    return f"{value:.7g}" if isinstance(value, float) else str(value)
