"""`lowered`: what one rank computes for a call, as aten calls on its blocks."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from fdtensor.layouts.mesh import Coord
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.ops.graph import Call, Full, Graph, Var, substituted, tensors_of
from fdtensor.ops.notation.core import At, Block, rule_of
from fdtensor.ops.recorder import record
from fdtensor.ops.rows import Exact, arguments

__all__ = ["local_graph", "lowered"]

aten = torch.ops.aten


def lowered(
    call: Call,
    ins: Sequence[TensorType],
    outs: Sequence[TensorType | None],
    coord: Coord,
    device: str = "cpu",
) -> Graph:
    """The calls that the rank at `coord` makes on its blocks for `call` on full tensors.

    A graph from the blocks of the inputs to those of the outputs that are read.
    """
    before = tuple((t.shape, t.box(coord)) for t in ins)
    after = tuple(None if t is None else (t.shape, t.box(coord)) for t in outs)
    dtypes = tuple(t.dtype for t in ins), tuple(t.dtype for t in outs if t is not None)
    return _lowered(Exact.of(call), before, after, dtypes, device)


@functools.lru_cache(maxsize=65536)
def _lowered(key: Exact, before: Any, after: Any, dtypes: Any, device: str) -> Graph:
    ins = tuple(Block(*b) for b in before)
    outs = tuple(None if a is None else Block(*a) for a in after)
    fulls = [Full(b.shape, dtype) for b, dtype in zip(ins, dtypes[0], strict=True)]
    kept = [b for b in outs if b is not None]
    results = [Full(b.shape, dtype) for b, dtype in zip(kept, dtypes[1], strict=True)]
    call = Call(key.op, key.args, key.kwargs, tuple(_numbered(outs, len(ins))))
    found = rule_of(key.op)
    whole = all(b.shape == b.full for b in (*ins, *kept))
    if found is not None and found.local is not None and (found.whole or not whole):
        at = At(ins, tuple(b if b is not None else Block((), ()) for b in outs))
        return _recorded(call, found.local, at, fulls, outs, device)
    args, kwargs = call.args, call.kwargs
    if not whole and found is not None and found.sizes:
        args, kwargs = _resized(call, found.sizes, outs)
    inputs = tuple(Var(i) for i in range(len(ins)))
    read = tuple(v for v in call.outs if v is not None)
    return Graph(inputs, (), (Call(key.op, args, kwargs, call.outs),), read, (*fulls, *results))


def _numbered(outs: Sequence[Block | None], start: int) -> list[Var | None]:
    made: list[Var | None] = []
    for block in outs:
        made.append(None if block is None else Var(start))
        start += block is not None
    return made


def _resized(call: Call, sizes: Any, outs: Sequence[Block | None]) -> tuple[Any, Any]:
    """The arguments of a call with those that are shapes replaced by the shapes of blocks."""
    args, kwargs = arguments(call, lambda v: v)
    names = [a.name for a in call.op._schema.arguments]
    for name, number in sizes.items():
        block = outs[number]
        if block is not None:
            args[names.index(name)] = block.shape
    return tuple(args), tuple(kwargs.items())


def _recorded(
    call: Call,
    local: Any,
    at: At,
    fulls: Sequence[Full],
    outs: Sequence[Block | None],
    device: str,
) -> Graph:
    """What a rule's `local` does on these blocks."""

    def body(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        args, kwargs = arguments(call, lambda v: tensors[v.index])
        made = local(at, *_lists(args), **kwargs)
        return [t for t, block in zip(tensors_of(made), outs, strict=True) if block is not None]

    return record(body, fulls, device=device)


def _lists(args: Sequence[Any]) -> list[Any]:
    return [list(a) if isinstance(a, tuple) else a for a in args]


def local_graph(graph: Graph) -> Any:
    """A Python function of tensors that runs a graph, for tests and checks."""

    def go(*tensors: torch.Tensor) -> list[torch.Tensor]:
        env: dict[Var, Any] = dict(zip(graph.inputs, tensors, strict=True))
        env.update(dict(graph.constants))
        for call in graph.calls:
            args, kwargs = substituted((call.args, call.kwargs), env.__getitem__)
            made = call.op(*_lists(args), **dict(kwargs))
            env.update(
                (v, t) for v, t in zip(call.outs, tensors_of(made), strict=True) if v is not None
            )
        return [env[v] for v in graph.outs]

    return go
