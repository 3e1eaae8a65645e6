"""`Options`: what a caller says of a program beside the function, as one record."""

from __future__ import annotations

from typing import Any, Literal, get_args

import attrs
import torch

from fdtensor.layouts.errors import TraceError
from fdtensor.layouts.tree import flatten

__all__ = ["Check", "Like", "OnDataDependent", "OnMissingRule", "Options", "Plain", "like"]

Check = Literal["first", "always", "never"]
"""When ranks agree that they run the same plan: at its first use, at every use, or not at all."""

OnMissingRule = Literal["replicate", "error"]
"""What becomes of an op without a rule: it runs on replicated operands, or is refused."""

OnDataDependent = Literal["error", "replicate"]
"""What becomes of a function whose shapes or control flow depend on the values of tensors."""

Plain = Literal["error", "replicate"]
"""Whether plain tensors of more than one element may stand beside DTensors, as replicated ones."""


def _one_of(kind: Any) -> Any:
    choices = get_args(kind)

    def check(_: Any, attribute: attrs.Attribute[Any], value: object) -> None:
        if value not in choices and not (value is None and attribute.default is None):
            raise TraceError(
                f"{attribute.name}={value!r} is no option.",
                hint=f"Write {attribute.name}= one of {', '.join(map(repr, choices))}.",
            )

    return check


def _wider(_: Any, attribute: attrs.Attribute[Any], value: object) -> None:
    if value not in (torch.float32, torch.float64, None):
        raise TraceError(
            f"{attribute.name}={value} is no option.",
            hint="Write torch.float32, torch.float64, or None for the dtype of each sum.",
        )


@attrs.frozen
class Like:
    """The layouts of an argument, in place of layouts: made by `like`."""

    argument: int | str | None


def like(argument: int | str | None) -> Like:
    """The layouts of an argument, by its place or name, for `out_layouts`.

    spmd(heat, out_layouts=like(0))  # what comes out lies as what went in
    spmd(step, out_layouts=(like("params"), None))
    spmd(torch.fft.fft2, out_layouts=like(None))  # like no argument: the cheapest layout
    """
    return Like(argument)


def _as_key(tree: Any) -> Any:
    """A pytree of layouts as something that has a hash."""
    leaves, spec = flatten(tree)
    return spec, tuple(leaves)


@attrs.frozen
class Options:
    """The options of `spmd`, `call` and `trace`: equal ones give equal programs.

    Raises `TraceError` for a value that is no option.
    """

    out_layouts: Any = attrs.field(default=None, eq=_as_key)
    """A prefix of what the function returns, with a Layout, None or `like(...)` at each leaf."""
    regather: bool = False
    """Whether what parameters are gathered to is freed after each use and gathered again."""
    on_missing_rule: OnMissingRule = attrs.field(
        default="replicate", validator=_one_of(OnMissingRule)
    )
    on_data_dependent: OnDataDependent = attrs.field(
        default="error", validator=_one_of(OnDataDependent)
    )
    plain: Plain = attrs.field(default="error", validator=_one_of(Plain))
    check: Check | None = attrs.field(default=None, validator=_one_of(Check))
    """None is as the Comm says."""
    check_indices: bool = True
    """Whether programs look at the values of indices, and of others that ops refuse."""
    reduce_dtype: torch.dtype | None = attrs.field(default=torch.float32, validator=_wider)
    """In which dtype sums of half precision wait and are reduced; None is their own."""
    quiet: bool = False
    """Whether a run on replicated operands is what the caller expects: it is in `call`."""
