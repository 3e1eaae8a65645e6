"""`record`: runs a plain torch function once on fake full tensors and writes down its aten calls.

C++ functionalization sits between the function and the recorder, so that in-place ops and views
come out as functions; `torch.func` transforms and autograd run above both.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fdtensor.layouts.errors import TraceError
from fdtensor.layouts.torch_private import (
    fake_mode,
    forget_fakes,
    get_unwrapped,
    is_functional_tensor,
    is_gradtrackingtensor,
    seen_by_modes,
    to_functional_tensor,
    turn_functionalization_off,
    turn_functionalization_on,
)
from fdtensor.ops.ambient import neutral
from fdtensor.ops.around import Around
from fdtensor.ops.call_recorder import CallRecorder
from fdtensor.ops.functional import unwrapped
from fdtensor.ops.graph import Call, Full, Graph, Var, pruned
from fdtensor.ops.loop_values import with_kept_values, without_dead_carries
from fdtensor.ops.lost_writes import lost_writes
from fdtensor.ops.randomness import Numbers, without_rejection
from fdtensor.ops.region import no_region
from fdtensor.ops.saved_values import with_saved_values
from fdtensor.ops.sizes import Sizes
from fdtensor.ops.transparent import ALONE, needs_values, transparent
from fdtensor.ops.write_errors import write_error

__all__ = ["draw_from", "record"]


def draw_from(key: torch.Tensor) -> None:
    """Lets the random ops of the function that runs, or is recorded, draw from a key."""
    while is_gradtrackingtensor(key):
        key = get_unwrapped(key)
    Numbers.active[-1].key = unwrapped(key)


_FAKES = 1 << 13
"""How many results of ops on fake tensors torch may keep, which by itself keeps all of them."""


def record(
    f: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]],
    types: Sequence[Full],
    *,
    device: str | torch.device = "cpu",
    requires_grad: Sequence[bool] = (),
    mark: Callable[[], Any] = lambda: None,
    of_caller: bool = False,
    checks: bool = False,
    sizes: Sizes | None = None,
    lost: Callable[[Mapping[int, Call]], None] = lambda _: None,
) -> Graph:
    """The graph of `f`, which takes a list of tensors of these types and returns a list.

    Each call gets the result of `mark()` at the time when it is recorded. Where the function is
    `of_caller`, it runs under the settings of torch that the caller has; else under those of a
    fresh process. The graph does not depend on them any more: casts by default dtypes and autocast
    are written out. With `checks`, the graph ends with a check of all operands that ops refuse for
    their values. With `sizes` the shapes of the tensors are those of its inputs, and the graph is
    one for a template. `lost` is called with the inputs, by number, to which is written what
    nothing reads, and the call that wrote it.
    Raises `DataDependentError` where shapes or Python control flow depend on the values of tensors,
    and `TraceError` for what cannot be a pure function: in-place writes to closed-over tensors,
    random numbers, gradients left in closed-over tensors.
    """
    shapes = [t.shape if sizes is None else sizes.of_input(i) for i, t in enumerate(types)]
    environment = None if sizes is None else sizes.environment
    fakes = fake_mode(allow_non_fake_inputs=False, shape_env=environment)
    recorder = CallRecorder(fakes, mark, checks, sizes)
    grads = list(requires_grad) or [False] * len(types)
    with torch.inference_mode(False), fakes:  # ops of inference tensors hide their parts
        pairs = zip(shapes, types, strict=True)
        bare = [torch.empty(shape, dtype=t.dtype, device=device) for shape, t in pairs]
    inputs = tuple(map(recorder.var, bare))
    try:
        outs, ends = _run(f, recorder, bare, grads, of_caller)
    except RuntimeError as error:
        if "mutating a non-functional tensor" in str(error):
            raise write_error("an op") from error
        if "erroneously tracing" in str(error):  # a kernel asked for the memory of a tensor
            raise needs_values(torch.Tensor.data_ptr, ()) from error
        raise
    _no_gradients_left(recorder)
    lost(lost_writes(recorder.calls, inputs, ends, outs))
    forget_fakes(_FAKES)
    calls, phases = with_kept_values(
        recorder.calls, recorder.phases, recorder.types, torch.device(device)
    )
    calls, outs = with_saved_values(calls, phases, outs, recorder.types)
    calls = without_dead_carries(calls, outs)
    constants = tuple(recorder.constants)
    return pruned(Graph(inputs, constants, calls, outs, tuple(recorder.types)))


def _run(
    f: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]],
    recorder: CallRecorder,
    bare: Sequence[torch.Tensor],
    requires_grad: Sequence[bool],
    of_caller: bool,
) -> tuple[tuple[Var, ...], tuple[Var, ...]]:
    """The values of what `f` returns, after it has run on functional tensors around `bare` ones.

    And the values of these afterwards: new ones where it has written.
    """
    with ALONE, no_region(), contextlib.ExitStack() as stack:
        if not of_caller:
            stack.enter_context(neutral())
        grad = torch.is_grad_enabled()
        stack.enter_context(torch.inference_mode(False))  # which turns gradients on
        stack.enter_context(torch.set_grad_enabled(grad))
        stack.enter_context(recorder.numbers)
        stack.enter_context(without_rejection())
        stack.enter_context(transparent(of_caller))
        stack.enter_context(seen_by_modes(_is_around, _is_not_around))
        stack.enter_context(recorder.fakes)
        stack.enter_context(recorder)
        CallRecorder.running.append(recorder)
        stack.callback(CallRecorder.running.pop)
        wrapped = [to_functional_tensor(t) for t in bare]
        for t, wanted in zip(wrapped, requires_grad, strict=True):
            t.requires_grad_(wanted)
        turn_functionalization_on(reapply_views=True)
        try:
            results = [unwrapped(t) for t in f(wrapped)]
        finally:
            turn_functionalization_off()
        outs = tuple(recorder.known(recorder.fake(t)) for t in results)
        ends = tuple(recorder.known(recorder.fake(unwrapped(t))) for t in wrapped)
        if recorder.checks is not None:
            recorder.checks.finish(outs)
    return outs, ends


def _is_around(mode: Any) -> bool:
    return isinstance(mode, Around)


def _is_not_around(mode: Any) -> bool:
    """Whether a mode of this package is of all that is recorded, and not of one inner function.

    What a derivative of such a function reads goes in by no gate: loops and branches see to it.
    """
    return type(mode).__module__.startswith("fdtensor.") and not isinstance(mode, Around)


def _no_gradients_left(recorder: CallRecorder) -> None:
    for _, tensor in recorder.constants:
        grad = tensor.grad if tensor.is_leaf else None
        if grad is not None and is_functional_tensor(grad):
            tensor.grad = None
            raise TraceError(
                "backward() of a traced function left a gradient in a tensor that it closes over.",
                shape=tuple(tensor.shape),
                hint="Pass the tensor as an argument and use torch.func.grad or autograd.grad.",
            )
