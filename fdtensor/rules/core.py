"""`rule`: which layouts an op allows along one mesh axis, as rows of placements.

A rule is a generator of rows `(ins, outs)`: a placement for each tensor argument (those of lists
too, in order) and one for each tensor that the op returns. The row of all `R` needs no mention.

    R            the whole on every rank
    S(d)         any cut of dim d; all the S of a row are the same cut of equally long dims
    U(d, unit)   contiguous blocks of whole units, as `torch.chunk` cuts the units
    Window(d..)  what the blocks of a dim leave of a slice of it, or gain by padding
    P            a term of a pending sum (in `ins` also of an average: such a row is linear)

Other placements stand for themselves. A row must hold for any blocks of the dims that it leaves
alone: that is what lets rows of several axes be combined.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch

from fdtensor.blocks import Box, chunk, length
from fdtensor.dtypes import reducible
from fdtensor.errors import RuleError
from fdtensor.graph import Call, Full, Var, substituted
from fdtensor.placement import Partial, Placement, Ragged, Replicate, Shard, StridedShard
from fdtensor.record import Record

__all__ = [
    "At",
    "Block",
    "Exact",
    "P",
    "R",
    "Row",
    "Rule",
    "S",
    "U",
    "Window",
    "arguments",
    "rows_of",
    "rule",
    "rule_of",
]

R = Replicate()
S = Shard
P = Partial("sum")


@attrs.frozen(eq=False)
class U(Record):
    """Contiguous blocks of dim `dim` in whole units of `unit` elements."""

    dim: int
    unit: int

    def of(self, size: int, count: int) -> Placement:
        """The placement that this is on a dim of `size` over an axis of `count` ranks."""
        units = -(-size // self.unit)
        ends = [chunk(units, count, i) for i in range(count)]
        sizes = [min(size, b * self.unit) - min(size, a * self.unit) for a, b in ends]
        return _contiguous(self.dim, sizes)


@attrs.frozen(eq=False)
class Window(Record):
    """Positions `range(start, stop, step)` of a dim of `size` that is cut as S, each where it was.

    They are dim `dim` of this tensor. Positions before the dim are with its first block, those
    after it with the last.
    """

    dim: int
    size: int
    start: int
    stop: int
    step: int = 1

    def of(self, size: int, count: int) -> Placement:
        """The placement that this is on a dim of `size` over an axis of `count` ranks."""
        ends = [chunk(self.size, count, i)[1] for i in range(count - 1)]
        passed = [min(size, max(0, -(-(end - self.start) // self.step))) for end in ends]
        sizes = [b - a for a, b in zip([0, *passed], [*passed, size])]
        return _contiguous(self.dim, sizes)


def _contiguous(dim: int, sizes: Sequence[int]) -> Placement:
    """The placement of contiguous blocks of these sizes."""
    count = len(sizes)
    plain = [b - a for a, b in (chunk(sum(sizes), count, i) for i in range(count))]
    return Shard(dim) if list(sizes) == plain else Ragged(dim, tuple(sizes))


@attrs.frozen(eq=False)
class Row(Record):
    """What an op does along one axis: the placements that it takes and those that it gives."""

    ins: tuple[Placement, ...]
    outs: tuple[Placement, ...]
    exact: bool = False
    """Whether it holds for just these cuts of the whole dims, not for cuts of blocks."""
    contiguous: bool = False
    """Whether its cuts must leave contiguous blocks."""

    def __str__(self) -> str:
        return f"{' '.join(map(str, self.ins))} -> {' '.join(map(str, self.outs))}"


@attrs.frozen(eq=False)
class Block:
    """Which part of a full tensor a rank holds."""

    full: tuple[int, ...]
    box: Box

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the block."""
        return tuple([length(held) for held in self.box])

    @property
    def start(self) -> tuple[int, ...]:
        """The first index in each dim; its size where the block is empty."""
        return tuple([h[0][0] if h else n for h, n in zip(self.box, self.full)])

    @property
    def stop(self) -> tuple[int, ...]:
        """The index after the last in each dim."""
        return tuple([h[-1][1] if h else n for h, n in zip(self.box, self.full)])


