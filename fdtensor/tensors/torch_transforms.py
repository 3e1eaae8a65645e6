"""What torch's own transforms say of a DTensor, which they do not take: those that do."""

from __future__ import annotations

import inspect

from fdtensor.layouts.torch_private import TRANSFORMS_FOLDER

__all__ = ["INSTEAD", "ToldByTorch", "asked_by_a_transform"]

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
    frame = inspect.currentframe()
    for _ in range(2):
        frame = frame and frame.f_back
    return frame is not None and TRANSFORMS_FOLDER in frame.f_code.co_filename
