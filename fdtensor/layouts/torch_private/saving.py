"""Private names of torch for hooks that pack and unpack what autograd saves: 2.11 to 2.13."""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator
from typing import Any

import torch
from torch._C._functorch import get_interpreter_stack
from torch._functorch import eager_transforms
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import checkpoint

__all__ = ["recorded_saving_hooks", "without_saving_hooks"]

_C: Any = torch._C
_autograd: Any = _C._autograd
_checkpoint: Any = checkpoint


@contextlib.contextmanager
def without_saving_hooks() -> Generator[None]:
    """A context in which no hooks pack and unpack saved tensors."""
    hooks: list[Any] = []
    while (innermost := _autograd._top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(innermost)
        _autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            _autograd._push_saved_tensors_default_hooks(pack, unpack)


@contextlib.contextmanager
def recorded_saving_hooks(recomputed: Callable[[Any], Any]) -> Generator[None]:
    """A context in which `saved_tensors_hooks`, as of checkpoints, work where torch lets none work.

    They work in a `torch.func.grad` that no other transform surrounds: what they unpack, its
    backward, runs in it too. Else torch still refuses them. No mode of functions sees them pack:
    that a tensor is saved is no read of it by the function that runs. What a checkpoint computes
    again is `recomputed` of its function.
    """
    kind: Any = saved_tensors_hooks
    before = kind.__enter__, kind.__exit__, eager_transforms.grad_and_value_impl
    known = _Recorded(*before)
    plain = _checkpoint._checkpoint_without_reentrant_generator

    def generator(f: Any, *args: Any, **kwargs: Any) -> Any:
        own = threading.get_ident() == known.thread
        return plain(recomputed(f) if own else f, *args, **kwargs)

    def enter(hooks: Any) -> Any:
        return known.enter(hooks)

    def leave(hooks: Any, *error: Any) -> Any:
        return known.leave(hooks, *error)

    kind.__enter__, kind.__exit__ = enter, leave
    eager_transforms.grad_and_value_impl = known.in_gradient
    _checkpoint._checkpoint_without_reentrant_generator = generator
    try:
        yield
    finally:
        _checkpoint._checkpoint_without_reentrant_generator = plain
        kind.__enter__, kind.__exit__, eager_transforms.grad_and_value_impl = before


class _Recorded:
    """What enters and leaves hooks, and takes gradients, while a function is recorded."""

    def __init__(self, enter: Any, leave: Any, grad: Any) -> None:
        self.plain_enter, self.plain_leave, self.plain_grad = enter, leave, grad
        self.thread = threading.get_ident()
        self.gradients: list[bool] = []
        """Of each gradient that is taken, whether no transform surrounds it."""
        self.refusal: str | None = None
        """What torch says in place of hooks, where some were entered that it refuses."""

    def in_gradient(self, *args: Any, **kwargs: Any) -> Any:
        """What `torch.func.grad` and `grad_and_value` run."""
        if threading.get_ident() != self.thread:
            return self.plain_grad(*args, **kwargs)
        self.gradients.append(not get_interpreter_stack())
        try:
            return self.plain_grad(*args, **kwargs)
        finally:
            self.gradients.pop()

    def enter(self, hooks: Any) -> Any:
        """Enters hooks, where torch refuses them in a gradient as if it did not."""
        refusal = _autograd._saved_tensors_hooks_get_disabled_error_message()
        if refusal is not None and self._in_one_gradient():
            self.refusal = refusal
            _autograd._saved_tensors_hooks_enable()
        pack = hooks.pack_hook
        hooks.pack_hook = _unseen(pack)
        try:
            return self.plain_enter(hooks)
        finally:
            hooks.pack_hook = pack

    def leave(self, hooks: Any, *error: Any) -> Any:
        """Leaves hooks, and refuses others as before, if these were the outermost."""
        try:
            return self.plain_leave(hooks, *error)
        finally:
            outermost = _autograd._top_saved_tensors_default_hooks(True) is None
            if self.refusal is not None and outermost and self._in_one_gradient():
                _autograd._saved_tensors_hooks_disable(self.refusal)
                self.refusal = None

    def _in_one_gradient(self) -> bool:
        """Whether a gradient is the one transform around this code: other threads have others."""
        stack: Any = get_interpreter_stack()
        return self.gradients == [True] and len(stack or ()) == 1


def _unseen(pack: Any) -> Any:
    def packed(t: torch.Tensor) -> Any:
        with torch._C.DisableTorchFunction():
            return pack(t)

    return packed
