"""`Closed`: a step of a scan as a function of all that it reads, from closures and modules too."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import itertools
from collections.abc import Callable, Sequence
from types import CellType, FunctionType
from typing import Any

import torch

from fdtensor.layouts.callsite import user_line
from fdtensor.layouts.errors import TraceError
from fdtensor.layouts.torch_private import transforms_active
from fdtensor.ops.again import as_given
from fdtensor.ops.ambient import casts, with_casts
from fdtensor.ops.around import Around
from fdtensor.ops.call_recorder import CallRecorder
from fdtensor.ops.randomness.draw import DRAW

__all__ = ["Closed", "Step", "Tensors", "read_by", "refuse_different"]

Tensors = list[torch.Tensor]

Step = Callable[[Tensors, Tensors], tuple[Tensors, Tensors]]
"""From what is carried and the entries to what is carried on, and the results of the step."""


class _Read(Around):
    """A context in which what is read of around shows."""

    what = "a step of a scan"

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "__get__":  # a view by a property, such as .T
            args = (self.of(args[0]), *args[1:])
        return super().__torch_function__(func, types, args, kwargs)


class _Given(_Read):
    """A context in which tensors stand for those that are read of around."""

    def __init__(self, read: Tensors, given: Tensors) -> None:
        super().__init__()
        self.given = {id(t): g for t, g in zip(read, given, strict=True)}
        self.used: set[int] = set()
        """Those that were read, by their ids."""
        for t in given:
            self.note(t)

    def of(self, t: Any) -> Any:
        """What stands for a tensor from around; anything else as it is."""
        if id(t) not in self.given:
            return t
        self.used.add(id(t))
        return self.given[id(t)]

    def refuse_others(self) -> None:
        """Raises `TraceError` where not all tensors were read that the step read at first."""
        if self.used != self.given.keys():
            raise TraceError(
                "a step of a scan reads other tensors when it is differentiated than before.",
                line=user_line() or "not known",
                hint="It runs again then: what it reads of objects around it may not be bound "
                "anew until the derivative is taken.",
            )


class Closed:
    """A step as a function of all that it reads; its results have what was carried, too.

    It runs again for a derivative, as where it was given: in the same region, casts and place.
    """

    def __init__(self, step: Step, carry: Tensors, stacks: Tensors, read: Tensors) -> None:
        self.step, self.read = as_given(as_it_is(step)), read
        self.context, self.casts = contextvars.copy_context(), casts()
        self.around = _Given([], [])
        self.followed = _followed(carry, stacks, read)

    def __call__(self, carry: Tensors, entries: Tensors, given: Tensors) -> tuple[Tensors, Tensors]:
        if torch.is_grad_enabled() or transforms_active():  # for a derivative of the scan
            return self.once(carry, entries, given)
        return _alone(self.once, self.followed, carry, entries, given)

    def once(self, carry: Tensors, entries: Tensors, given: Tensors) -> tuple[Tensors, Tensors]:
        """The results for tensors in place of those that the step reads."""
        self.around = _Given(self.read, given)
        with self.around as around:
            for t in (*carry, *entries):
                around.note(t)
            with with_casts(self.casts):
                after, results = self.context.copy().run(self.step, carry, entries)
            around.refuse_written()
            after, results = [*map(around.of, after)], [*map(around.of, results)]
            around.refuse_others()
        refuse_different(carry, after)
        return after, [*results, *carry]


def _followed(*places: Tensors) -> list[list[bool]] | None:
    """Which tensors autograd follows; None where a step may not ask it for derivatives.

    Inside of transforms of `torch.func` no function may.
    """
    if transforms_active() or not torch.is_grad_enabled():
        return None
    return [[t.requires_grad for t in some] for some in places]


def _alone(
    step: Callable[..., tuple[Tensors, Tensors]],
    followed: Sequence[Sequence[bool]] | None,
    *given: Tensors,
) -> tuple[Tensors, Tensors]:
    """What a step gives: outside nothing is known of how, but inside autograd may be asked."""
    if followed is None:
        with torch.no_grad():
            return step(*given)
    pairs = [[*zip(*two, strict=True)] for two in zip(given, followed, strict=True)]
    taken = [[t.detach().requires_grad_() if f else t for t, f in some] for some in pairs]
    with torch.enable_grad():
        after, results = step(*taken)
    for some, own in zip(taken, followed, strict=True):
        for t in itertools.compress(some, own):
            if t.grad is not None:
                raise _leaves_a_gradient(t)
    return [t.detach() for t in after], [t.detach() for t in results]


def _leaves_a_gradient(t: torch.Tensor) -> TraceError:
    return TraceError(
        "backward() in a step of a scan leaves a gradient in a tensor that the step takes.",
        tensor=f"{tuple(t.shape)} {t.dtype}",
        line=user_line() or "not known",
        hint="It would be lost: take torch.func.grad or torch.autograd.grad, and return it.",
    )


def as_it_is(f: Any, known: dict[int, Any] | None = None) -> Any:
    """A function whose closures stay what they are, whatever their names are bound to later.

    The derivative of a scan runs its step again, when `c, ys = scan(...)` has another `c`.
    """
    known = {} if known is None else known
    if id(f) in known:
        return known[id(f)]
    if isinstance(f, functools.partial):
        args = [as_it_is(a, known) for a in f.args]
        return functools.partial(
            as_it_is(f.func, known), *args, **{k: as_it_is(a, known) for k, a in f.keywords.items()}
        )
    if not isinstance(f, FunctionType) or not f.__closure__:
        return f
    cells = tuple([CellType() for _ in f.__closure__])
    copy = FunctionType(f.__code__, f.__globals__, f.__name__, f.__defaults__, cells)
    copy.__kwdefaults__ = f.__kwdefaults__
    known[id(f)] = copy  # it may be in a closure of its own
    for cell, old in zip(cells, f.__closure__, strict=True):
        with contextlib.suppress(ValueError):  # one that is not bound yet
            cell.cell_contents = as_it_is(old.cell_contents, known)
    return copy


def read_by(step: Step, carry: Tensors, stacks: Tensors) -> Tensors | None:
    """The tensors of around that a step reads, after it has run once; None if it draws numbers."""
    recorder = CallRecorder.running[-1]
    checks, recorder.checks = recorder.checks, None
    start = len(recorder.calls)
    try:
        followed, around = _followed(carry, stacks), _Read()
        carry = [t.detach().clone() for t in carry]
        entries = [t.new_zeros(t.shape[1:]) for t in stacks]
        with recorder.numbers.aside():
            _alone(functools.partial(_read_once, step, around), followed, carry, entries)
    finally:
        recorder.checks = checks
    if any(call.op is DRAW and call.args[1] is not None for call in recorder.calls[start:]):
        return None
    return [t for t, _, _ in around.gates.values()]


def _read_once(
    step: Step, around: Around, carry: Tensors, entries: Tensors
) -> tuple[Tensors, Tensors]:
    """What a step gives, within a context that knows afterwards what it has read."""
    with around:
        for t in (*carry, *entries):
            around.note(t)
        after, results = step(carry, entries)
        out = [*map(around.of, after)], [*map(around.of, results)]
        around.refuse_written()
    return out


def refuse_different(before: Tensors, after: Tensors) -> None:
    """Raises `TraceError` where a step gives a carry of another type than it took."""
    for k, (a, b) in enumerate(zip(before, after, strict=True)):
        if a.shape != b.shape or a.dtype != b.dtype:
            raise TraceError(
                f"a step of a scan gives carry {k} another type than it took.",
                took=f"{tuple(a.shape)} {a.dtype}",
                gave=f"{tuple(b.shape)} {b.dtype}",
                line=user_line() or "not known",
                hint="The carry keeps its shapes and dtypes: cast init, or the result.",
            )
