"""`Graph`: a plain torch function as a list of aten calls on full tensors, before any layout."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from math import prod
from operator import attrgetter
from typing import Any

import attrs
import torch

from fdtensor.layouts.errors import TraceError
from fdtensor.layouts.record import Record
from fdtensor.layouts.torch_private import OpOverload, check_schema, schema_of
from fdtensor.ops.sources import Source

__all__ = [
    "Call",
    "Full",
    "Graph",
    "Var",
    "gives_view",
    "is_view",
    "op_by_name",
    "op_named",
    "pruned",
    "substituted",
    "tensors_in",
    "tensors_of",
]


@attrs.frozen(eq=False)
class Var(Record):
    """The value number `index` of a graph or program."""

    index: int

    def __str__(self) -> str:
        return name_of(self.index)


@attrs.frozen(eq=False)
class Full(Record):
    """The shape and dtype of a full tensor: all of it that a rule may read."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def ndim(self) -> int:
        """The number of its dims."""
        return len(self.shape)

    @property
    def numel(self) -> int:
        """The number of its elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The number of its bytes."""
        return self.numel * self.dtype.itemsize


@attrs.frozen(eq=False)
class Call:
    """One aten op on full tensors; `args` and `kwargs` hold a `Var` where the op takes a tensor."""

    op: OpOverload
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    outs: tuple[Var | None, ...]
    """One for each tensor that the op returns, lists flattened; None where no call reads it."""
    mark: Any = None
    """The result of the recorder's `mark()` when the call was made: where it comes from."""

    ins: tuple[Var, ...] = attrs.field(init=False)
    """The tensors it takes, in order, those of lists too."""

    def __attrs_post_init__(self) -> None:
        ins = tuple(tensors_in((self.args, self.kwargs)))
        object.__setattr__(self, "ins", ins)  # computed once: it is read very often

    def __reduce__(self) -> tuple[Any, ...]:
        known = self.mark if isinstance(self.mark, Source) else None  # others are not pickled
        return op_by_name(attrs.evolve(self, mark=known))


def op_by_name(self: Any) -> tuple[Any, ...]:
    """The `__reduce__` of a record with ops of torch among its fields, which pickle cannot take."""
    fields = [a.name for a in attrs.fields(type(self)) if a.init]
    return by_name(type(self), **{name: getattr(self, name) for name in fields})


def by_name(kind: Callable[..., Any], **values: Any) -> tuple[Any, ...]:
    """The `__reduce__` of an object that `kind` makes of these values, with ops by their names."""
    return _rebuilt, (kind, list(values), _replaced(tuple(values.values()), _named))


def _rebuilt(kind: Callable[..., Any], fields: Sequence[str], values: tuple[Any, ...]) -> Any:
    return kind(**dict(zip(fields, _replaced(values, _resolved), strict=True)))


@attrs.frozen
class _Name:
    """A name, pickled in place of an op, or of a memory format, which old protocols do not take."""

    text: str


def _named(value: Any) -> Any:
    if isinstance(value, OpOverload):
        return _Name(value.name())
    return _Name(str(value)) if isinstance(value, torch.memory_format) else value


def _resolved(value: Any) -> Any:
    if not isinstance(value, _Name):
        return value
    kind, _, name = value.text.partition(".")
    return getattr(torch, name) if kind == "torch" else op_named(value.text)


def _replaced(tree: Any, of: Callable[[Any], Any]) -> Any:
    if isinstance(tree, tuple):
        return tuple([_replaced(entry, of) for entry in tree])
    return of(tree)


def op_named(name: str) -> OpOverload:
    """The op called `aten::mm` or `aten::add.Tensor`; raises `TraceError` where there is none."""
    match = re.fullmatch(r"(\w+)::(\w+)(?:\.(\w+))?", name, re.ASCII)
    try:
        packet, overload = (f"{match[1]}::{match[2]}", match[3] or "") if match else ("", "")
        check_schema(packet, overload)
    except RuntimeError:
        raise TraceError(
            f"there is no op called {name!r}.",
            hint="Import what registers it, as it was when the program was traced.",
        ) from None
    return attrgetter(f"{packet.replace('::', '.')}.{overload or 'default'}")(torch.ops)


