"""`rows_of`: the rows of one call, by its rule, for its arguments and an axis."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import attrs

from fdtensor.layouts.dtypes import reducible
from fdtensor.layouts.errors import RuleError
from fdtensor.layouts.placement import (
    Cut,
    Partial,
    Placement,
    Ragged,
    Replicate,
    Shard,
    Spans,
    StridedShard,
)
from fdtensor.layouts.remembered import remembered
from fdtensor.layouts.torch_private import schema_of
from fdtensor.ops.graph import Call, Full, Var, by_name, substituted
from fdtensor.ops.notation.core import Entries, Halo, P, R, Row, Units, Window, rule_of
from fdtensor.ops.notation.dtypes import keeps_sums
from fdtensor.ops.notation.reshape import RESHAPES, recut
from fdtensor.ops.precision import ROUNDED

__all__ = ["CallKey", "arguments", "kinds_of", "recut_rows", "row_sides", "rows_of", "variants"]

FOLLOWED = 4
"""How many new and how many old kinds of blocks are followed through a call."""


def arguments(call: Call, of: Callable[[Var], Any]) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a call, defaults filled in, with `of(v)` for each value.

    Those that the schema takes by keyword only come by keyword.
    """
    named = dict(call.kwargs)
    args, kwargs = [], {}
    for i, argument in enumerate(schema_of(call.op).arguments):
        if i < len(call.args):
            value = substituted(call.args[i], of)
        elif argument.name in named:
            value = substituted(named[argument.name], of)
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
    return _rows(CallKey.of(call), ins, outs, count)


class CallKey:
    """A call as a key: 1, 1.0 and True differ, as do 0.0 and -0.0; nan equals itself."""

    __slots__ = ("args", "hash", "kwargs", "op", "rule", "text", "width")

    @staticmethod
    @remembered(65536)
    def of(call: Call) -> CallKey:
        """The key of a call, in which its values are numbered in order."""
        numbers = iter(range(len(call.ins)))
        args, kwargs = substituted((call.args, call.kwargs), lambda _: Var(next(numbers)))
        return CallKey(call.op, args, kwargs, len(call.outs))

    def __init__(self, op: Any, args: Any, kwargs: Any, width: int) -> None:
        self.op, self.args, self.kwargs, self.width = op, args, kwargs, width
        self.text = repr((args, kwargs))
        self.rule = rule_of(op)  # a rule registered later makes another key
        self.hash = hash((op, self.text, width))

    def __reduce__(self) -> tuple[Any, ...]:
        return by_name(CallKey, op=self.op, args=self.args, kwargs=self.kwargs, width=self.width)

    def __hash__(self) -> int:
        return self.hash

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, CallKey)
            and self.rule is other.rule
            and (self.op, self.text, self.width) == (other.op, other.text, other.width)
        )


@remembered(65536)
def _rows(
    key: CallKey, ins: tuple[Full, ...], outs: tuple[Full | None, ...], count: int
) -> tuple[Row, ...]:
    replicated = Row((R,) * len(ins), (R,) * len(outs))
    rule = rule_of(key.op)
    if rule is None:
        return (replicated,)
    call = Call(key.op, key.args, key.kwargs, (None,) * key.width)
    args, kwargs = arguments(call, lambda v: ins[v.index])
    rows = [replicated]
    for pattern in rule.rows(*args, **kwargs):
        row = _row(key.op, pattern, ins, outs, count, rule.contiguous)
        if row is None:
            continue
        pairs = zip((*row.ins, *row.outs), (*ins, *outs), strict=True)
        if all(
            f is None or not isinstance(p, Partial) or reducible(f.dtype, p.reduce_op)
            for p, f in pairs
        ) and (key.op is ROUNDED or _linear(row, ins, outs)):
            rows.append(row)
    return tuple(dict.fromkeys(rows))


def _linear(row: Row, ins: Sequence[Full], outs: Sequence[Full | None]) -> bool:
    """Whether pending sums pass into dtypes in which their terms add up to the same."""
    before = {
        f.dtype for p, f in zip(row.ins, ins, strict=True) if p == P and not f.dtype.is_complex
    }
    after = {f.dtype for p, f in zip(row.outs, outs, strict=True) if p == P and f is not None}
    return all(keeps_sums(a, b) for a in before for b in after)


def _row(
    op: Any,
    row: Any,
    ins: Sequence[Full],
    outs: Sequence[Full | None],
    count: int,
    contiguous: bool,
) -> Row | None:
    """The row that a rule yielded, with its units resolved and its dims checked."""
    before, after = row_sides(row)
    if len(before) != len(ins) or len(after) != len(outs):
        raise RuleError(
            f"a row of the rule for {op} has {len(before)} -> {len(after)} placements, but the op "
            f"has {len(ins)} -> {len(outs)} tensors.",
            row=row,
            hint="Yield one placement for each tensor, those in lists too.",
        )
    special = (Units, Window, Halo, Entries, Ragged, StridedShard, Spans)
    exact = any(isinstance(p, special) for p in (*before, *after))
    resolved = functools.partial(_resolved, op, row, count)
    placed = tuple(map(resolved, before, ins)), tuple(map(resolved, after, outs))
    if None in placed[0] or None in placed[1]:  # there is no such placement on these sizes
        return None
    return Row(*placed, exact, contiguous)


