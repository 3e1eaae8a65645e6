"""`verify`: runs each row of a rule on blocks and compares with the op on full tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import attrs
import torch

from fdtensor.layouts.dtypes import dtype_name
from fdtensor.layouts.errors import FdtensorError, RuleError
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import Partial, Placement, Replicate
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.layouts.text import Text
from fdtensor.layouts.torch_private import OpOverload, OpOverloadPacket, jit_overload, overload_in
from fdtensor.layouts.words import first_sentence, shown
from fdtensor.ops.graph import Call, Full, Graph, Var, op_by_name, substituted, tensors_of
from fdtensor.ops.lowering import local_graph, lowered
from fdtensor.ops.notation.core import rule_of
from fdtensor.ops.rows import row_sides, rows_of
from fdtensor.ops.rules import Row
from fdtensor.testing.values import gather_full, scatter

__all__ = ["Wrong", "arguments_of", "call_of", "check_row", "overload_of", "verify"]


@attrs.frozen(eq=False, repr=False)
class Wrong:
    """A row that does not hold on a sample, and what came out."""

    op: Any
    row: Row
    sample: str
    found: str

    __reduce__ = op_by_name

    def __str__(self) -> str:
        return f"{self.op}: {self.row} is wrong on {self.sample}: {self.found}"

    def __repr__(self) -> str:
        return f"<{self}>"


def verify(
    op: Any, samples: Iterable[Any], rows: Sequence[Any] | None = None, *, count: int = 4
) -> list[Wrong]:
    """The rows of `op` that are wrong on a sample; none where the rule is right.

    A sample is a tuple of arguments, or `(args, kwargs)`. Rows are by default those of the op's
    rule, over an axis of `count` ranks; pending terms are random splits. A plain function of
    tensors has no rule: give its rows, as a rule yields them.

    >>> fd.testing.verify(torch.ops.aten.relu.default, [(torch.arange(-3.0, 3.0),)])
    []
    >>> rows = [(Shard(0), Shard(0)), (Partial("sum"), Partial("sum"))]
    >>> wrong = fd.testing.verify(torch.relu, [(torch.arange(-3.0, 3.0),)], rows)
    >>> [str(w.row) for w in wrong]
    ['P(sum) -> P(sum)']
    """
    wrong = []
    for sample in samples:
        args, kwargs = arguments_of(sample)
        op = overload_of(op, args, kwargs)
        if rows is None and not isinstance(op, OpOverload):
            raise RuleError(
                f"{op} is a plain function, which has no rule.",
                hint="Give the rows, or make it an op with torch.library.custom_op.",
            )
        if rows is None and rule_of(op) is None:
            raise RuleError(
                f"{op} has no rule that could be verified.",
                hint="Give it one with @fdtensor.rule, or pass the rows; discover(op, sample) "
                "finds them.",
            )
        call, tensors, whole = call_of(op, args, kwargs)
        types = [*(Full(tuple(t.shape), t.dtype) for t in (*tensors, *whole))]
        for row in rows_of(call, types, count) if rows is None else map(_row, rows):
            fault = check_row(call, row, tensors, whole, count)
            if fault is not None:
                wrong.append(Wrong(op, row, _said(call, tensors), fault))
    return wrong


def _row(value: Any) -> Row:
    """A row as rules yield it: `((S(0), R), S(0))`."""
    if isinstance(value, Row):
        return value
    if isinstance(value, (tuple, list)) and len(value) == 2:
        ins, outs = row_sides(value)
        if all(isinstance(p, Placement) for p in (*ins, *outs)):
            return Row(tuple(ins), tuple(outs))
    raise RuleError(
        f"{shown(value)} is not a row.",
        hint="Write ((S(0), R), S(0)): placements of operands, and of results, as a rule yields.",
    )


def _said(call: Call, tensors: Sequence[torch.Tensor]) -> str:
    """The arguments of a call, with the type of each tensor."""
    types = dict(
        enumerate(f"{dtype_name(t.dtype)}[{','.join(map(str, t.shape))}]" for t in tensors)
    )
    args, kwargs = substituted((call.args, call.kwargs), lambda v: Text(types[v.index]))
    texts = [*map(repr, args), *(f"{name}={value!r}" for name, value in kwargs)]
    return f"({', '.join(texts)})"


def arguments_of(sample: Any) -> tuple[Any, dict[str, Any]]:
    """The arguments of a sample and those by name: a tuple of arguments, or `(args, kwargs)`."""
    if not isinstance(sample, (tuple, list)):
        raise RuleError(
            f"a sample is {shown(sample)}, which is no tuple of arguments.",
            hint="Write the arguments of a call in a tuple: (x,) or (x, y), or (args, kwargs).",
        )
    args: tuple[Any, ...] = tuple(sample)
    if len(args) == 2 and isinstance(args[0], tuple) and isinstance(args[1], dict):
        return args
    return args, {}


def overload_of(op: Any, args: Any, kwargs: Any) -> Any:
    """The overload that an op means for these arguments; a plain function as it is."""
    op = overload_in(op)
    if isinstance(op, OpOverloadPacket):
        return getattr(op, jit_overload(op, args, kwargs) or "default")
    return op


def call_of(op: Any, args: Any, kwargs: Any) -> tuple[Call, list[torch.Tensor], list[torch.Tensor]]:
    """A call of `op`, the tensors that it takes and those that it returns."""
    tensors: list[torch.Tensor] = []

    def numbered(tree: Any) -> Any:
        if isinstance(tree, torch.Tensor):
            tensors.append(tree)
            return Var(len(tensors) - 1)
        if isinstance(tree, (tuple, list)):
            return tuple([numbered(entry) for entry in tree])
        return tree

    frozen = numbered(tuple(args)), tuple((k, numbered(v)) for k, v in kwargs.items())
    try:
        output = op(*args, **kwargs)
    except (TypeError, RuntimeError) as error:
        if isinstance(error, FdtensorError):
            raise
        raise RuleError(
            f"{op} does not take this sample: {first_sentence(error)}.",
            hint="Give it the arguments of a call that works: plain tensors, with values.",
        ) from error
    results = tensors_of(output)
    outs = tuple(Var(len(tensors) + i) for i in range(len(results)))
    return Call(op, *frozen, outs), tensors, results


def check_row(
    call: Call,
    row: Row,
    tensors: Sequence[torch.Tensor],
    whole: Sequence[torch.Tensor],
    count: int,
    seed: int = 0,
) -> str | None:
    """The fault of a call that runs on blocks as a row says, or None."""
    mesh = Mesh(x=count)

    def typed(t: torch.Tensor, placement: Any) -> TensorType:
        return TensorType(tuple(t.shape), t.dtype, Layout(mesh, [placement]))

    try:
        ins = [typed(t, p) for t, p in zip(tensors, row.ins, strict=True)]
        outs = [typed(t, p) for t, p in zip(whole, row.outs, strict=True)]
        blocks_of = [
            scatter(t, type, seed + i) for i, (t, type) in enumerate(zip(tensors, ins, strict=True))
        ]
        results_of = []
        for rank in range(count):
            go = local_graph(_of_rank(call, ins, outs, rank))
            results_of.append(go(*(blocks[rank] for blocks in blocks_of)))
    except (
        FdtensorError,
        RuntimeError,
        AssertionError,
        IndexError,
        TypeError,
        ValueError,
    ) as error:
        return f"{type(error).__name__}: {error}"
    for i, (full, type_) in enumerate(zip(whole, outs, strict=True)):
        blocks = tuple(results[i] for results in results_of)
        fault = _compare(blocks, full, type_)
        if fault:
            return f"output {i}: {fault}"
    return None


def _of_rank(call: Call, ins: Sequence[TensorType], outs: Sequence[TensorType], rank: int) -> Graph:
    """The function that a rank runs; of a plain function, the function itself on its blocks."""
    if isinstance(call.op, OpOverload):
        return lowered(call, ins, outs, (rank,))
    inputs = tuple(map(Var, range(len(ins))))
    read = tuple(v for v in call.outs if v is not None)
    return Graph(inputs, (), (call,), read, tuple(Full(t.shape, t.dtype) for t in (*ins, *outs)))


def _compare(blocks: tuple[torch.Tensor, ...], full: torch.Tensor, type: TensorType) -> str | None:
    for rank, local in enumerate(blocks):
        if tuple(local.shape) != type.local_shape(rank) or local.dtype != type.dtype:
            return (
                f"rank {rank} holds {local.dtype}{list(local.shape)}, "
                f"but its block is {type.dtype}{list(type.local_shape(rank))}"
            )
    if isinstance(type.layout.placements[0], Partial):
        joined = gather_full(blocks, type)
    else:
        joined = torch.zeros_like(full)
        for rank, local in enumerate(blocks):
            index = tuple(torch.tensor(list(i), dtype=torch.int64) for i in type.index(rank))
            joined[torch.meshgrid(*index, indexing="ij") if index else ()] = local
            if isinstance(type.layout.placements[0], Replicate) and not _close(local, full):
                return f"rank {rank}: {_worst(local, full)}"
    return None if _close(joined, full) else _worst(joined, full)


def _worst(actual: torch.Tensor, wanted: torch.Tensor) -> str:
    """The element that is the farthest off, and how many are."""
    off = ~torch.isclose(actual, wanted, rtol=1e-4, atol=1e-5, equal_nan=True)
    wide = torch.complex128 if actual.dtype.is_complex else torch.float64
    gap = (actual.to(wide) - wanted.to(wide)).abs().nan_to_num(torch.inf)
    gap = torch.where(off, gap, -1)  # what agrees may be infinite
    place = tuple(int(i) for i in torch.unravel_index(gap.argmax(), gap.shape))
    where = f" at {list(place)}" if place else ""
    return (
        f"{actual[place].item():.6g} instead of {wanted[place].item():.6g}{where}; "
        f"{int(off.sum())} of {off.numel()} elements are wrong"
    )


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-4, atol=1e-5, equal_nan=True)
