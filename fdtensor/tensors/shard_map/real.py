"""`RealPlace`: the place of this process, which hears what all ranks say."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import attrs
import torch

from fdtensor.layouts.errors import CommError, FdtensorError
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import Replicate, Shard
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.plans.planner import plan
from fdtensor.runtime.comm import Comm
from fdtensor.runtime.interpreter import execute
from fdtensor.tensors.shard_map.moves import LocalCollective, Move, plan_of
from fdtensor.tensors.shard_map.places import Call, OneRank, Table, compared, says

__all__ = ["RealPlace"]


@attrs.define(eq=False)
class RealPlace(OneRank):
    """The place of this process. It hears what all ranks say, or trusts what `known` tells."""

    mesh: Mesh
    rank: int
    comm: Comm[Any]
    known: Sequence[Table] | None
    token: torch.Tensor | None = None
    heard: list[Table] = attrs.field(factory=list)
    over: bool = False
    """Whether all ranks have failed together."""

    def meet(self, call: Call) -> Table:
        if self.known is not None:
            table = self.known[len(self.heard)] if len(self.heard) < len(self.known) else ()
            self.heard.append(table)
            first = table[self.mesh.position(self.rank) or 0] if table else "nothing"
            if first != call:
                raise CommError(
                    f"rank {self.rank} {says(call)}, which it did not at the first call.",
                    first=first,
                    hint="Let shapes and collectives follow from the types of the arguments, or "
                    "make the Comm with check='always'.",
                )
            return table
        table = self._told(call)
        try:
            for rank, call_of_rank in zip(self.mesh.order, table, strict=True):
                if call_of_rank.what.startswith("failed"):
                    raise CommError(
                        f"rank {rank} {call_of_rank.what}",
                        hint="Look at what that rank raises; the others stop with it.",
                    )
            self.heard.append(compared(self.mesh, table))
        except CommError:
            self.over = True
            raise
        return table

    def fail(self, error: BaseException) -> None:
        """Tells ranks that wait for this one that it has failed, where they would hear it."""
        if self.known is None and not self.over:
            text = error.sentence if isinstance(error, FdtensorError) else str(error)
            self.over = True
            self._told(Call(f"failed in shard_map with {type(error).__name__}: {text[:500]}"))

    def carry(self, move: LocalCollective, tensor: torch.Tensor) -> torch.Tensor:
        way = plan_of(move, self.mesh, self.mesh.coord(self.rank) or (), tensor, self.comm.cost)
        if isinstance(move, Move):
            assert way is not None
            return execute(way, tensor, self.comm)
        if way is not None:
            gives = way.src.mesh.position(self.rank) is not None
            row = tensor[None] if gives else tensor.new_empty((0,) * (tensor.dim() + 1))
            out = execute(way, row, self.comm)
            if way.dst.mesh.position(self.rank) is not None:
                return out[0]
        return torch.zeros_like(tensor)

    def _told(self, call: Call) -> Table:
        text = json.dumps([call.what, call.shapes, call.dtypes, call.tracked]).encode()
        lengths = self._gathered(torch.tensor([len(text)]))
        size = int(lengths.max())
        padded = torch.frombuffer(bytearray(text.ljust(size)), dtype=torch.uint8)
        rows = self._gathered(padded).cpu().view(self.mesh.size, size)
        return [_read(bytes(row.tolist())) for row in rows]

    def _gathered(self, block: torch.Tensor) -> torch.Tensor:
        line = Mesh.from_ranks(self.mesh.ranks, "rank")
        whole = TensorType((block.numel() * line.size,), block.dtype, Layout(line, [Shard(0)]))
        way = plan(whole, Layout(line, [Replicate()]), cost=self.comm.cost)
        return execute(way, block.to(self.comm.device), self.comm)  # type: ignore[attr-defined]


def _read(text: bytes) -> Call:
    what, shapes, dtypes, tracked = json.loads(text)
    return Call(what, tuple(map(tuple, shapes)), tuple(dtypes), tuple(tracked))
