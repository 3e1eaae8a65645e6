"""`lowered`: the aten calls that one rank makes on its blocks for a call on full tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fdtensor.layouts.kinds import is_list, is_tuple
from fdtensor.layouts.mesh import Coord, Mesh
from fdtensor.layouts.placement import Partial, Replicate
from fdtensor.layouts.remembered import remembered
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.layouts.torch_private import schema_of
from fdtensor.ops.graph import Call, Full, Graph, Var, substituted, tensors_of
from fdtensor.ops.notation.core import At, Block, rule_of
from fdtensor.ops.recorder import record
from fdtensor.ops.rows import CallKey, arguments
from fdtensor.plans.collectives.even import is_even
from fdtensor.plans.normal_type import normalized

__all__ = ["local_graph", "lowered", "lowered_on_all", "results_of"]

aten = torch.ops.aten


def lowered(
    call: Call,
    ins: Sequence[TensorType],
    outs: Sequence[TensorType | None],
    coord: Coord,
    device: str = "cpu",
) -> Graph:
    """The calls that the rank at `coord` makes on its blocks for `call` on full tensors.

    As a graph from the blocks of the inputs to those of the outputs that are read.
    """
    return _at(CallKey.of(call), ins, outs, coord, device)


def _at(
    key: CallKey,
    ins: Sequence[TensorType],
    outs: Sequence[TensorType | None],
    coord: Coord,
    device: str = "cpu",
) -> Graph:
    before = tuple((t.shape, t.box(coord)) for t in ins)
    after = tuple(None if t is None else (t.shape, t.box(coord)) for t in outs)
    dtypes = tuple(t.dtype for t in ins), tuple(t.dtype for t in outs if t is not None)
    return _lowered(key, before, after, dtypes, device)


def lowered_on_all(
    call: Call, ins: Sequence[TensorType], outs: Sequence[TensorType | None], mesh: Mesh
) -> Sequence[Graph]:
    """`lowered` for each rank, in the order of the mesh: one graph for those that do the same."""
    return _on_all(CallKey.of(call), tuple(ins), tuple(outs), mesh)


@remembered(4096)
def _on_all(
    key: CallKey, ins: tuple[TensorType, ...], outs: tuple[TensorType | None, ...], mesh: Mesh
) -> Sequence[Graph]:
    types = [*ins, *[t for t in outs if t is not None]]
    coords = list(mesh.indices(mesh.axes))
    if all(is_even(normalized(t), range(t.ndim)) for t in types):
        first = _at(key, ins, outs, coords[0])
        if first is _at(key, ins, outs, coords[-1]):
            return [first] * len(coords)
    graphs: dict[Coord, Graph] = {}
    whole = Replicate, Partial
    rows = [t.layout.placements for t in types]
    cuts = [i for i in range(mesh.ndim) if not all(isinstance(row[i], whole) for row in rows)]
    places = [tuple([coord[i] for i in cuts]) for coord in coords]
    for place, coord in zip(places, coords, strict=True):
        if place not in graphs:
            graphs[place] = _at(key, ins, outs, coord)
    return [graphs[place] for place in places]


@remembered(65536)
def _lowered(key: CallKey, before: Any, after: Any, dtypes: Any, device: str) -> Graph:
    ins = tuple(Block(*b) for b in before)
    outs = tuple(None if a is None else Block(*a) for a in after)
    sizes = tuple([b and (b.full, b.shape) for b in (*ins, *outs)])
    anywhere = _anywhere(key, sizes, dtypes, device)
    if not anywhere:
        graph = _graph(key, ins, outs, dtypes, device)
        if any(b is not None and b.asked for b in (*ins, *outs)):
            return graph
        anywhere.append(graph)
    return anywhere[0]


@remembered(65536)
def _anywhere(key: CallKey, sizes: Any, dtypes: Any, device: str) -> list[Graph]:
    """The graph of blocks of these sizes, wherever they lie, once it is known to be that of all."""
    del key, sizes, dtypes, device
    return []


def _graph(
    key: CallKey,
    ins: tuple[Block, ...],
    outs: tuple[Block | None, ...],
    dtypes: Any,
    device: str,
) -> Graph:
    """The graph of a call on these blocks."""
    fulls = [Full(b.shape, dtype) for b, dtype in zip(ins, dtypes[0], strict=True)]
    kept = [b for b in outs if b is not None]
    results = [Full(b.shape, dtype) for b, dtype in zip(kept, dtypes[1], strict=True)]
    call = Call(key.op, key.args, key.kwargs, tuple(_numbered(outs, len(ins))))
    rule = rule_of(key.op)
    whole = all(b.shape == b.full for b in (*ins, *kept))
    if rule is not None and rule.local is not None and (rule.whole or not whole):
        at = At(ins, tuple(b if b is not None else Block((), ()) for b in outs))
        return _recorded(call, rule.local, at, fulls, outs, device)
    args, kwargs = call.args, call.kwargs
    if not whole and rule is not None and rule.sizes:
        args, kwargs = _resized(call, rule.sizes, outs)
    inputs = tuple(Var(i) for i in range(len(ins)))
    read = tuple(v for v in call.outs if v is not None)
    return Graph(inputs, (), (Call(key.op, args, kwargs, call.outs),), read, (*fulls, *results))


def _numbered(outs: Sequence[Block | None], start: int) -> list[Var | None]:
    numbered: list[Var | None] = []
    for block in outs:
        numbered.append(None if block is None else Var(start))
        start += block is not None
    return numbered


def _resized(call: Call, sizes: Any, outs: Sequence[Block | None]) -> tuple[Any, Any]:
    """The arguments of a call with those that are shapes replaced by the shapes of blocks."""
    args, kwargs = arguments(call, lambda v: v)
    names = [a.name for a in schema_of(call.op).arguments]
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
    """The calls of a rule's `local` on these blocks."""

    def body(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        args, kwargs = arguments(call, lambda v: tensors[v.index])
        result = local(at, *_with_lists(args), **kwargs)
        return [t for t, block in zip(tensors_of(result), outs, strict=True) if block is not None]

    return record(body, fulls, device=device)


def _with_lists(tree: object) -> Any:
    """Arguments as an op takes them, with lists in place of tuples."""
    return [_with_lists(entry) for entry in tree] if is_tuple(tree) or is_list(tree) else tree


@remembered(16384)
def results_of(key: CallKey, ins: tuple[Full, ...], device: str = "cpu") -> tuple[Full, ...]:
    """The results of an op for operands of these shapes and dtypes, in order."""
    call = Call(key.op, key.args, key.kwargs, (None,) * key.width)

    def body(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        args, kwargs = arguments(call, lambda v: tensors[v.index])
        listed = {name: _with_lists(value) for name, value in kwargs.items()}
        return tensors_of(call.op(*_with_lists(args), **listed))

    graph = record(body, ins, device=device)
    return tuple(graph.types[v.index] for v in graph.outs)


def local_graph(graph: Graph) -> Any:
    """A Python function of tensors that runs a graph, for tests and checks."""

    def run(*tensors: torch.Tensor) -> list[torch.Tensor]:
        env: dict[Var, Any] = dict(zip(graph.inputs, tensors, strict=True))
        env.update(dict(graph.constants))
        for call in graph.calls:
            args, kwargs = substituted((call.args, call.kwargs), env.__getitem__)
            result = call.op(*_with_lists(args), **dict(kwargs))
            results = tensors_of(result)
            env.update((v, t) for v, t in zip(call.outs, results, strict=False) if v is not None)
        return [env[v] for v in graph.outs]

    return run
