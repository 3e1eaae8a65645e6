"""`spmd`: a plain torch function as one of DTensors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypedDict, TypeVar, overload

import torch

from fdtensor.layouts.signatures import named_arguments
from fdtensor.programs.as_if import Scale
from fdtensor.programs.open_dims import Dims
from fdtensor.programs.options import (
    Check,
    Choosing,
    OnDataDependent,
    OnMissingRule,
    Options,
    Plain,
)
from fdtensor.programs.program import Program
from fdtensor.tensors.calls.donated import Donate
from fdtensor.tensors.calls.function import Spmd
from fdtensor.tensors.dtensor import DTensor

__all__ = ["spmd"]

if TYPE_CHECKING:
    from typing_extensions import Unpack

P = ParamSpec("P")
K = TypeVar("K")


class _Decorator(Protocol):
    """`spmd` with its options, before the function is there.

    Checkers know arguments by those of `f`, and results that are tensors, or tuples or dicts of
    them. No type of Python says of other structures that their tensors have become DTensors.
    """

    @overload
    def __call__(self, f: Callable[P, torch.Tensor], /) -> Spmd[P, DTensor[Any]]: ...

    @overload
    def __call__(
        self, f: Callable[P, tuple[torch.Tensor, ...]], /
    ) -> Spmd[P, tuple[DTensor[Any], ...]]: ...

    @overload
    def __call__(
        self, f: Callable[P, dict[K, torch.Tensor]], /
    ) -> Spmd[P, dict[K, DTensor[Any]]]: ...

    @overload
    def __call__(self, f: Callable[P, Any], /) -> Spmd[P, Any]: ...


class _Options(TypedDict, total=False):
    out_layouts: Any
    regather: bool
    on_missing_rule: OnMissingRule
    on_data_dependent: OnDataDependent
    plain: Plain
    check: Check | None
    check_indices: bool
    reduce_dtype: torch.dtype | None
    deterministic: bool
    max_bytes: int | None
    as_if: Program | Scale | None
    dynamic: Dims | None
    choice: Choosing
    donate: Donate


@overload
def spmd(f: Callable[P, torch.Tensor], **options: Unpack[_Options]) -> Spmd[P, DTensor[Any]]: ...


@overload
def spmd(
    f: Callable[P, tuple[torch.Tensor, ...]], **options: Unpack[_Options]
) -> Spmd[P, tuple[DTensor[Any], ...]]: ...


@overload
def spmd(
    f: Callable[P, dict[K, torch.Tensor]], **options: Unpack[_Options]
) -> Spmd[P, dict[K, DTensor[Any]]]: ...


@overload
def spmd(f: Callable[P, Any], **options: Unpack[_Options]) -> Spmd[P, Any]: ...


@overload
def spmd(f: None = None, **options: Unpack[_Options]) -> _Decorator: ...


@named_arguments
def spmd(
    f: Callable[..., Any] | None = None,
    *,
    out_layouts: Any = None,
    regather: bool = False,
    on_missing_rule: OnMissingRule = "replicate",
    on_data_dependent: OnDataDependent = "error",
    plain: Plain = "error",
    check: Check | None = None,
    check_indices: bool = True,
    reduce_dtype: torch.dtype | None = torch.float32,
    deterministic: bool = False,
    max_bytes: int | None = None,
    as_if: Program | Scale | None = None,
    dynamic: Dims | None = None,
    choice: Choosing = "cheapest",
    donate: Donate = (),
) -> Any:
    """`f`, a plain torch function of full tensors, as one of pytrees of DTensors. Differentiable.

    The program is made at the first call with certain types, and agreed on by all ranks; see
    `trace` for what `f` may do and for the options. Python arguments are frozen into it, and what
    `f` and functions of yours that it calls read from closures, globals and attributes: another
    value makes another program. Tensors that `f` closes over are replicated and read afresh.
    Results are new values, never pending unless `out_layouts` says so. A program also belongs to
    the settings of torch under which it was traced: default dtype and device, grad mode, autocast.

    With `regather`, parameters in shards are freed after each use and gathered again for the next.

    What depends on the values of tensors, in the forward or the backward, is refused with the line
    that asks for one: `.item()`, `if tensor:`, `nonzero`. With `on_data_dependent="replicate"` all
    of `f` runs on replicated operands then, with a warning; results that are shaped like an
    argument get its layouts.

    Where torch raises for the values of an operand, such as an index that is out of range or a
    matrix without an inverse, all ranks raise at the end of the program; its counts of faults
    travel with other sums. `check_indices=False` leaves that out, and results are then undefined.

    Sums of float16 and bfloat16 wait, and are reduced, in `reduce_dtype`, as kernels of torch add
    them up; with None in their own dtype, which moves half of the bytes and rounds each term.

    Run after run a program gives the same bits, and all ranks that hold the same have the same.
    Another mesh or layout adds sums up in another order; with `deterministic` results have the bits
    that one rank gives, and all that is not exact is computed on whole operands.

    `dynamic` names dims of arguments whose sizes change from call to call, such as the length of a
    cache or a short last batch: `dynamic={"tokens": 1}`, or several dims as a tuple. `f` then sees
    symbols for these sizes, is run once for all of them, and each size gets a program with the
    layouts of the first. Where `f` branches on a size it is run for both sides, and again where a
    size becomes 0 or 1, or sizes differ that were equal. What asks which number a size is, as
    `len(x)` and `range(x.shape[0])` do, is run for each, with a warning. A symbol is a
    `torch.SymInt`, and no `int` for `isinstance`.

    With `donate`, arguments by name or position, a call frees the local tensors of these where it
    has read them last: `donate=("params", "state")` lets a training step hold one copy of both
    instead of two, and nothing of them can be read afterwards.

    >>> mesh = Mesh(x=2)
    >>> f = spmd(lambda x: (x * x).sum())
    >>> x = distribute(torch.arange(4.0), mesh.layout("x"), SimulatedComm(mesh))
    >>> f(x).full()
    tensor(14.)
    >>> print(f.trace(x))
    <lambda> on Mesh(x=2)
      in   a:f32[4@x]
      b:f32[4@x]     = mul.Tensor a a
      c:f32[]{sum:x} = sum b
      d:f32[]        = exchange[axis=x reduce_op=sum way=peer_to_peer] c  4 B
      out  d
    1 collective, 4 B received per rank
    """
    options = Options(
        out_layouts=out_layouts,
        regather=regather,
        on_missing_rule=on_missing_rule,
        on_data_dependent=on_data_dependent,
        plain=plain,
        check=check,
        check_indices=check_indices,
        reduce_dtype=reduce_dtype,
        deterministic=deterministic,
        max_bytes=max_bytes,
        as_if=as_if,
        dynamic=dynamic,
        choice=choice,
        donate=donate,
    )
    if f is None:
        return functools.partial(Spmd, options=options)
    return Spmd(f, options)