@attrs.frozen(eq=False)
class At:
    """Where a local computation runs: the blocks that this rank holds of each tensor."""

    ins: tuple[Block, ...]
    outs: tuple[Block, ...]


@attrs.frozen(eq=False)
class Rule:
    """The rows of an op and how a rank computes its block."""

    rows: Callable[..., Iterable[Any]]
    sizes: Mapping[str, int]
    """Arguments that are the local shape of an output, by name, with the output's number."""
    local: Callable[..., Any] | None
    """`local(at, *args)`: the block of this rank; by default the op itself on the blocks."""
    contiguous: bool
    """Whether S means contiguous blocks only, since `local` asks where they start."""
    whole: bool
    """Whether `local` is needed also where every rank holds everything."""


_RULES: dict[Any, Rule] = {}


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
    """

    def register(rows: Callable[..., Iterable[Any]]) -> Callable[..., Iterable[Any]]:
        made = Rule(rows, dict(sizes or {}), local, contiguous, whole)
        for op in ops:
            for overload in _overloads(op):
                known = _RULES.get(overload)
                if (
                    known is not None
                    and known.rows.__module__ != rows.__module__
                    and _ours(known, made)
                ):
                    raise RuleError(
                        f"{overload} has two rules.",
                        first=known.rows.__module__,
                        second=rows.__module__,
                        hint="Keep one of them.",
                    )
                _RULES[overload] = made
        return rows

    return register


def _ours(*rules: Rule) -> bool:
    return all(r.rows.__module__.startswith(__package__ or "fdtensor.rules") for r in rules)


def _overloads(op: Any) -> list[Any]:
    if isinstance(op, torch._ops.OpOverloadPacket):
        return [getattr(op, name) for name in op.overloads()]
    return [op]


def rule_of(op: Any) -> Rule | None:
    """The rule of an op: its own, or that of elementwise ops; None where it has none."""
    found = _RULES.get(op)
    if found is None and torch.Tag.pointwise in op.tags and not op._schema.is_mutable:
        return _RULES["pointwise"]
    return found


def arguments(call: Call, of: Callable[[Var], Any]) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a call, defaults filled in, with `of(v)` for each value.

    Those that the schema takes by keyword only come by keyword.
    """
    given = dict(call.kwargs)
    args, kwargs = [], {}
    for i, argument in enumerate(call.op._schema.arguments):
        if i < len(call.args):
            value = substituted(call.args[i], of)
        elif argument.name in given:
            value = substituted(given[argument.name], of)
        else:
            value = argument.default_value
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return args, kwargs


def rows_of(call: Call, types: Sequence[Full], count: int) -> tuple[Row, ...]:
    """The rows of a call over an axis of `count` ranks, that of all `R` first."""
    ins = tuple(types[v.index] for v in call.ins)
    outs = tuple(None if v is None else types[v.index] for v in call.outs)
    return _rows(Exact.of(call), ins, outs, count)


class Exact:
    """A call as a key: 1, 1.0 and True differ, as do 0.0 and -0.0; nan equals itself."""

    __slots__ = ("args", "hash", "kwargs", "op", "rule", "text", "width")

    @staticmethod
    @functools.lru_cache(maxsize=65536)
    def of(call: Call) -> Exact:
        """What a call is, but for the names of its values: they are numbered in order."""
        numbers = iter(range(len(call.ins)))
        args, kwargs = substituted((call.args, call.kwargs), lambda v: Var(next(numbers)))
        return Exact(call.op, args, kwargs, len(call.outs))

    def __init__(self, op: Any, args: Any, kwargs: Any, width: int) -> None:
        self.op, self.args, self.kwargs, self.width = op, args, kwargs, width
        self.text = repr((args, kwargs))
        self.rule = rule_of(op)  # a rule that is given later makes another key
        self.hash = hash((op, self.text, width))

    def __hash__(self) -> int:
        return self.hash

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Exact)
            and self.rule is other.rule
            and (self.op, self.text, self.width) == (other.op, other.text, other.width)
        )


