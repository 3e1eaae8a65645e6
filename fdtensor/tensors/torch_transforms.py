"""What torch's own Python says of a DTensor that it does not take: what takes one."""

from __future__ import annotations

import inspect
from typing import Any

from fdtensor.layouts.torch_private import TRANSFORMS_FOLDER

__all__ = [
    "INSTEAD",
    "ToldByTorch",
    "asked_by_a_transform",
    "asked_by_clipping",
    "asked_by_control_flow",
    "asked_by_functional_call",
    "name_for_torch",
]

INSTEAD = (
    "fd.grad, fd.grad_and_value, fd.vjp, fd.jvp, fd.vmap, fd.jacrev, fd.jacfwd and fd.hessian "
    "take DTensors; those of torch.func stand inside of a traced function"
)


class ToldByTorch(type):
    """A kind of record: where a transform of torch refuses one by its kind, that says what to do.

    Transforms look at nothing of an argument but whether it is a tensor, and print its kind.
    """

    def __repr__(cls) -> str:
        text = f"<class '{cls.__module__}.{cls.__qualname__}'>"
        return f"{text}: {INSTEAD}" if asked_by_a_transform() else text


def asked_by_a_transform() -> bool:
    """Whether a transform of torch itself is what asks the caller of this function."""
    return TRANSFORMS_FOLDER in _file_of_caller(2)


def asked_by_control_flow() -> bool:
    """The same for `torch.cond` and other functions of torch that take functions."""
    return _printed_in("/torch/_higher_order_ops/")


def asked_by_functional_call() -> bool:
    """The same for `torch.func.functional_call`, which puts tensors in place of parameters."""
    return _printed_in("/nn/utils/_named_member_accessor.py")


def _printed_in(part: str) -> bool:
    """Whether a file with this in its name prints what asks the caller of this function."""
    files = [_file_of_caller(4), _file_of_caller(5)]  # of repr(), and of a text that formats it
    return any(part in file for file in files)


def asked_by_clipping() -> bool:
    """The same for `torch.nn.utils.clip_grad_norm_` and what else clips gradients."""
    return _file_of_caller(2).endswith("/nn/utils/clip_grad.py")


def name_for_torch(kind: type) -> str:
    """The name of a kind of record, for optimizers and modules with what to write instead.

    They ask a record for it, by `torch.typename`, to say that it is no parameter. Nobody else does.
    """
    asking = _file_of_caller(3)
    if asking.endswith("/optim/optimizer.py"):
        return (
            f"{kind.__qualname__}, for which fd.optim has optimizers of the same names; "
            "those of torch step on fd.optim.local_tensors(params)"
        )
    if asking.endswith("/nn/modules/module.py"):
        return f"{kind.__qualname__}, with which fd.bind(module, {{name: x}}) calls a module"
    raise AttributeError(f"{kind.__qualname__!r} object has no attribute '__name__'")


def _file_of_caller(levels: int) -> str:
    """The file whose code stands this many calls above the caller of this function."""
    frame: Any = inspect.currentframe()
    for _ in range(levels + 1):
        frame = frame and frame.f_back
    return "" if frame is None else frame.f_code.co_filename.replace("\\", "/")
