"""Private names of torch for the transforms of `torch.func` and autograd: 2.11 to 2.13."""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Generator, Iterator
from typing import Any

import torch
from torch import _tensor, autograd, overrides
from torch._C._functorch import (
    get_interpreter_stack,
    get_unwrapped,
    is_functorch_wrapped_tensor,
    is_gradtrackingtensor,
    maybe_get_level,
    pop_dynamic_layer_stack,
    push_dynamic_layer_stack,
)
from torch._functorch import eager_transforms, utils, vmap
from torch._functorch.autograd_function import custom_function_call
from torch.autograd import forward_ad, graph
from torch.overrides import _get_current_function_mode_stack, handle_torch_function

__all__ = [
    "current_autograd_node",
    "current_graph_task",
    "forward_active",
    "forward_grad_enabled",
    "forward_level",
    "get_unwrapped",
    "is_batched",
    "is_functorch_wrapped_tensor",
    "is_gradtrackingtensor",
    "is_mapped",
    "nested_jvp",
    "run_backward",
    "seen_by_modes",
    "sequence_number",
    "set_forward_grad_enabled",
    "transforms_active",
    "maps_around",
    "transforms_around",
    "within_transforms",
    "without_transforms",
    "TRANSFORMS_FOLDER",
]

_C: Any = torch._C
_autograd: Any = _C._autograd
_functorch: Any = _C._functorch
_forward_ad: Any = forward_ad

transforms_active: Any = _C._are_functorch_transforms_active
"""Whether a transform of `torch.func` surrounds this code."""


def transforms_around() -> int:
    """How many transforms of `torch.func` surround this code."""
    stack: Any = get_interpreter_stack()
    return len(stack or ())


def maps_around() -> bool:
    """Whether one of the transforms of `torch.func` that surround this code is a `vmap`."""
    stack: Any = get_interpreter_stack()
    return any(i.key() == _functorch.TransformType.Vmap for i in stack or ())


@contextlib.contextmanager
def within_transforms(count: int) -> Generator[None]:
    """A context in which only so many transforms surround this code, the outermost ones."""
    left: list[Any] = []
    try:
        while transforms_around() > count:
            left.append(pop_dynamic_layer_stack())
        yield
    finally:
        while left:
            push_dynamic_layer_stack(left.pop())


_BETWEEN: tuple[tuple[Any, str], ...] = (
    (eager_transforms, "_wrap_for_grad"),
    (eager_transforms, "_unwrap_for_grad"),
    (vmap, "_add_batch_dim"),
    (vmap, "_remove_batch_dim"),
    (utils, "unwrap_dead_wrappers"),
)
"""What a transform wraps tensors with, and unwraps them, and what an `autograd.Function` takes."""


@contextlib.contextmanager
def seen_by_modes(taken: Callable[[Any], bool], run: Callable[[Any], bool]) -> Generator[None]:
    """A context in which modes of functions see more of derivatives than torch lets them see.

    Modes that are `taken` see the tensors that transforms and `autograd.Function`s take, which to
    torch go by no function of tensors. Those that are `run` see what hooks, checkpoints and
    `autograd.Function`s call, where torch has left all modes to let them see that it runs these.
    """
    with _taking_seen_by(taken), _running_seen_by(run):
        yield


@contextlib.contextmanager
def _taking_seen_by(is_one: Callable[[Any], bool]) -> Generator[None]:
    """A context in which some modes see what transforms and `autograd.Function`s take."""

    def seen(plain: Any) -> Any:
        @functools.wraps(plain)
        def call(taken: Any, *args: Any) -> Any:
            if any(map(is_one, _get_current_function_mode_stack())):
                return handle_torch_function(call, (taken,), taken, *args)
            return plain(taken, *args)

        return call

    before = [(module, name, getattr(module, name)) for module, name in _BETWEEN]
    for module, name, plain in before:
        setattr(module, name, seen(plain))
    try:
        yield
    finally:
        for module, name, plain in before:
            setattr(module, name, plain)


class _Left(threading.local):
    """The modes that torch has left to let them see a call, in this thread; None for no call."""

    modes: list[Any] | None = None


