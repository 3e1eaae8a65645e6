"""`rule`: which layouts an op allows along one mesh axis, as rows of placements.

A rule is a generator of rows `(ins, outs)`: a placement for each tensor argument (those of lists
too, in order) and one for each tensor that the op returns. The row of all `R` is implied.

    R                the whole on every rank
    S(d)             any cut of dim d; all the S of a row are the same cut of equally long dims
    Units(d, unit)   contiguous blocks of whole units, as `torch.chunk` cuts the units
    Units(d, unit, n)  the same in each of n blocks of the dim; no row unless a StridedShard has it
    Window(d..)      the blocks of a slice of a dim, or of a padded dim, where those of the dim are
    Entries(d)       as many entries of dim d as ranks, one on each
    Halo(d..)        the part of a dim, with its halo, that each block of another dim is made from
    P                a term of a pending sum (in `ins` also of an average: such a row is linear)
    MAX, MIN..       a term of a pending maximum, minimum or product

Other placements stand for themselves. A row must hold for any blocks of the dims that it does not
cut: so rows of several axes compose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs
import torch

from fdtensor.layouts.blocks import Box, length
from fdtensor.layouts.errors import RuleError
from fdtensor.layouts.placement import (
    Partial,
    Placement,
    Replicate,
    Shard,
)
from fdtensor.layouts.record import Record
from fdtensor.layouts.torch_private import OpOverload, OpOverloadPacket, overload_in, schema_of
from fdtensor.ops.notation.patterns import Entries, Halo, Units, Window

__all__ = [
    "At",
    "Block",
    "Entries",
    "MAX",
    "MIN",
    "Halo",
    "P",
    "PRODUCT",
    "R",
    "Row",
    "Rule",
    "S",
    "Units",
    "Window",
    "rule",
    "rule_of",
]

R = Replicate()
S = Shard
P = Partial("sum")
MAX = Partial("max")
MIN = Partial("min")
PRODUCT = Partial("product")


@attrs.frozen(eq=False)
class Row(Record):
    """The placements of the operands and of the results of an op along one axis."""

    ins: tuple[Placement, ...]
    outs: tuple[Placement, ...]
    exact: bool = False
    """Whether it holds for these cuts of whole dims alone, not for cuts of blocks."""
    contiguous: bool = False
    """Whether its cuts must leave contiguous blocks."""

    def __str__(self) -> str:
        return f"{' '.join(map(str, self.ins))} -> {' '.join(map(str, self.outs))}"


@attrs.frozen(eq=False)
class Block:
    """The block of a full tensor that a rank holds."""

    full: tuple[int, ...]
    _box: Box
    asked: list[bool] = attrs.field(factory=list[bool], init=False)
    """Not empty once a rule has asked where the block lies."""

    @property
    def box(self) -> Box:
        """The indices of each dim, as intervals."""
        self.asked.append(True)
        return self._box

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the block."""
        return tuple([length(part) for part in self._box])

    @property
    def start(self) -> tuple[int, ...]:
        """The first index in each dim; its size where the block is empty."""
        return tuple(
            [part[0][0] if part else n for part, n in zip(self.box, self.full, strict=True)]
        )

    @property
    def stop(self) -> tuple[int, ...]:
        """The index after the last in each dim."""
        return tuple(
            [part[-1][1] if part else n for part, n in zip(self.box, self.full, strict=True)]
        )


@attrs.frozen(eq=False)
class At:
    """The blocks that this rank holds of each tensor of a call."""

    ins: tuple[Block, ...]
    outs: tuple[Block, ...]


@attrs.frozen(eq=False)
class Rule:
    """The rows of an op, and how a rank computes its block."""

    rows: Callable[..., Iterable[Any]]
    sizes: Mapping[str, int]
    """Arguments that are the local shape of an output, by name, with the output's number."""
    local: Callable[..., Any] | None
    """`local(at, *args)`: the block of this rank; by default the op itself on the blocks."""
    contiguous: bool
    """Whether S means contiguous blocks only, since `local` reads where they start."""
    whole: bool
    """Whether `local` is needed also where every rank holds everything."""


