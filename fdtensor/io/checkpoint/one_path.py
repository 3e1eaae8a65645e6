"""`one_path`: the path that all ranks give, and what is said where they give several."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fdtensor.io.checkpoint.together import gathered
from fdtensor.layouts.errors import CheckpointError
from fdtensor.layouts.words import shown
from fdtensor.runtime.comm import Comm, inside, refuse_no_comm

__all__ = ["of_paths", "one_path"]

SHOWN = 8
"""How many paths an error lists."""

_ONE = (
    "Give all ranks one path, in a directory that all of them see: make a temporary one on one "
    "rank and tell it to the others."
)


def one_path(about: str, path: Any, comm: Comm[Any]) -> None:
    """Raises `CheckpointError` on all ranks where they give different paths. Collective."""
    differ = _different(path, comm)
    if differ:
        raise CheckpointError(f"{about}: ranks gave different paths.", **differ, hint=_ONE)


@contextmanager
def of_paths(path: Any, comm: Comm[Any]) -> Iterator[None]:
    """A context whose errors list the paths of ranks, where these are different. Collective.

    Each machine may have its own copy of what is read: this alone is no error.
    """
    differ = _different(path, comm)
    try:
        yield
    except CheckpointError as error:
        if not differ:
            raise
        facts = {**error.facts, **differ}
        hint = f"Ranks gave different paths. {_ONE}"
        raise CheckpointError(error.sentence, **facts, hint=hint) from None


def _different(path: Any, comm: Comm[Any]) -> dict[str, str]:
    """The paths by the first rank that gives each; none where all give the same one."""
    refuse_no_comm(comm)
    if comm.rank is None or comm.mesh.size == 1 or not inside(comm):
        return {}
    text = os.path.abspath(path) if isinstance(path, (str, os.PathLike)) else type(path).__name__
    ranks = sorted(comm.mesh.order)
    first: dict[str, int] = {}
    for rank, own in zip(ranks, gathered(str(text), comm), strict=True):
        first.setdefault(own, rank)
    if len(first) == 1:
        return {}
    facts = {f"rank {rank}": shown(own) for own, rank in list(first.items())[:SHOWN]}
    more = len(first) - len(facts)
    return {**facts, **({"...": f"{more} more"} if more else {})}
