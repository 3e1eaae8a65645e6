"""`compare`: whether ranks hold the same bits of what their types say they hold alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fdtensor.layouts.errors import CommError
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import Replicate
from fdtensor.layouts.remembered import remembered
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.layouts.text import spans
from fdtensor.runtime.comm import Comm, ranks_here
from fdtensor.runtime.fingerprint import fingerprint

__all__ = ["Claim", "compare", "inputs", "replicas", "unlike"]

Claim = tuple[int, tuple[str, int], Any]
"""A rank, the name of a value and the first rank of those that hold the same block of it, and a
fingerprint of what this one holds."""


@remembered(8192)
def replicas(type: TensorType) -> tuple[tuple[int, ...], ...]:
    """The sets of two ranks or more that hold the same block, in ascending order."""
    mesh = type.mesh
    places = zip(mesh.axes, type.layout.placements, strict=True)
    axes = tuple([axis for axis, placement in places if isinstance(placement, Replicate)])
    sets = [tuple(sorted(ranks)) for ranks in mesh.cosets(axes)]
    return tuple(sorted(ranks for ranks in sets if len(ranks) > 1))


def unlike(claims: Iterable[Claim]) -> dict[str, str]:
    """For each name with different fingerprints the ranks that have the same ones."""
    groups: dict[tuple[str, int], dict[Any, list[int]]] = {}
    for rank, key, print in claims:
        groups.setdefault(key, {}).setdefault(print, []).append(rank)
    texts: dict[str, list[str]] = {}
    for (name, _), prints in sorted(groups.items()):
        if len(prints) > 1:
            parts = [_named(sorted(ranks)) for ranks in sorted(prints.values(), key=min)]
            texts.setdefault(name, []).append(" | ".join(parts))
    return {
        name: some[0] + (f", and {len(some) - 1} other blocks" if len(some) > 1 else "")
        for name, some in texts.items()
    }


def inputs(values: Sequence[Any], types: Sequence[TensorType]) -> dict[str, tuple[Any, TensorType]]:
    """Values with their types, by their places."""
    pairs = enumerate(zip(values, types, strict=True))
    return {f"input {i}, {type}": (value, type) for i, (value, type) in pairs}


def compare(
    about: str,
    comm: Comm[Any],
    meshes: Sequence[Mesh],
    values: Mapping[str, tuple[Any, TensorType]],
) -> None:
    """Raises `CommError` on all ranks of the meshes where replicas of a value differ in a bit.

    Collective: the ranks exchange 8 bytes for each value.
    """
    here = [comm.rank] if comm.rank is not None else [r for mesh in meshes for r in mesh.order]
    own: dict[int, list[int]] = {rank: [] for rank in here}
    for value, type in values.values():
        prints = dict.fromkeys(own, 0)
        if replicas(type):
            for rank, local in zip(ranks_here(comm, type.mesh), comm.leaves(value), strict=False):
                prints[rank] = int.from_bytes(fingerprint(local)[:8], "little", signed=True)
        for rank, numbers in own.items():
            numbers.append(prints[rank])
    told = comm.pooled(f"the values of {about}", own, meshes)
    wrong = unlike(
        (rank, (name, ranks[0]), told[rank][i])
        for i, (name, (_, type)) in enumerate(values.items())
        for ranks in replicas(type)
        for rank in ranks
        if rank in told
    )
    if wrong:
        error = CommError(
            f"ranks hold different values of what {about} takes to be the same on all of them.",
            **wrong,
            hint="Has a rank drawn numbers of its own, or missed an update? "
            "distribute(x, layout, comm, src_rank=0) makes one rank's value that of all.",
        )
        error.common = True
        raise error


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {spans(ranks, ', ')}"
