"""Private names of torch for what `torch.compile` compiles: 2.11 to 2.13."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from typing import Any

import torch
from torch._C._dynamo import eval_frame

__all__ = ["as_if_compiling", "make_uncompiled"]

_compiler: Any = torch.compiler
_eval_frame: Any = eval_frame
_SKIP = _eval_frame._FrameExecStrategy(_eval_frame._FrameAction.SKIP, _eval_frame._FrameAction.SKIP)


def make_uncompiled(f: Callable[..., Any]) -> None:
    """Lets `torch.compile` compile neither this function nor what it calls."""
    f.__dict__["_torchdynamo_disable"] = True
    _eval_frame.set_code_exec_strategy(f.__code__, _SKIP)


@contextlib.contextmanager
def as_if_compiling(answer: bool = True) -> Generator[None]:
    """Lets `torch.compiler.is_compiling()` give this answer.

    Where it is true, the optimizers of torch keep numbers that are tensors, and libraries leave out
    warnings and shortcuts that read values.
    """
    before = _compiler._is_compiling_flag
    _compiler._is_compiling_flag = answer
    try:
        yield
    finally:
        _compiler._is_compiling_flag = before