def _resolved(op: Any, row: Any, count: int, pattern: Any, full: Full | None) -> Any:
    """The placement that an entry of a row stands for on a tensor; None where there is none."""
    if full is None:  # an output that no call reads has no type
        return pattern if isinstance(pattern, Partial) else R
    placed = pattern
    if isinstance(pattern, (Units, Window, Halo, Entries)):
        placed = pattern.of(full.shape[pattern.dim], count)
        if placed is None:
            return None
    if not isinstance(placed, (Replicate, Partial)) and placed.dim >= full.ndim:
        raise RuleError(
            f"a row of the rule for {op} cuts dim {placed.dim} of a tensor that has "
            f"{full.ndim} dims.",
            row=row,
            hint="Count dims from the front, and skip those that are not there.",
        )
    return placed


def kinds_of(places: Iterable[Placement]) -> list[Placement]:
    """The placements that are neither R nor S, of whose cuts only a few are followed.

    Each slice of a cut dim may add a kind of blocks, and pairs of kinds are priced: of many, the
    newest, which come first, and the oldest are enough.
    """
    others = [p for p in places if not isinstance(p, (Replicate, Shard))]
    cuts = [p for p in others if isinstance(p, Cut)]
    dropped = set(cuts[FOLLOWED:-FOLLOWED])
    return [p for p in others if p not in dropped]


def variants(row: Row, kinds: Iterable[Placement], shapes: Sequence[Full | None]) -> Iterator[Row]:
    """The row with cuts of other kinds in place of its S, or averages in place of its P."""
    sizes = [
        full.shape[p.dim]
        for p, full in zip((*row.ins, *row.outs), shapes, strict=True)
        if isinstance(p, Shard) and full is not None
    ]
    for kind in kinds:
        match kind:
            case Ragged(_, blocks) if sizes and {sum(blocks)} == set(sizes) and not row.exact:
                yield _recut(row, kind)
            case StridedShard() if len(set(sizes)) == 1 and not (row.exact or row.contiguous):
                yield _recut(row, kind)
            case Partial("avg") if P in row.ins and not any(isinstance(p, Cut) for p in row.ins):
                swap = {P: kind}
                ins = tuple([swap.get(p, p) for p in row.ins])  # type: ignore[call-overload]
                outs = tuple([swap.get(p, p) for p in row.outs])  # type: ignore[call-overload]
                yield Row(ins, outs, row.exact, row.contiguous)


def recut_rows(
    call: Call, types: Sequence[Full], count: int, kinds: Iterable[Placement]
) -> Iterator[Row]:
    """The rows of an op that takes its operand as it is cut, and gives blocks of another kind.

    These are reshapes of dims that are cut in each of several blocks, and slices and paddings of
    dims that are cut in blocks of any sizes.
    """
    outs = tuple(None if v is None else types[v.index] for v in call.outs)
    if len(call.ins) != 1 or not outs:
        return
    full = types[call.ins[0].index]
    for kind in kinds:
        match kind:
            case StridedShard(d, blocks) if call.op in RESHAPES and outs[0] is not None:
                for pattern in recut(full.shape, outs[0].shape, d, blocks):
                    row = _row(call.op, pattern, (full,), outs, count, contiguous=False)
                    if row is not None:
                        yield row
            case Ragged(d, sizes) if d < len(full.shape) and full.shape[d] == sum(sizes):
                yield from _cut_on(CallKey.of(call), full, outs, kind)


@remembered(65536)
def _cut_on(
    key: CallKey, full: Full, outs: tuple[Full | None, ...], kind: Ragged
) -> tuple[Row, ...]:
    """The rows that cut windows of a dim where blocks of the dim, of these sizes, end."""
    rule = rule_of(key.op)
    if rule is None:
        return ()
    call = Call(key.op, key.args, key.kwargs, (None,) * key.width)
    args, kwargs = arguments(call, lambda _: full)
    rows: list[Row] = []
    for (before, *_), after in map(row_sides, rule.rows(*args, **kwargs)):
        if before == Shard(kind.dim) and any(isinstance(w, Window) for w in after):
            placed = [
                w.of(out.shape[w.dim], len(kind.sizes), kind.sizes)
                if isinstance(w, Window) and out is not None
                else R
                for w, out in zip(after, outs, strict=True)
            ]
            rows.append(Row((kind,), tuple(placed), True, rule.contiguous))
    return tuple(rows)


def row_sides(row: Any) -> tuple[Sequence[Any], Sequence[Any]]:
    """The placements of operands and of results, of a row as a rule yields it."""
    before, after = row
    return (
        before if isinstance(before, (tuple, list)) else (before,),
        after if isinstance(after, (tuple, list)) else (after,),
    )


@remembered(65536)
def _recut(row: Row, kind: Ragged | StridedShard) -> Row:
    """The row with cuts of this kind in place of its S."""

    def cut(p: Placement) -> Placement:
        return attrs.evolve(kind, dim=p.dim) if isinstance(p, Shard) else p

    return Row(tuple(map(cut, row.ins)), tuple(map(cut, row.outs)), contiguous=row.contiguous)
