"""`nested`: whether rows of two mesh axes hold together."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import Partial
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.ops.graph import Full
from fdtensor.ops.lowering import local_graph, lowered
from fdtensor.ops.rows import rows_of
from fdtensor.testing.row_checks import call_of
from fdtensor.testing.values import gather_full, scatter


def ints(*shape: int, least: int = -5, most: int = 5, dtype=torch.float32) -> torch.Tensor:
    """Small integers, so that every sum is exact."""
    generator = torch.Generator().manual_seed(sum(shape) + 7 * len(shape))
    return torch.randint(least, most + 1, shape, generator=generator).to(dtype)


def nested(op: Any, sample: Any) -> Iterator[str]:
    """Pairs of rows, one for each axis of a mesh, that do not hold together on a sample."""
    plain = len(sample) == 2 and isinstance(sample[1], dict)
    args, kwargs = sample if plain else (sample, {})
    call, tensors, whole = call_of(op, args, kwargs)
    mesh = Mesh(x=2, y=2)
    types = [Full(tuple(t.shape), t.dtype) for t in (*tensors, *whole)]
    rows = [row for row in rows_of(call, types, 2) if not row.exact]

    def typed(t, *placements):
        return TensorType(tuple(t.shape), t.dtype, Layout(mesh, placements))

    def reductions(*pair):
        return {p.reduce_op for r in pair for p in (*r.ins, *r.outs) if isinstance(p, Partial)}

    for a, b in itertools.product(rows, rows):
        if len(reductions(a, b)) > 1:
            continue  # no tensor may have both pending
        ins = [typed(t, p, q) for t, p, q in zip(tensors, a.ins, b.ins, strict=True)]
        outs = [typed(t, p, q) for t, p, q in zip(whole, a.outs, b.outs, strict=True)]
        held = [scatter(t, type, i) for i, (t, type) in enumerate(zip(tensors, ins))]
        made = []
        for rank, coord in enumerate(itertools.product(range(2), range(2))):
            go = local_graph(lowered(call, ins, outs, coord))
            made.append(go(*(blocks[rank] for blocks in held)))
        for i, (full, type) in enumerate(zip(whole, outs)):
            joined = gather_full([results[i] for results in made], type)
            if not torch.allclose(joined, full, atol=1e-6):
                yield f"{op}: {a} with {b} on {sample}"
