"""`scanned`: a function that runs once for each entry of some stacks, and passes a carry on.

It is recorded once, as a loop of a known number of steps; what it gives for each entry is written
into stacks. Its derivative is another scan, backward through the entries, of the derivative of a
step; a batch of scans is a scan of a batch.
"""

# pyright: reportIncompatibleMethodOverride=false
# the static methods of an autograd.Function have the parameters that torch names

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from typing import Any

import attrs
import torch

from fdtensor.layouts.torch_private import (
    function_modes,
    pop_function_mode,
    push_function_mode,
    run_backward,
    transforms_active,
)
from fdtensor.ops.around import Around, smooth
from fdtensor.ops.branches import branches_count
from fdtensor.ops.call_recorder import CallRecorder
from fdtensor.ops.loop_ops import ENTRY, LOOP_IN, LOOP_NEXT, LOOP_OUT, WITH_ENTRY
from fdtensor.ops.scan_steps import Closed, Step, Tensors, read_by

__all__ = ["scanned"]


def scanned(
    step: Step, carry: Tensors, stacks: Tensors, count: int, *, from_end: bool = False
) -> tuple[Tensors, Tensors] | None:
    """What is carried in the end, and the stacked results; None for a step that draws numbers.

    A step that draws random numbers has others each time, so it has to be recorded each time.
    """
    read = read_by(step, carry, stacks)
    if read is None:
        return None
    closed, counts = Closed(step, carry, stacks, read), branches_count()
    body = closed if counts is None else lambda c, e, r: closed(c, e, r[1:])
    read = read if counts is None else [counts, *read]
    how = len(carry), len(stacks), count, from_end, counts is not None
    scan = _Scan(body, *how, lambda: closed.around)
    # by an op, so that a function around this one may put its own in their place
    outs = _Scanned.apply(scan, *carry, *stacks, *[t.clone() for t in read])
    return list(outs[: len(carry)]), list(outs[len(carry) : -len(carry) or None])  # type: ignore[index]


