"""`decomposed`: the graph of the decomposition of a call."""

from __future__ import annotations

import functools

import torch

from fdtensor.layouts.errors import FdtensorError
from fdtensor.layouts.kinds import is_tuple
from fdtensor.layouts.remembered import remembered
from fdtensor.ops.decompositions import decomposition_of
from fdtensor.ops.graph import Call, Full, Graph, tensors_of
from fdtensor.ops.recorder import record
from fdtensor.ops.rewrite import rewritten
from fdtensor.ops.rows import CallKey, arguments

__all__ = ["decomposed"]


@remembered(4096)
def decomposed(
    key: CallKey, fulls: tuple[Full, ...], read: tuple[bool, ...], blocks: int
) -> Graph | None:
    """The graph of an op's decomposition, for outputs that are read; None where it has none.

    `blocks` is the number of ranks that cut a dim, for a blocked one, else 0.
    """
    split = decomposition_of(key.op)
    if split is None:
        return None
    f = functools.partial(split.f, blocks) if split.blocked else split.f
    call = Call(key.op, key.args, key.kwargs, (None,) * key.width)

    def body(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        args, kwargs = arguments(call, lambda v: tensors[v.index])
        result = f(*[list(a) if is_tuple(a) else a for a in args], **kwargs)
        if result is NotImplemented:  # torch's own may decline arguments
            raise NotImplementedError
        results = tensors_of(result)
        if len(results) < len(read):
            raise NotImplementedError
        return [t for t, is_read in zip(results, read, strict=False) if is_read]

    try:
        graph = rewritten(record(body, fulls))
    except (FdtensorError, RuntimeError, NotImplementedError):
        return None
    return None if any(_same(c, graph, key, fulls) for c in graph.calls) else graph


def _same(call: Call, graph: Graph, key: CallKey, fulls: tuple[Full, ...]) -> bool:
    """Whether a piece is the very call that is decomposed; the op on smaller operands is not."""
    return CallKey.of(call) == key and tuple(graph.types[v.index] for v in call.ins) == fulls
