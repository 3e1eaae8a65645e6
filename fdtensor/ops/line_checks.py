"""`debug`: every line of every run is compared with the types of its program, by a `LineCheck`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import attrs
import torch

from fdtensor.layouts.dtypes import dtype_name
from fdtensor.layouts.errors import TraceError
from fdtensor.layouts.tensor_type import TensorType

__all__ = ["LineCheck", "debug", "debugging"]

_STATE = [os.environ.get("FDTENSOR_DEBUG", "0") not in ("", "0")]


def debugging() -> bool:
    """Whether lines are being checked."""
    return _STATE[0]


@contextlib.contextmanager
def debug(on: bool = True) -> Iterator[None]:
    """A context in which each rank checks each line that it runs.

    The local shape and dtype of a result must be those of its type, and a collective must give
    contiguous blocks. Raises `TraceError` with the first line that differs: its rule, or the kernel
    of its op, is wrong. The environment variable `FDTENSOR_DEBUG=1` does so everywhere.

    >>> mesh = Mesh(x=2)
    >>> x = distribute(torch.arange(6), mesh.layout("x"), SimulatedComm(mesh))
    >>> with debug():
    ...     y = call(torch.neg, x)

    >>> print(y.type)
    i64[6@x]
    """
    before = _STATE[0]
    _STATE[0] = on
    try:
        yield
    finally:
        _STATE[0] = before


@attrs.frozen(eq=False)
class LineCheck:
    """Compares the local tensor of a rank with the type of its value; it gives no value."""

    program: str
    line: str
    type: TensorType
    rank: int
    contiguous: bool

    def __call__(self, local: torch.Tensor) -> None:
        """Raises `TraceError` where the local tensor is not of the type."""
        shape, dtype = self.type.local_shape(self.rank), self.type.dtype
        actual = f"{dtype_name(local.dtype)}{list(local.shape)}"
        if (tuple(local.shape), local.dtype) == (shape, dtype):
            if not self.contiguous or local.is_contiguous():
                return
            actual += f" with strides {local.stride()}"
        raise TraceError(
            f"rank {self.rank} has {actual} for a value of {self.program} that is "
            f"{dtype_name(dtype)}{list(shape)}{' and contiguous' * self.contiguous}.",
            line=self.line,
            type=self.type,
            hint="The rule of the op or its kernel is wrong: verify(op, samples) runs its rows.",
        )