_RULES: dict[Any, Rule] = {}

OF_OTHERS: set[Any] = set()
"""The ops that have a rule from outside of this package, which may change unseen."""


def rule(
    *ops: Any,
    sizes: Mapping[str, int] | None = None,
    local: Callable[..., Any] | None = None,
    contiguous: bool = False,
    whole: bool = False,
) -> Callable[[Callable[..., Iterable[Any]]], Callable[..., Iterable[Any]]]:
    """Registers the decorated generator of rows for aten overloads or custom ops.

    It is called with the op's arguments, defaults filled in and dims as the user gave them; a
    tensor comes as a `Full` with `shape`, `dtype` and `ndim`. `sizes` names arguments that are the
    shape of an output; `local(at, *args)` computes a block where that is not the op itself.

    >>> from torch.library import custom_op
    >>> @custom_op("examples::twice", mutates_args=())
    ... def twice(x: torch.Tensor) -> torch.Tensor:
    ...     return x * 2

    >>> @twice.register_fake
    ... def _(x):
    ...     return torch.empty_like(x)

    >>> @rule(torch.ops.examples.twice.default)
    ... def rows(x):
    ...     for d in range(x.ndim):
    ...         yield (Shard(d),), Shard(d)
    ...     yield (Partial("sum"),), Partial("sum")

    >>> mesh = Mesh(x=2)
    >>> print(trace(twice, TensorType((4,), torch.float32, mesh.layout(partial={"x": "sum"}))))
    twice on Mesh(x=2)
      in   a:f32[4]{sum:x}
      b:f32[4@x] = reduce_scatter[axis=x dim=0 reduce_op=sum] a  8 B
      c:f32[4@x] = examples.twice b
      out  c
    1 collective, 8 B received per rank
    """

    if not ops:
        raise RuleError(
            "a rule is of no op.",
            hint="Name the overload: @rule(torch.ops.mylib.scaled.default).",
        )

    def register(rows: Callable[..., Iterable[Any]]) -> Callable[..., Iterable[Any]]:
        if not callable(rows):
            raise RuleError(
                f"{rows!r} is no function that yields rows.",
                hint="Decorate a generator: def rows(x): yield (Shard(0),), Shard(0).",
            )
        new = Rule(rows, dict(sizes or {}), local, contiguous, whole)
        for op in ops:
            for overload in _overloads(op):
                known = _RULES.get(overload)
                if (
                    known is not None
                    and known.rows.__module__ != rows.__module__
                    and _ours(known, new)
                ):
                    raise RuleError(
                        f"{overload} has two rules.",
                        first=known.rows.__module__,
                        second=rows.__module__,
                        hint="Keep one of them.",
                    )
                _keep(overload, new)
        return rows

    return register


def _keep(overload: Any, new: Rule) -> None:
    _RULES[overload] = new
    home = new.rows.__module__ or ""  # None for a function of exec()
    if not home.startswith("fdtensor."):
        OF_OTHERS.add(overload)


def _ours(*rules: Rule) -> bool:
    return all((r.rows.__module__ or "").startswith("fdtensor.ops.rules") for r in rules)


def _overloads(op: Any) -> list[Any]:
    op = overload_in(op)
    if isinstance(op, OpOverloadPacket):
        return [getattr(op, name) for name in op.overloads()]
    if not isinstance(op, OpOverload) and op != "pointwise":
        raise RuleError(
            f"{getattr(op, '__name__', op)} is no op, so it can have no rule.",
            hint="Give an overload such as torch.ops.aten.mm.default, or make the function an op "
            "with torch.library.custom_op.",
        )
    return [op]


def rule_of(op: Any) -> Rule | None:
    """The rule of an op: its own, or that of elementwise ops; None where it has none."""
    known = _RULES.get(op)
    if known is None and torch.Tag.pointwise in op.tags and not schema_of(op).is_mutable:
        return _RULES["pointwise"]
    return known