_RUNS_PYTHON: tuple[Any, ...] = (  # type: ignore[reportUnknownVariableType]
    autograd.grad,
    autograd.backward,
    torch.Tensor.backward,
    custom_function_call,
)
"""What runs hooks, what is computed again for a backward, or parts of an `autograd.Function`."""

_SHOWN: tuple[tuple[Any, str], ...] = tuple(
    (module, "handle_torch_function") for module in (autograd, _tensor, overrides)
)
"""Where modes are shown a call of these."""

_RUN: tuple[tuple[Any, str], ...] = (
    (autograd, "_engine_run_backward"),
    (custom_function_call, "dispatch"),
)
"""What runs it, when all modes have seen the call."""


@contextlib.contextmanager
def _running_seen_by(is_one: Callable[[Any], bool]) -> Generator[None]:
    """A context in which some modes see what torch runs when all have been shown that it does."""
    left = _Left()

    def shown(plain: Any, public_api: Any, *args: Any, **kwargs: Any) -> Any:
        if left.modes is not None or not any(public_api is f for f in _RUNS_PYTHON):
            return plain(public_api, *args, **kwargs)
        left.modes = [*filter(is_one, _get_current_function_mode_stack())]
        try:
            return plain(public_api, *args, **kwargs)
        finally:
            left.modes = None

    def run(plain: Any, *args: Any, **kwargs: Any) -> Any:
        modes, left.modes = left.modes, None
        try:
            with contextlib.ExitStack() as stack:
                for mode in modes or ():
                    stack.enter_context(mode)
                return plain(*args, **kwargs)
        finally:
            left.modes = modes

    with contextlib.ExitStack() as stack:
        for wrapper, places in ((shown, _SHOWN), (run, _RUN)):
            for owner, name in places:
                plain = getattr(owner, name)
                stack.callback(setattr, owner, name, plain)
                setattr(owner, name, functools.partial(wrapper, plain))
        yield


def is_mapped(tensor: torch.Tensor, with_: torch.Tensor) -> bool:
    """Whether a tensor has an entry for each of those over which `with_` is mapped by a `vmap`."""
    level = maybe_get_level(with_)
    return any(maybe_get_level(t) == level for t in _wrapped(tensor))


def is_batched(tensor: torch.Tensor) -> bool:
    """Whether a `vmap` has a tensor of its own for each entry."""
    return any(map(_functorch.is_batchedtensor, _wrapped(tensor)))


def _wrapped(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """A tensor as each transform sees it, the innermost first; none outside of all."""
    while is_functorch_wrapped_tensor(tensor):
        yield tensor
        tensor = get_unwrapped(tensor)


without_transforms: Any = _C._DisableFuncTorch
"""A context in which no transform of `torch.func` sees what is called."""

forward_grad_enabled: Any = _C._is_fwd_grad_enabled
"""Whether forward AD is on in this thread."""

set_forward_grad_enabled: Any = forward_ad._set_fwd_grad_enabled
"""The context manager that turns forward AD on or off in this thread."""


def forward_level() -> int:
    """The current level of forward AD, which all threads share; -1 outside of all levels."""
    return _forward_ad._current_level


def forward_active() -> bool:
    """Whether tensors may have tangents."""
    return _forward_ad._current_level >= 0 and forward_grad_enabled()


@contextlib.contextmanager
def nested_jvp() -> Generator[None]:
    """Lets every `torch.func.jvp` within find itself nested, so that none ends the shared level."""
    transforms: Any = eager_transforms
    transforms.JVP_NESTING += 1
    try:
        yield
    finally:
        transforms.JVP_NESTING -= 1


# --- the engine of autograd ------------------------------------------------------------------

current_autograd_node: Any = _C._current_autograd_node
"""The node of the graph of autograd that is running; None outside of a backward."""


def sequence_number(node: Any = None) -> int:
    """The number of a node of autograd, else that which the next one gets."""
    return _autograd._get_sequence_nr() if node is None else node._sequence_nr()


run_backward: Any = graph._engine_run_backward
"""What `torch.autograd.grad` calls, in the modes of its caller: outputs, cotangents, whether to
keep the graph and to make one of the backward, inputs, whether inputs may be out of reach."""

current_graph_task: Any = _C._current_graph_task_id
"""The number of the backward that is running, -1 for none."""

TRANSFORMS_FOLDER = "_functorch"
"""The folder of torch in which its transforms are."""
