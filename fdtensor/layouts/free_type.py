"""`FreeType`: the shape and dtype of a tensor whose layout is to be chosen."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import TYPE_CHECKING

import attrs
import torch

from fdtensor.layouts.dtypes import dtype_name, known
from fdtensor.layouts.errors import LayoutError
from fdtensor.layouts.record import Record, integer

__all__ = ["FreeType", "check_size", "shape_of"]

LARGEST = 2**63 - 1
"""The most bytes of a tensor, where a dim of 0 counts as 1: torch counts strides so."""


def shape_of(value: Iterable[int]) -> tuple[int, ...]:
    """`value` as a shape; raises `LayoutError` for what is none."""
    try:
        shape = tuple(integer(size) for size in value)
    except (TypeError, AttributeError):
        shape = (-1,)
    if any(size < 0 for size in shape):
        raise LayoutError(
            f"{value!r} is not a shape.", hint="A shape is a tuple of ints, 0 or more."
        )
    return shape


@attrs.frozen(eq=False, repr=False)
class FreeType(Record):
    """The type of an argument of `trace` whose layout is to be chosen, a `TensorType` without one.

    It is written `TensorType(shape, dtype, layout="free")`. What only a layout has, such as the
    local shape, raises `LayoutError`.
    """

    shape: tuple[int, ...] = attrs.field(converter=shape_of)
    dtype: torch.dtype

    def __attrs_post_init__(self) -> None:
        check_size(self.shape, self.dtype)

    @property
    def numel(self) -> int:
        """How many elements the full tensor has."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes of the full tensor."""
        return self.numel * self.dtype.itemsize

    @property
    def ndim(self) -> int:
        """How many dims the full tensor has."""
        return len(self.shape)

    def __repr__(self) -> str:
        return f'TensorType({self.shape!r}, {self.dtype!r}, "free")'

    def __str__(self) -> str:
        return f"{dtype_name(self.dtype)}[{','.join(map(str, self.shape))}]{{free}}"

    def unchosen(self) -> LayoutError:
        """The error for what needs its layout."""
        return LayoutError(
            f"the layout of {self} is not chosen yet: the program that trace makes has it.",
            hint="program.layouts_of(0) has those of argument 0; inside of a function "
            "constrain(x, layout) and x.redistribute(layout) pin one.",
        )

    if not TYPE_CHECKING:  # checkers know that these are not there

        def __getattr__(self, name: str) -> object:
            if name in OF_LAYOUTS:
                raise self.unchosen()
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


OF_LAYOUTS = frozenset(
    {
        *("layout", "mesh", "box", "index", "offset", "local_shape", "local_nbytes"),
        *("placed", "with_layout", "cotangent"),
    }
)
"""What a `TensorType` has by its layout."""


def check_size(shape: tuple[int, ...], dtype: object) -> None:
    """Raises `LayoutError` for what is no dtype of whole bytes, and for 2**63 bytes or more."""
    if not isinstance(dtype, torch.dtype):
        raise LayoutError(f"{dtype!r} is not a dtype.", hint="Use torch.float32 and the like.")
    if not known(dtype):
        raise LayoutError(
            f"tensors of {dtype} cannot be laid out: its elements are not whole bytes of a "
            "plain dtype.",
            hint="Convert it, or view it as uint8 first.",
        )
    nbytes = dtype.itemsize
    for size in shape:  # one by one, for a product of millions of sizes takes long
        nbytes *= max(1, size)
        if nbytes > LARGEST:
            raise LayoutError(
                f"{dtype_name(dtype)}{list(shape)} has 2**63 bytes or more, empty dims left out.",
                largest=f"{LARGEST} bytes",
                hint="Give a shape that torch can make a tensor of.",
            )