@attrs.frozen(eq=False)
class _Scan:
    """A step as a function of all that it reads, and what it runs over."""

    body: Callable[[Tensors, Tensors, Tensors], tuple[Tensors, Tensors]]
    """With what it reads of around as its last argument; its last results are what was carried."""
    carries: int
    stacks: int
    count: int
    from_end: bool
    conditional: bool
    """Whether it is in a branch, which counts where the first of what is read says so."""
    around: Callable[[], Around | None] = lambda: None
    """The context in which the body last ran: for what runs again in its backward."""

    def parts(self, tensors: Sequence[Any]) -> tuple[Any, Any, Any]:
        """What is carried, the stacks, and what is read of around."""
        carries, ends = self.carries, self.carries + self.stacks
        return [*tensors[:carries]], [*tensors[carries:ends]], [*tensors[ends:]]

    def run(self, carry: Tensors, stacks: Tensors, read: Tensors) -> Tensors:
        """What is carried in the end, and the stacked results, recorded as a loop."""
        recorder = CallRecorder.running[-1]
        number, faults = len(recorder.calls), contextlib.nullcontext()
        if recorder.checks is not None:
            faults = recorder.checks.within_loop(number, self.count)

        def carried(t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return LOOP_IN(t, self.count, number)

        with faults as end:
            i, tie = carried(torch.zeros((), dtype=torch.int64, device="cpu"))
            pairs = [carried(t) for t in carry]
            at = self.count - 1 - i if self.from_end else i
            entries = [ENTRY(stack, at) for stack in stacks]
            after, results = self.body([t for t, _ in pairs], entries, read)
            news = [carried(_stack_of(self.count, t)) for t in results]
            written = [WITH_ENTRY(s, t, at) for (s, _), t in zip(news, results, strict=True)]
            go = i < self.count
            go = go & read[0] if self.conditional else go
            ties = [tie, *[tie for _, tie in (*pairs, *news)]]
            nexts = zip((i + 1, *after, *written), ties, strict=True)
            tokens = [LOOP_NEXT(go, t, tie, number) for t, tie in nexts]
            if end is not None:
                end(go, tokens)
        return [LOOP_OUT(tie, tokens, number) for tie in ties[1:]]


def _stack_of(count: int, entry: torch.Tensor) -> torch.Tensor:
    return torch.zeros((count, *entry.shape), dtype=entry.dtype, device=entry.device)


class _Scanned(torch.autograd.Function):
    """The results of a scan: what is carried, stacks of results, stacks of what was carried."""

    @staticmethod
    def forward(scan: _Scan, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with _outside():
            return tuple(scan.run(*scan.parts(tensors)))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.scan, *tensors = inputs
        carry, stacks, read = ctx.scan.parts(tensors)
        carried = output[-len(carry) :] if carry else ()
        ctx.save_for_backward(*carried, *stacks, *read)
        ctx.save_for_forward(*tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        with _outside():
            return None, *_pulled(ctx.scan, ctx.saved_tensors, grads, ctx.needs_input_grad[1:])

    @staticmethod
    def jvp(ctx: Any, _scan: None, *tangents: Any) -> Any:
        with _outside():
            return _pushed(ctx.scan, ctx.saved_tensors, tangents)

    @staticmethod
    def vmap(info: Any, in_dims: Any, scan: _Scan, *tensors: torch.Tensor) -> Any:
        dims = scan.parts(in_dims[1:])
        carry, stacks, read = scan.parts(tensors)
        carry = [_in_front(t, dim, info.batch_size) for t, dim in zip(carry, dims[0], strict=True)]
        stacks = [_moved(t, dim, 1) for t, dim in zip(stacks, dims[1], strict=True)]
        read = [_moved(t, dim, 0) for t, dim in zip(read, dims[2], strict=True)]
        own = [[None if dim is None else 0 for dim in some] for some in dims]
        body = torch.func.vmap(
            scan.body, ([0] * scan.carries, own[1], own[2]), randomness=info.randomness
        )
        alike = scan.conditional and own[2][0] is None
        scan = attrs.evolve(scan, body=body, conditional=alike)
        outs = _Scanned.apply(scan, *carry, *stacks, *read)
        return outs, tuple([int(k >= scan.carries) for k in range(len(outs))])  # type: ignore[arg-type]


def _in_front(t: torch.Tensor, dim: int | None, size: int) -> torch.Tensor:
    return t.expand(size, *t.shape) if dim is None else t.movedim(dim, 0)


def _moved(t: torch.Tensor, dim: int | None, to: int) -> torch.Tensor:
    return t if dim is None else t.movedim(dim, to)


def _pulled(
    scan: _Scan, saved: Sequence[Any], grads: Sequence[Any], needed: Sequence[bool]
) -> list[torch.Tensor | None]:
    """The cotangents of all that a scan takes, by a scan from its other end."""
    carried, stacks, read = scan.parts(saved)
    wanted = scan.parts(needed)
    ends, given = [*grads[: scan.carries]], [*grads[scan.carries :]]
    of_carry = [k for k, t in enumerate(carried) if smooth(t)]
    of_stack = [k for k, t in enumerate(stacks) if smooth(t) and wanted[1][k]]
    of_read = [k for k, t in enumerate(read) if smooth(t) and wanted[2][k]]
    known = [k for k, grad in enumerate(given) if grad is not None]

    def transposed(back: Tensors, entries: Tensors, fixed: Tensors) -> tuple[Tensors, Tensors]:
        before, own, cotangents = _cut(entries, len(carried), len(stacks))
        fixed = [*fixed]

        def smoothly(*moving: torch.Tensor) -> tuple[torch.Tensor, ...]:
            parts = _cut(moving, len(of_carry), len(of_stack))
            where = of_carry, of_stack, of_read
            after, results = scan.body(*map(_placed, (before, own, fixed), where, parts))
            return *[after[k] for k in of_carry], *[results[k] for k in known]

        moving = *[before[k] for k in of_carry], *[own[k] for k in of_stack]
        primals = [*moving, *[fixed[k] for k in of_read]]
        cotangents = [*back[: len(of_carry)], *cotangents]
        pulled = _vjp(smoothly, primals, cotangents, scan.around)
        again, for_stacks, for_read = _cut(pulled, len(of_carry), len(of_stack))
        sums = [a + b for a, b in zip(back[len(of_carry) :], for_read, strict=True)]
        return [*again, *sums], [*for_stacks, *back]

    begin = [torch.zeros_like(carried[k][0]) if ends[k] is None else ends[k] for k in of_carry]
    begin += [torch.zeros_like(read[k]) for k in of_read]
    over = [*carried, *stacks, *[given[k] for k in known]]
    how = len(begin), len(over), scan.count, not scan.from_end, scan.conditional
    back = _Scan(transposed, *how)
    outs: Any = _Scanned.apply(back, *begin, *over, *read)
    for_carry, for_read, for_stacks = _cut(outs, len(of_carry), len(of_read))
    sides = (of_carry, for_carry), (of_stack, for_stacks), (of_read, for_read)
    none = scan.parts([None] * len(needed))
    return [t for of, (at, some) in zip(none, sides, strict=True) for t in _placed(of, at, some)]


def _vjp(
    f: Callable[..., tuple[torch.Tensor, ...]],
    primals: Tensors,
    cotangents: Tensors,
    around: Callable[[], Around | None],
) -> Sequence[torch.Tensor]:
    """The cotangents of the primals; by autograd where it can be, so that hooks may stand in it."""
    if transforms_active():
        return torch.func.vjp(f, *primals)[1](tuple(cotangents))
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        inputs = [t.view_as(t) if again and t.requires_grad else t.detach() for t in primals]
        for t in inputs:
            t.requires_grad_()
        pairs = [(o, g) for o, g in zip(f(*inputs), cotangents, strict=True) if o.requires_grad]
        if not pairs:
            return [torch.zeros_like(t) for t in inputs]
        outs, grads = zip(*pairs, strict=True)
        with around() or contextlib.nullcontext():  # torch.autograd.grad would leave it
            pulled = run_backward(
                outs, grads, again, again, tuple(inputs), True, accumulate_grad=False
            )
        return [
            torch.zeros_like(t) if g is None else g for t, g in zip(inputs, pulled, strict=True)
        ]


def _pushed(scan: _Scan, tensors: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, ...]:
    """The tangents of all that a scan gives, by a scan of a step with its tangents."""
    carry, stacks, read = scan.parts(tensors)
    along = scan.parts(tangents)
    of_carry = [k for k, t in enumerate(carry) if smooth(t)]
    of_stack = [k for k, t in enumerate(along[1]) if t is not None]
    of_read = [k for k, t in enumerate(along[2]) if t is not None]
    kinds: list[list[int]] = []

    def with_tangents(before: Tensors, entries: Tensors, fixed: Tensors) -> tuple[Tensors, Tensors]:
        values = before[: len(carry)], entries[: len(stacks)], fixed[: len(read)]
        moving = *before[len(carry) :], *entries[len(stacks) :], *fixed[len(read) :]
        others: list[Any] = []

        def smoothly(*moving: torch.Tensor) -> tuple[torch.Tensor, ...]:
            parts = _cut(moving, len(of_carry), len(of_stack))
            where = of_carry, of_stack, of_read
            after, results = scan.body(*map(_placed, values, where, parts))
            kinds[:] = [[k for k, t in enumerate(results) if smooth(t)]]
            others[:] = [[t.detach() for t in after], [t.detach() for t in results]]
            return *[after[k] for k in of_carry], *[results[k] for k in kinds[0]]

        at = [values[0][k] for k in of_carry], [values[1][k] for k in of_stack]
        primals = (*at[0], *at[1], *[values[2][k] for k in of_read])
        outs, moved, *_ = torch.func.jvp(smoothly, primals, tuple(moving))
        after = _placed(others[0], of_carry, outs[: len(of_carry)])
        results = _placed(others[1], kinds[0], outs[len(of_carry) :])
        return [*after, *moved[: len(of_carry)]], [*results, *moved[len(of_carry) :], *before]

    begin = [torch.zeros_like(carry[k]) if along[0][k] is None else along[0][k] for k in of_carry]
    over = [*stacks, *[along[1][k] for k in of_stack]]
    carries = len(carry) + len(begin)
    how = carries, len(over), scan.count, scan.from_end, scan.conditional
    both = _Scan(with_tangents, *how)
    fixed = [*read, *[along[2][k] for k in of_read]]
    outs: Any = _Scanned.apply(both, *carry, *begin, *over, *fixed)
    ends, stacked = outs[len(carry) : carries], outs[carries:]
    results = len(stacked) - carries - len(kinds[0])  # the last ones are what both carried
    of_ends: Any = _placed([None] * len(carry), of_carry, ends)  # type: ignore[list-item]
    of_made: Any = _placed([None] * results, kinds[0], stacked[results:])  # type: ignore[list-item]
    return *of_ends, *of_made


def _cut(values: Sequence[Any], first: int, second: int) -> tuple[list[Any], list[Any], list[Any]]:
    """The first values, as many after them, and the rest."""
    ends = first + second
    return [*values[:first]], [*values[first:ends]], [*values[ends:]]


def _placed(values: Sequence[Any], at: Sequence[int], others: Sequence[Any]) -> list[Any]:
    """The values with others in some places."""
    placed = [*values]
    for k, other in zip(at, others, strict=False):
        placed[k] = other
    return placed


@contextlib.contextmanager
def _outside() -> Generator[None]:
    """A context outside of those that watch what branches and loops around read."""
    modes: list[Any] = []
    while function_modes() and isinstance(function_modes()[-1], Around):
        modes.append(pop_function_mode())
    try:
        yield
    finally:
        for mode in reversed(modes):
            push_function_mode(mode)
