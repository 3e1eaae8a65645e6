"""Agreement on several DTensors at once: the Comm and mesh of all their ranks, and their types."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Sequence
from typing import Any

from fdtensor.layouts.errors import CommError, FdtensorError
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.tree import flatten
from fdtensor.programs.options import EVERY_CALL
from fdtensor.runtime.alike import compare, inputs
from fdtensor.runtime.comm import speaker
from fdtensor.runtime.interpreter import digest_of
from fdtensor.tensors.dtensor import DTensor, is_dtensor

__all__ = ["agreed", "comm_of", "noted", "told", "union_of"]


def comm_of(tensors: Sequence[DTensor[Any]]) -> Any:
    """The Comm that has all ranks."""
    comms = list(dict.fromkeys(x.comm for x in tensors))
    ranks = {rank for x in tensors for rank in x.mesh.order}
    for comm in comms:
        if ranks <= set(comm.mesh.order):
            return comm
    raise CommError(
        f"none of the {len(comms)} Comms of these DTensors has all of their ranks.",
        **{f"comm {i}": comm for i, comm in enumerate(comms)},
        hint="Make all of them with one Comm, whose mesh contains the others.",
    )


def union_of(tensors: Sequence[DTensor[Any]]) -> Mesh:
    """The mesh of all ranks."""
    meshes = list(dict.fromkeys(x.mesh for x in tensors))
    if len(meshes) == 1:
        return meshes[0]
    return Mesh.from_ranks(sorted({rank for mesh in meshes for rank in mesh.order}), "ranks")


def agreed(about: str, tensors: Sequence[DTensor[Any]], key: Hashable = ()) -> None:
    """Lets all ranks compare the types of DTensors, and `key`, at their first use.

    Raises `CommError` on all of them where these differ, or a local tensor does not fit its type.
    """
    comm, types = comm_of(tensors), tuple([x.type for x in tensors])
    first = (about, types, key) not in comm.agreed
    if comm.check in EVERY_CALL or (comm.check == "first" and first):
        wrong = [m for m in (x.comm.mistake(x.local, x.type) for x in tensors) if m]
        digest = digest_of(repr((types, key)))
        comm.agree(about, digest, [union_of(tensors)], wrong[0] if wrong else None)
        if comm.check == "values":
            compare(about, comm, [union_of(tensors)], inputs([x.local for x in tensors], types))
        comm.agreed.update([about, (about, types, key)])


def noted(what: str, numbers: Sequence[object], tensors: Sequence[DTensor[Any]]) -> None:
    """Notes Python numbers that all ranks of DTensors must have alike, for when they compare."""
    if tensors and tensors[0].comm.rank is not None:
        known = [x for x in numbers if isinstance(x, (int, float))]
        comm_of(tensors).note(what, known, union_of(tensors))


def told(about: str, tree: Any, error: FdtensorError) -> None:
    """Lets the other ranks fail too where one has a mistake, if they wait for it to agree."""
    leaves = flatten(tree, is_leaf=is_dtensor)[0]
    tensors = [x for x in leaves if isinstance(x, DTensor)]
    with contextlib.suppress(CommError):
        comm: Any = comm_of(tensors) if tensors else None
        if comm is None or comm.check == "never" or about in comm.agreed:
            return
        mistake = f"{speaker(comm)}{error.sentence.removesuffix('.')}"
        comm.agree(about, digest_of(error.sentence), [union_of(tensors)], mistake)
