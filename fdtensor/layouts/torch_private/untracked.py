"""Private names of torch where it takes derivatives of the tensors among arguments alone.

Functions of autograd and backward hooks of modules pass over all others: 2.11 to 2.13.
"""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

from torch._functorch import utils
from torch.utils import checkpoint
from torch.utils.hooks import BackwardHook

__all__ = ["see_untracked"]


_SAVER: Any = getattr(checkpoint, "_NoopSaveInputs", ())
"""What checkpoints of torch 2.11 keep arguments with, which wants no derivative."""


def see_untracked(see: Callable[[str, Sequence[Any]], None]) -> None:
    """Has `see` called with all arguments from now on, before torch looks for tensors among them.

    Its first argument says what takes them.
    """
    unwrap: Any = utils.unwrap_dead_wrappers
    hooks: Any = BackwardHook
    setup = hooks.setup_input_hook

    @functools.wraps(unwrap)
    def unwrap_dead_wrappers(args: Any) -> Any:
        if sys._getframe(1).f_locals.get("cls") is not _SAVER:
            see("an autograd.Function", args)
        return unwrap(args)

    @functools.wraps(setup)
    def setup_input_hook(hook: Any, args: Any) -> Any:
        see("a module with backward hooks", args)
        return setup(hook, args)

    utils.unwrap_dead_wrappers = unwrap_dead_wrappers
    hooks.setup_input_hook = setup_input_hook
