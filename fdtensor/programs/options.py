"""`Options`: the options of `spmd`, `call` and `trace`, as one record."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

import attrs
import torch

from fdtensor.layouts.errors import TraceError
from fdtensor.layouts.expected import no_argument
from fdtensor.layouts.tree import flatten
from fdtensor.layouts.words import near
from fdtensor.programs.as_if import Scale
from fdtensor.programs.open_dims import Dims, are_dims
from fdtensor.programs.program import Program

__all__ = [
    "EVERY_CALL",
    "Check",
    "Choosing",
    "Like",
    "OnDataDependent",
    "OnMissingRule",
    "Options",
    "Plain",
    "like",
    "one_of_both",
]

Check = Literal["first", "always", "values", "never"]
"""When ranks compare what they run: at the first use of a plan, at every use, or never.

With "values" they compare at every use, and also the bits of what they are said to hold alike.
"""

EVERY_CALL = ("always", "values")
"""Those that compare at every use."""

Choosing = Literal["cheapest", "follow"]
"""How layouts inside are chosen: the cheapest ones, or those that the given ones lead to."""

OnMissingRule = Literal["replicate", "error"]
"""How an op without a rule is treated: it runs on replicated operands, or is refused."""

OnDataDependent = Literal["error", "replicate"]
"""How a function is treated whose shapes or control flow depend on the values of tensors."""

Plain = Literal["error", "replicate"]
"""Whether plain tensors of more than one element may stand beside DTensors, as replicated ones."""


def _one_of(kind: Any) -> Callable[[Any, attrs.Attribute[Any], object], None]:
    choices = get_args(kind)

    def check(_: Any, attribute: attrs.Attribute[Any], value: object) -> None:
        if value not in choices and not (value is None and attribute.default is None):
            raise TraceError(
                f"{attribute.name}={value!r} is no option.",
                hint=f"{near(value, choices)}Write {attribute.name}= one of "
                f"{', '.join(map(repr, choices))}.",
            )

    return check


def _flag(_: Any, attribute: attrs.Attribute[Any], value: object) -> None:
    if not isinstance(value, bool):
        raise TraceError(
            f"{attribute.name}={value!r} is no option.",
            hint=f"Write {attribute.name}=True or {attribute.name}=False.",
        )


def _wider(_: Any, attribute: attrs.Attribute[Any], value: object) -> None:
    if value not in (torch.float32, torch.float64, None):
        raise TraceError(
            f"{attribute.name}={value!r} is no option.",
            hint="Write torch.float32, torch.float64, or None for the dtype of each sum.",
        )


def _count(_: Any, attribute: attrs.Attribute[Any], value: object) -> None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
        raise TraceError(
            f"{attribute.name}={value!r} is no option.",
            hint="Write a whole number of bytes, or None for no bound.",
        )


def _program_or_scale(_: Any, attribute: attrs.Attribute[Any], value: object) -> None:
    if not (value is None or callable(value) or isinstance(value, Program)):
        raise TraceError(
            f"{attribute.name}={value!r} is no option.",
            hint="Write a function from shapes to the real ones, or a program of the real sizes.",
        )


def one_of_both(as_if: Program | Scale | None, like: object) -> Program | Scale | None:
    """What is to be repeated, of the two options of `trace` that say so.

    Raises `TraceError` where both are given, or `like` is no program.
    """
    if like is None:
        return as_if
    if not isinstance(like, Program):
        raise TraceError(
            f"like={like!r} is no option.",
            hint="Write a program of the same function; as_if= takes a function of shapes, too.",
        )
    if as_if is not None:
        raise TraceError(
            "as_if= and like= are given together, and both say what to repeat.",
            as_if=as_if.name if isinstance(as_if, Program) else getattr(as_if, "__name__", as_if),
            like=like.name,
            hint="Give one of them.",
        )
    return like


def _position(_: Any, attribute: attrs.Attribute[Any], value: object) -> None:
    if not (value is None or isinstance(value, (int, str))):
        hint = "Write like(0), like('params') or like(None)."
        raise no_argument(attribute.name, value, "position or name of an argument", hint)


@attrs.frozen
class Like:
    """A placeholder for the layouts of an argument: made by `like`."""

    argument: int | str | None = attrs.field(validator=_position)


def like(argument: int | str | None) -> Like:
    """The layouts of an argument, by its position or name, for `out_layouts`.

    spmd(heat, out_layouts=like(0))  # the result has the layouts of the first argument
    spmd(step, out_layouts=(like("params"), None))
    spmd(torch.fft.fft2, out_layouts=like(None))  # like no argument: the cheapest layout

    >>> mesh = Mesh(x=2)
    >>> x = TensorType((4, 4), torch.float32, mesh.layout("x"))
    >>> print(trace(lambda x: x.mT, x, out_layouts=like(0)).out_types[0])
    f32[4@x,4]
    """
    return Like(argument)


def _dims(_: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    if value is not None and not are_dims(value):
        raise TraceError(
            f"{attribute.name}={value!r} is no option.",
            hint='Write the dims of arguments by their names: dynamic={"tokens": 1}.',
        )


def _as_key(tree: object) -> object:
    """A pytree of layouts as a hashable key."""
    leaves, spec = flatten(tree)
    return spec, tuple(leaves)


@attrs.frozen
class Options:
    """The options of `spmd`, `call` and `trace`: equal ones give equal programs.

    Raises `TraceError` for a value that is no option.
    """

    out_layouts: object = attrs.field(default=None, eq=_as_key)
    """A prefix of what the function returns, with a Layout, None or `like(...)` at each leaf."""
    regather: bool = attrs.field(default=False, validator=_flag)
    """Whether gathered parameters are freed after each use and gathered again."""
    on_missing_rule: OnMissingRule = attrs.field(
        default="replicate", validator=_one_of(OnMissingRule)
    )
    on_data_dependent: OnDataDependent = attrs.field(
        default="error", validator=_one_of(OnDataDependent)
    )
    plain: Plain = attrs.field(default="error", validator=_one_of(Plain))
    check: Check | None = attrs.field(default=None, validator=_one_of(Check))
    """None for the choice of the Comm."""
    check_indices: bool = attrs.field(default=True, validator=_flag)
    """Whether programs check indices, and other operands that ops refuse for their values."""
    reduce_dtype: torch.dtype | None = attrs.field(default=torch.float32, validator=_wider)
    """The dtype in which pending sums of half precision are held; None for their own."""
    deterministic: bool = attrs.field(default=False, validator=_flag)
    """Whether results are the same to the bit on every mesh and in every layout."""
    max_bytes: int | None = attrs.field(default=None, validator=_count)
    """What any rank may hold at once; None for no bound."""
    as_if: Program | Scale | None = attrs.field(default=None, validator=_program_or_scale)
    """The sizes to choose for, as a function of shapes, or the program of which to repeat the
    choices; None to choose for the sizes at hand."""
    dynamic: Dims | None = attrs.field(default=None, validator=_dims, eq=_as_key)
    """The dims of arguments whose sizes are not known: one recording is for all of them."""
    donate: Any = attrs.field(default=(), eq=_as_key)
    """The arguments that a call frees once it has read them last, by name or position."""
    choice: Choosing = attrs.field(default="cheapest", validator=_one_of(Choosing))
    parameters: frozenset[int] | None = None
    """The numbers of the inputs that are parameters; None to tell them by the arguments."""
    eager: bool = False
    """Whether it is one op of many, as in `call`: results follow operands alone, sums may stay
    pending, and a run on replicated operands is expected and so not warned of."""
    terms: int | None = None
    """Of how many parts the results for which no layout is asked are added up before they are
    reduced; None where each is reduced by itself."""

    @property
    def of_trace(self) -> dict[str, Any]:
        """Those that `trace` takes, as its arguments."""
        others = (
            "on_data_dependent",
            "plain",
            "check",
            "dynamic",
            "donate",
            "parameters",
            "eager",
            "terms",
        )
        return {
            a.name: getattr(self, a.name) for a in attrs.fields(Options) if a.name not in others
        }
