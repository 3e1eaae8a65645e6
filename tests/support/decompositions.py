"""`differences`: where a decomposition, recorded and run, is not what its op gives."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import attrs
import torch

from fdtensor.ops.decompositions import decomposition_of
from fdtensor.ops.graph import Call, Full, Graph, substituted
from fdtensor.ops.lowering import local_graph
from fdtensor.ops.notation.reshape import RESHAPES
from fdtensor.ops.recorder import record
from fdtensor.ops.rows import arguments
from fdtensor.testing.row_checks import call_of

aten = torch.ops.aten


def differences(
    op: Any, samples: Iterable[Any], tolerance: float = 1e-5, blocks: int = 4
) -> list[str]:
    """The samples on which the decomposition of `op` gives other types or values than `op`."""
    known = decomposition_of(op)
    assert known is not None, f"{op} has no decomposition"
    split = functools.partial(known.f, blocks) if known.blocked else known.f
    found = []
    for sample in samples:
        args, kwargs = sample if _with_kwargs(sample) else (sample, {})
        call, ins, outs = call_of(op, args, kwargs)
        types = [Full(tuple(t.shape), t.dtype) for t in ins]

        def body(tensors: list[torch.Tensor], call: Any = call) -> list[torch.Tensor]:
            given = arguments(call, lambda v: tensors[v.index])
            made = split(*given[0], **given[1])
            results = made if isinstance(made, tuple) else (made,)
            return [t for t in results if t is not None]

        graph = record(body, types)
        assert not _has_again(graph, call, types), f"{op} decomposes into itself"
        made = local_graph(_copying(graph))(*ins)
        rough = 4e-2 if any(t.dtype.itemsize == 2 for t in ins) else tolerance
        close = [_close(a, b, rough) for a, b in zip(made, outs)]
        if len(made) != len(outs) or not all(close):
            found.append(f"{op} {substituted(call.args, str)}: {made}, not {outs}"[:600])
    return found


def _copying(graph: Graph) -> Graph:
    """The graph with reshapes for views, as programs run them: kernels choose their strides."""
    calls = [
        attrs.evolve(c, op=aten.reshape.default) if c.op in RESHAPES else c for c in graph.calls
    ]
    return attrs.evolve(graph, calls=tuple(calls))


def _has_again(graph: Graph, call: Call, types: list[Full]) -> bool:
    """Whether a call is among the pieces of its decomposition: the op on less may be."""
    return any(
        (done.op, done.args, done.kwargs) == (call.op, call.args, call.kwargs)
        and [graph.types[v.index] for v in done.ins] == types
        for done in graph.calls
    )


def _with_kwargs(sample: Any) -> bool:
    return len(sample) == 2 and isinstance(sample[0], tuple) and isinstance(sample[1], dict)


def _close(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> bool:
    kinds = (a.dtype, a.shape) == (b.dtype, b.shape)
    return kinds and torch.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)
