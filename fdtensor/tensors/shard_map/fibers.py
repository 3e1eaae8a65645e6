"""`run_lockstep`: functions of several ranks in one process, which pause to ask for answers.

A fiber is a thread that runs only while the others wait, one rank after the other, so functions
that share state have no races and print in one order. It has the thread-local state of its maker.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from typing import Any

import attrs
import torch

from fdtensor.layouts.torch_private import (
    forward_grad_enabled,
    function_modes,
    pop_function_mode,
    push_function_mode,
    set_forward_grad_enabled,
)

__all__ = ["Done", "ask", "inside", "run_lockstep"]


@attrs.frozen(eq=False)
class Done:
    """The result of the function of a fiber."""

    value: Any


class _Stopped(BaseException):
    """Raised in a fiber whose answer nobody will give any more."""


class _Fiber:
    """A function in a thread of its own, which runs from `resume` to its next `ask` or its end."""

    def __init__(self, body: Callable[[], Any]) -> None:
        self.answers: SimpleQueue[Any] = SimpleQueue()
        self.asked: SimpleQueue[Any] = SimpleQueue()
        self.stopped = False
        self.ended = False
        context, enter = contextvars.copy_context(), _state()
        self.thread = threading.Thread(
            target=context.run, args=(self._run, body, enter), daemon=True, name="fdtensor-rank"
        )

    def resume(self, answer: Any = None) -> Any:
        """The next request of the fiber, or `Done`; raises the error that the fiber raises."""
        if self.thread.ident is None:
            self.thread.start()
        else:
            self.answers.put(answer)
        request = self.asked.get()
        self.ended = isinstance(request, (Done, BaseException))
        if isinstance(request, BaseException):
            raise request
        return request

    def stop(self) -> None:
        """Ends the fiber where it waits, and returns when it has ended."""
        if self.thread.ident is None:
            return
        self.stopped = True
        if not self.ended:
            self.answers.put(None)
        self.thread.join()

    def ask(self, request: Any) -> Any:
        if self.stopped:
            raise _Stopped
        self.asked.put(request)
        answer = self.answers.get()
        if self.stopped:
            raise _Stopped
        return answer

    def _run(self, body: Callable[[], Any], enter: Callable[[], Any]) -> None:
        _current.set(self)
        try:
            with enter():
                result: Any = Done(body())
        except BaseException as error:
            result = error
        self.asked.put(result)


_current: contextvars.ContextVar[_Fiber | None] = contextvars.ContextVar("fiber", default=None)


def inside() -> bool:
    """Whether this code runs in a fiber."""
    return _current.get() is not None


def ask(request: Any) -> Any:
    """The answer to `request` of whoever runs this fiber, which pauses until then."""
    fiber = _current.get()
    assert fiber is not None, "only a fiber can ask"
    return fiber.ask(request)


def run_lockstep(
    bodies: Sequence[Callable[[], Any]], serve: Callable[[list[Any]], Sequence[Any]]
) -> list[Any]:
    """The results of the bodies. When all have asked for something or ended, `serve` answers them.

    What a body or `serve` raises is raised here, after all other fibers have ended.
    """
    fibers = [_Fiber(body) for body in bodies]
    try:
        requests = [fiber.resume() for fiber in fibers]
        while not all(isinstance(request, Done) for request in requests):
            answers = serve(requests)
            requests = [fiber.resume(answer) for fiber, answer in zip(fibers, answers, strict=True)]
        return [request.value for request in requests]
    finally:
        for fiber in fibers:
            fiber.stop()


def _state() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Returns the context that gives another thread the state of torch of this one."""
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    forward = forward_grad_enabled()
    kinds = ["cpu", *(["cuda"] if torch.cuda.is_initialized() else [])]
    casts = [
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds
    ]
    caches = torch.is_autocast_cache_enabled()
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    modes = function_modes()  # a default device is one

    @contextlib.contextmanager
    def enter() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if device is not None:
                stack.enter_context(torch.cuda.device(device))
            stack.enter_context(torch.inference_mode(inference))
            stack.enter_context(torch.set_grad_enabled(grad))
            stack.enter_context(set_forward_grad_enabled(forward))
            # a backward asks from the thread that started it
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            for kind, enabled, dtype in casts:
                if enabled:
                    cast = torch.autocast(kind, dtype, enabled, cache_enabled=caches)
                    stack.enter_context(cast)
            for mode in modes:
                push_function_mode(mode)
                stack.callback(pop_function_mode)
            yield

    return enter
