"""`between`: a program's values for a caller whose meshes have the ranks in another order.

A value that has the tensors of all ranks has them in the order of its mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fdtensor.layouts.mesh import Mesh

__all__ = ["Values", "between"]

Values = Callable[[Sequence[Any]], Sequence[Any]]


def between(comm: Any, meshes: Sequence[Mesh], mesh: Mesh, *, into: bool) -> Values | None:
    """A function that puts values on `meshes` in the order of the `mesh` of a program.

    Or else those of the program in the order of `meshes`. None where the order is the same.
    """
    if comm.rank is not None or all(m.order == mesh.order for m in meshes):
        return None
    ways = [(m.order, mesh.order) if into else (mesh.order, m.order) for m in meshes]

    def put(values: Sequence[Any]) -> list[Any]:
        return [_put(comm, v, *way) for v, way in zip(values, ways, strict=True)]

    return put


def _put(comm: Any, value: Any, src: Sequence[int], dst: Sequence[int]) -> Any:
    if src == dst:
        return value
    held = dict(zip(src, comm.leaves(value), strict=True))
    return comm.value([held[rank] for rank in dst])
