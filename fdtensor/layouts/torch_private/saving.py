"""Private names of torch for hooks that pack and unpack what autograd saves: 2.11 to 2.13."""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

import torch
from torch._C._functorch import get_interpreter_stack
from torch._functorch import eager_transforms
from torch.autograd.graph import saved_tensors_hooks

__all__ = ["recorded_saving_hooks", "without_saving_hooks"]

_C: Any = torch._C
_autograd: Any = _C._autograd


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
def recorded_saving_hooks() -> Generator[None]:
    """A context in which `saved_tensors_hooks`, as of checkpoints, work where torch lets none work.

    They work in a `torch.func.grad` that no other transform surrounds: what they unpack, its
    backward, runs in it too. Else torch still refuses them. No mode of functions sees them pack:
    that a tensor is saved is no read of it by the function that runs.
    """
    kind: Any = saved_tensors_hooks
    before = kind.__enter__, kind.__exit__, eager_transforms.grad_and_value_impl
    known = _Recorded(*before)

    def enter(hooks: Any) -> Any:
        return known.enter(hooks)

    def leave(hooks: Any, *error: Any) -> Any:
        return known.leave(hooks, *error)

    kind.__enter__, kind.__exit__ = enter, leave
    eager_transforms.grad_and_value_impl = known.in_gradient
    try:
        yield
    finally:
        kind.__enter__, kind.__exit__, eager_transforms.grad_and_value_impl = before


class _Recorded:
    """What enters and leaves hooks, and takes gradients, while a function is recorded."""

    def __init__(self, enter: Any, leave: Any, grad: Any) -> None:
        self.plain_enter, self.plain_leave, self.plain_grad = enter, leave, grad
        self.gradients: list[bool] = []
        """Of each gradient that is taken, whether no transform surrounds it."""
        self.refusals: list[str | None] = []
        """What torch says in place of hooks where these were entered; None where it takes them."""

    def in_gradient(self, *args: Any, **kwargs: Any) -> Any:
        """What `torch.func.grad` and `grad_and_value` run."""
        self.gradients.append(not get_interpreter_stack())
        try:
            return self.plain_grad(*args, **kwargs)
        finally:
            self.gradients.pop()

    def enter(self, hooks: Any) -> Any:
        """Enters hooks, where torch refuses them in a gradient as if it did not."""
        stack: Any = get_interpreter_stack()
        alone = self.gradients == [True] and len(stack or ()) == 1
        refusal = _autograd._saved_tensors_hooks_get_disabled_error_message() if alone else None
        if refusal is not None:
            _autograd._saved_tensors_hooks_enable()
        pack = hooks.pack_hook
        hooks.pack_hook = _unseen(pack)
        try:
            result = self.plain_enter(hooks)
        finally:
            hooks.pack_hook = pack
        self.refusals.append(refusal)
        return result

    def leave(self, hooks: Any, *error: Any) -> Any:
        """Leaves hooks, and refuses others as before."""
        refusal = self.refusals.pop()
        try:
            return self.plain_leave(hooks, *error)
        finally:
            if refusal is not None:
                _autograd._saved_tensors_hooks_disable(refusal)


def _unseen(pack: Any) -> Any:
    def packed(t: torch.Tensor) -> Any:
        with torch._C.DisableTorchFunction():
            return pack(t)

    return packed
