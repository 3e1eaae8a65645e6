"""The dtypes that tensors may have here: their short names, and which reductions they have."""

from __future__ import annotations

import torch

from fdtensor.layouts.errors import LayoutError
from fdtensor.layouts.placement import ReduceOp

__all__ = ["dtype_name", "known", "parse_dtype", "reducible"]

_LETTERS = {
    torch.bool: "bool",
    torch.bfloat16: "bf16",
    torch.complex32: "c32",
    torch.complex64: "c64",
    torch.complex128: "c128",
}
for _name in ("float", "int", "uint"):
    for _bits in (8, 16, 32, 64):
        if hasattr(torch, f"{_name}{_bits}"):
            _LETTERS[getattr(torch, f"{_name}{_bits}")] = f"{_name[0]}{_bits}"

_BY_NAME = {
    **{letters: dtype for dtype, letters in _LETTERS.items()},
    **{name: dtype for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)},
}

_INTEGERS = {
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
}  # fmt: skip
_UNSIGNED = {torch.uint16, torch.uint32, torch.uint64}
_FLOATS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
_COMPLEX = {torch.complex32, torch.complex64, torch.complex128}
_FLOAT8 = {
    getattr(torch, name)
    for name in dir(torch)
    if name.startswith("float8_") and isinstance(getattr(torch, name), torch.dtype)
}

_REDUCIBLE: dict[ReduceOp, set[torch.dtype]] = {
    "sum": _INTEGERS | _UNSIGNED | _FLOATS | _COMPLEX,
    "avg": _FLOATS | _COMPLEX,
    "product": _INTEGERS | _UNSIGNED | _FLOATS | _COMPLEX,
    "max": _INTEGERS | _FLOATS,
    "min": _INTEGERS | _FLOATS,
    "band": _INTEGERS | _UNSIGNED,
    "bor": _INTEGERS | _UNSIGNED,
    "bxor": _INTEGERS | _UNSIGNED,
}


def dtype_name(dtype: torch.dtype) -> str:
    """The short name of a dtype: `f32`, `bf16`, `i64`, `c64`, `bool`."""
    return _LETTERS.get(dtype, str(dtype).removeprefix("torch."))


def parse_dtype(text: str) -> torch.dtype:
    """The dtype called `f32` or `float32`; raises `LayoutError` for another text."""
    dtype = _BY_NAME.get(text.removeprefix("torch."))
    if dtype is None:
        raise LayoutError(
            f"{text!r} is not a dtype.", hint="Write f32, bf16, i64, bool, c64, or float32."
        )
    return dtype


def known(dtype: torch.dtype) -> bool:
    """Whether tensors of a dtype can be laid out: its elements are whole bytes of a plain kind."""
    return dtype in _REDUCIBLE["sum"] or dtype in _FLOAT8


def reducible(dtype: torch.dtype, reduce_op: ReduceOp) -> bool:
    """Whether a dtype has a reduction."""
    return dtype in _REDUCIBLE[reduce_op]
