"""`TensorLike`: what a DTensor answers to Python's operators, and to functions of torch.

Each computes by `call` and gives a new DTensor; what reads the values gathers them on all ranks.
Attributes are on the class, so that those of a DTensor are looked up as fast as without them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from inspect import getattr_static
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fdtensor.ops.transparent import recording
from fdtensor.tensors.numpy_calls import array_of, operator_of
from fdtensor.tensors.operators import CALL, fill
from fdtensor.tensors.pulled import OF_AUTOGRAD
from fdtensor.tensors.refusals import (
    Absent,
    refuse_device,
    refuse_many,
    refuse_no_dims,
    refuse_write,
    refuse_writing,
)
from fdtensor.tensors.torch_transforms import name_for_torch

__all__ = ["TensorLike"]


class TensorLike:
    """The base of a record that computes as a tensor of torch does, and is none."""

    __slots__ = ()

    if TYPE_CHECKING:
        type: Any
        comm: Any
        full: Callable[[], torch.Tensor]
        detach: Callable[[], Any]

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """`call(func, ...)`: torch asks it where an argument of a function is a record."""
        kwargs = kwargs or {}
        refuse_writing(func, args, kwargs, cls)
        if func in OF_AUTOGRAD and not recording():
            return OF_AUTOGRAD[func](*args, **kwargs)
        return CALL[0](func, *args, **kwargs)

    # --- values, which all ranks gather ---------------------------------------------------------

    def item(self) -> Any:
        """The one element, as a number of Python. Collective, as `full()` is."""
        return _one(self).item()

    def tolist(self) -> Any:
        """The elements as nested lists. Collective, as `full()` is."""
        return self.detach().full().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """The full tensor as an array. Collective, as `full()` is.

        With `force` also that of a tensor that requires grad or lies on another device.
        """
        return self.full().numpy(force=force)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.asarray(self.full().numpy(), dtype=dtype)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if isinstance(kwargs.get("out"), TensorLike):
            raise refuse_write("out=x", self, f"torch.asarray(np.{func.__name__}(...))")
        return array_of(func, args, kwargs, TensorLike)

    def __array_ufunc__(self, ufunc: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(x, TensorLike) for x in kwargs.get("out", ())):
            raise refuse_write("out=x", self, f"torch.asarray(np.{ufunc.__name__}(...))")
        if method == "__call__" and len(args) == 2 and not kwargs:
            result = operator_of(ufunc, *args, TensorLike)
            if result is not NotImplemented:
                return result
        return array_of(getattr(ufunc, method), args, kwargs, TensorLike)

    def __dlpack__(self, **options: Any) -> Any:
        return self.full().detach().__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return torch.empty(0, device=self.device).__dlpack_device__()

    def __bool__(self) -> bool:
        return bool(_one(self))

    def __int__(self) -> int:
        return int(_one(self))

    def __float__(self) -> float:
        return float(_one(self))

    def __complex__(self) -> complex:
        return complex(_one(self))

    def __index__(self) -> int:
        return operator.index(_one(self))

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if spec else str(self)

    def __contains__(self, value: Any) -> bool:
        return bool((self == value).any())  # type: ignore[attr-defined]

    def __len__(self) -> int:
        if not self.type.shape:
            raise refuse_no_dims(self)
        return self.type.shape[0]

    def __iter__(self) -> Iterator[Any]:
        if not self.type.shape:
            raise refuse_no_dims(self)
        return iter(CALL[0](torch.unbind, self))

    def __getitem__(self, index: Any) -> Any:
        return CALL[0](torch.Tensor.__getitem__, self, index)

    def __setitem__(self, index: Any, value: Any) -> None:
        raise refuse_write("x[...] = y", self, "torch.where(...), or y = x.index_put(...)")

    def __delitem__(self, index: Any) -> None:
        raise refuse_write("del x[...]", self, "call(f, x) for another one")

    @property
    def __name__(self) -> str:
        return name_for_torch(type(self))

    # --- facts, which need no values -------------------------------------------------------------

    def size(self, dim: int | None = None) -> Any:
        """The shape of the full tensor, or its size in a dim."""
        shape = torch.Size(self.type.shape)
        return shape if dim is None else shape[dim]

    def dim(self) -> int:
        """How many dims the full tensor has."""
        return len(self.type.shape)

    def numel(self) -> int:
        """How many elements the full tensor has."""
        return self.type.numel

    def element_size(self) -> int:
        """The bytes of an element."""
        return self.type.dtype.itemsize

    def is_floating_point(self) -> bool:
        """Whether the dtype is one of floating point."""
        return self.type.dtype.is_floating_point

    def is_complex(self) -> bool:
        """Whether the dtype is complex."""
        return self.type.dtype.is_complex

    @property
    def itemsize(self) -> int:
        """The bytes of an element."""
        return self.type.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """The bytes of the full tensor."""
        return self.type.nbytes

    @property
    def device(self) -> torch.device:
        """Where the local tensors lie."""
        return self.comm.leaves(self.local)[0].device  # type: ignore[attr-defined]

    @property
    def is_cuda(self) -> bool:
        """Whether the local tensors lie on a GPU."""
        return self.device.type == "cuda"

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """The tensor in another dtype, or in that of another one. It stays on its device."""
        for given in (*args, *kwargs.values()):
            refuse_device(self, given)
        dtypes = [a.dtype if isinstance(a, TensorLike) else a for a in args]  # type: ignore[attr-defined]
        named = {k: v for k, v in kwargs.items() if k != "device"}
        dtypes = [a for a in dtypes if not isinstance(a, (str, torch.device))]
        return CALL[0](torch.Tensor.to, self, *dtypes, **named) if dtypes or named else self

    def __dir__(self) -> Iterable[str]:
        kind = self.__class__
        return [n for n in object.__dir__(self) if not isinstance(getattr_static(kind, n), Absent)]


def _one(x: Any) -> torch.Tensor:
    """The full tensor of one element; raises on all ranks, before traffic, for another.

    A rank may read a loss alone: what is read has no derivative.
    """
    if x.type.numel != 1:
        raise refuse_many(x)
    return x.detach().full()


fill(TensorLike)
