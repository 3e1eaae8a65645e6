"""`selected`: the results of two functions, of which a predicate says which one counts.

Both run, and no value or derivative of the other one gets through: what a function reads from
around it passes a gate that lets no cotangent back where its function does not count. A gradient
that is infinite there is left out, and not multiplied by zero.
"""

# pyright: reportIncompatibleMethodOverride=false
# the static methods of an autograd.Function have the parameters that torch names

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch

from fdtensor.layouts.callsite import user_line
from fdtensor.layouts.errors import TraceError
from fdtensor.layouts.tree import flatten, unflatten
from fdtensor.ops.around import Around, smooth
from fdtensor.ops.call_recorder import CallRecorder
from fdtensor.ops.select import select, zeros_beside

__all__ = ["branches_count", "selected"]


def selected(
    which: torch.Tensor,
    functions: tuple[Callable[..., Any], Callable[..., Any]],
    operands: Sequence[Any],
) -> Any:
    """The pytree that the first function gives where `which` holds, else that of the second."""
    leaves, spec = flatten(list(operands))
    results = []
    for holds, f in ((which, functions[0]), (~which, functions[1])):
        with _counting(holds), _within_branch(holds), _Gates(holds) as gates:
            results.append(flatten(f(*unflatten(spec, [gates.of(t) for t in leaves]))))
            gates.refuse_written()
    (first, tree), (second, other) = results
    _refuse_different(first, second, tree == other)
    chosen = [
        select(which, a, b) if isinstance(a, torch.Tensor) else a
        for a, b in zip(first, second, strict=True)
    ]
    return unflatten(tree, chosen)


_BRANCHES: list[torch.Tensor] = []
"""The predicates of the branches that are being recorded, outermost first."""


@contextlib.contextmanager
def _within_branch(holds: torch.Tensor) -> Generator[None]:
    """A context of a branch that counts where this holds."""
    _BRANCHES.append(holds)
    try:
        yield
    finally:
        _BRANCHES.pop()


def branches_count() -> torch.Tensor | None:
    """Whether all branches around count; None outside of any."""
    return functools.reduce(torch.logical_and, _BRANCHES) if _BRANCHES else None


def _counting(holds: torch.Tensor) -> contextlib.AbstractContextManager[None]:
    """A context in which faults of values count where a branch does."""
    checks = CallRecorder.running[-1].checks
    return contextlib.nullcontext() if checks is None else checks.where(holds)


def _refuse_different(first: Sequence[Any], second: Sequence[Any], alike: bool) -> None:
    """Raises `TraceError` where two branches give other structures, shapes, dtypes or values."""
    told = [", ".join(map(_told, leaves)) or "nothing" for leaves in (first, second)]
    if told[0] != told[1] or not alike:
        raise TraceError(
            "the branches of cond give different results.",
            true=told[0],
            false=told[1],
            line=user_line() or "not known",
            hint="Both return one structure, with tensors of the same shapes and dtypes.",
        )


def _told(leaf: Any) -> str:
    """What must be alike of a result."""
    return f"{tuple(leaf.shape)} {leaf.dtype}" if isinstance(leaf, torch.Tensor) else repr(leaf)


class _Gates(Around):
    """A context in which no derivative gets back from a branch that does not count."""

    what = "a branch of cond"

    def __init__(self, counts: torch.Tensor) -> None:
        super().__init__()
        self.counts = counts

    def gate(self, t: torch.Tensor) -> torch.Tensor:
        """What a tensor from around is read as."""
        with torch.enable_grad():  # it may be read outside of a no_grad too
            copy = super().gate(t)  # for which a function around this one may put its own
            return _Gate.apply(self.counts, copy) if smooth(t) else copy  # type: ignore[return-value]


class _Gate(torch.autograd.Function):
    """A value for a branch; its cotangent is zero where the branch does not count."""

    generate_vmap_rule = True

    @staticmethod
    def forward(counts: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.save_for_forward(inputs[0])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (counts,) = ctx.saved_tensors
        return None, select(counts, grad, zeros_beside(grad))

    @staticmethod
    def jvp(ctx: Any, _: Any, x: torch.Tensor) -> torch.Tensor:
        (counts,) = ctx.saved_tensors
        return _Gate.apply(counts, x)  # type: ignore[return-value]