@functools.lru_cache(maxsize=65536)
def _rows(
    key: Exact, ins: tuple[Full, ...], outs: tuple[Full | None, ...], count: int
) -> tuple[Row, ...]:
    replicated = Row((R,) * len(ins), (R,) * len(outs))
    found = rule_of(key.op)
    if found is None:
        return (replicated,)
    call = Call(key.op, key.args, key.kwargs, (None,) * key.width)
    args, kwargs = arguments(call, lambda v: ins[v.index])
    rows = [replicated]
    for given in found.rows(*args, **kwargs):
        row = _row(key.op, given, ins, outs, count, found.contiguous)
        pairs = zip((*row.ins, *row.outs), (*ins, *outs))
        if all(
            f is None or not isinstance(p, Partial) or reducible(f.dtype, p.reduce_op)
            for p, f in pairs
        ):
            rows.append(row)
    return tuple(dict.fromkeys(rows))


def _row(
    op: Any,
    row: Any,
    ins: Sequence[Full],
    outs: Sequence[Full | None],
    count: int,
    contiguous: bool,
) -> Row:
    """A row as a rule wrote it, with its units resolved and its dims checked."""
    before, after = row
    after = after if isinstance(after, tuple) else (after,) * 1
    if len(before) != len(ins) or len(after) != len(outs):
        raise RuleError(
            f"a row of the rule for {op} has {len(before)} -> {len(after)} placements, but the op "
            f"has {len(ins)} -> {len(outs)} tensors.",
            row=row,
            hint="Yield one placement for each tensor, those in lists too.",
        )
    exact = any(isinstance(p, (U, Window, Ragged, StridedShard)) for p in (*before, *after))

    def resolved(pattern: Any, full: Full | None) -> Placement:
        if full is None:  # an output that nobody reads has no type
            return pattern if isinstance(pattern, Partial) else R
        placed = pattern
        if isinstance(pattern, (U, Window)):
            placed = pattern.of(full.shape[pattern.dim], count)
        if not isinstance(placed, (Replicate, Partial)) and placed.dim >= full.ndim:
            raise RuleError(
                f"a row of the rule for {op} cuts dim {placed.dim} of a tensor that has "
                f"{full.ndim} dims.",
                row=row,
                hint="Count dims from the front, and skip those that are not there.",
            )
        return placed

    placed = tuple(map(resolved, before, ins)), tuple(map(resolved, after, outs))
    return Row(*placed, exact, contiguous)


def variants(row: Row, kinds: Iterable[Placement], shapes: Sequence[Full | None]) -> Iterator[Row]:
    """The row with other kinds of cuts in place of its S, or other reductions in place of its P."""
    sizes = [
        full.shape[p.dim]
        for p, full in zip((*row.ins, *row.outs), shapes)
        if isinstance(p, Shard) and full is not None
    ]
    for kind in kinds:
        match kind:
            case Ragged(_, blocks) if sizes and {sum(blocks)} == set(sizes) and not row.exact:
                yield _recut(row, lambda p, k=kind: Ragged(p.dim, k.sizes))
            case StridedShard(_, factor) if len(set(sizes)) == 1 and not (
                row.exact or row.contiguous
            ):
                yield _recut(row, lambda p, f=factor: StridedShard(p.dim, f))
            case Partial("avg") if P in row.ins and not any(map(_is_cut, row.ins)):
                swap = {P: kind}
                ins = tuple([swap.get(p, p) for p in row.ins])  # type: ignore[call-overload]
                outs = tuple([swap.get(p, p) for p in row.outs])  # type: ignore[call-overload]
                yield Row(ins, outs, row.exact, row.contiguous)


def _is_cut(p: Placement) -> bool:
    return isinstance(p, (Shard, StridedShard, Ragged))


def _recut(row: Row, of: Callable[[Shard], Placement]) -> Row:
    return Row(
        tuple(of(p) if isinstance(p, Shard) else p for p in row.ins),
        tuple(of(p) if isinstance(p, Shard) else p for p in row.outs),
        contiguous=row.contiguous,
    )