@attrs.frozen(eq=False)
class Graph:
    """A function of full tensors: `outs` after `calls`, from `inputs` and `constants`."""

    inputs: tuple[Var, ...]
    constants: tuple[tuple[Var, torch.Tensor], ...]
    """Tensors that the function closes over."""
    calls: tuple[Call, ...]
    outs: tuple[Var, ...]
    types: tuple[Full, ...]
    """By the index of the value."""

    def __str__(self) -> str:
        def typed(v: Var | None) -> str:
            return "_" if v is None else f"{v}:{list(self.types[v.index].shape)}"

        lines = [f"in {' '.join(map(typed, self.inputs))}"]
        for call in self.calls:
            outs = " ".join(map(typed, call.outs))
            lines.append(f"{outs} = {call.op} {argument_text(call.args, call.kwargs)}")
        return "\n".join([*lines, f"out {' '.join(map(str, self.outs))}"])


def is_view(call: Call) -> bool:
    """Whether a call is a view: its result has the elements of its operand."""
    return len(call.ins) == 1 and gives_view(call.op)


@functools.lru_cache(maxsize=4096)
def gives_view(op: OpOverload) -> bool:
    """Whether what an op returns is in the memory of an operand."""
    returns = schema_of(op).returns
    return bool(returns) and returns[0].alias_info is not None


def name_of(index: int) -> str:
    """The name of a value: a, b, ..., z, ba, bb, ..."""
    name = chr(97 + index % 26)
    while index >= 26:
        index //= 26
        name = chr(97 + index % 26) + name
    return name


def tensors_in(tree: Any) -> Iterator[Var]:
    """The values in arguments, in order."""
    values: list[Var] = []
    _gather((tree,), values.append)  # generators in generators are slow
    return iter(values)


def _gather(entries: tuple[Any, ...], put: Callable[[Var], None]) -> None:
    for entry in entries:
        if isinstance(entry, Var):
            put(entry)
        elif isinstance(entry, tuple):
            _gather(entry, put)


def substituted(tree: Any, of: Callable[[Var], Any]) -> Any:
    """The arguments with `of(v)` for each value `v`."""
    if isinstance(tree, Var):
        return of(tree)
    if isinstance(tree, tuple):
        return tuple([substituted(entry, of) for entry in tree])
    return tree


def argument_text(args: tuple[Any, ...], kwargs: Sequence[tuple[str, Any]]) -> str:
    """Arguments as a program prints them: values by name, the rest as Python."""
    return " ".join([_text(a) for a in args] + [f"{k}={_text(a)}" for k, a in kwargs])


def _text(value: Any) -> str:
    match value:
        case Var():
            return str(value)
        case tuple():
            return f"[{','.join(map(_text, value))}]"
        case torch.dtype():
            return str(value).removeprefix("torch.")
        case _:
            return repr(value)


def tensors_of(result: Any) -> list[torch.Tensor]:
    """The tensors that an op returned, those of lists too: not its numbers, nor None."""
    if isinstance(result, torch.Tensor):
        return [result]
    if isinstance(result, (tuple, list)):
        return [t for entry in result for t in tensors_of(entry)]
    return []


def pruned(graph: Graph) -> Graph:
    """The graph without calls that no output needs, its values numbered in order."""
    needed = set(graph.outs)
    kept = []
    for call in reversed(graph.calls):
        if not call.outs or any(v in needed for v in call.outs):  # a call without results may raise
            needed.update(call.ins)
            kept.append(call)
    order: dict[Var, Var] = {}

    def number(v: Var) -> Var:
        return order.setdefault(v, Var(len(order)))

    inputs = tuple(map(number, graph.inputs))
    constants = tuple((number(v), t) for v, t in graph.constants if v in needed)
    calls = []
    for call in reversed(kept):
        args, kwargs = substituted((call.args, call.kwargs), number)
        outs = tuple(number(v) if v in needed else None for v in call.outs)
        calls.append(Call(call.op, args, kwargs, outs, call.mark))
    types = tuple(graph.types[v.index] for v in order)
    return Graph(inputs, constants, tuple(calls), tuple(map(number, graph.outs)), types)
