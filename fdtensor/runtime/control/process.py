"""`plane_of`: the planes of a process, one for each thread that has Comms; its end, its forks."""

from __future__ import annotations

import atexit
import functools
import os
import sys
import threading
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from fdtensor.layouts.errors import CommError
from fdtensor.layouts.expected import no_mesh
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.torch_private import current_graph_task
from fdtensor.runtime.control.causes import told_of
from fdtensor.runtime.control.plane import Plane
from fdtensor.runtime.process_groups import initialized

__all__ = ["group_of", "groups", "lane_here", "plane_of"]

_planes: WeakKeyDictionary[Any, dict[str, Plane]] = WeakKeyDictionary()
"""By default process group, which does not outlive `destroy_process_group`, and by lane."""


def plane_of() -> Plane:
    """The plane of the default process group, in the lane of this thread."""
    world = dist.group.WORLD
    lanes = _planes.setdefault(world, {})
    lane = lane_here()
    plane = lanes.get(lane)
    if plane is None:
        plane = lanes[lane] = Plane(world, lane)
        if not plane.is_fake:
            _tell_at_the_end()
    return plane


def lane_here() -> str:
    """The name of this thread; empty for the main one, and for those in which torch goes back."""
    thread = threading.current_thread()
    if thread is threading.main_thread() or current_graph_task() != -1:
        return ""
    return thread.name


def group_of(ranks: tuple[int, ...]) -> str:
    """The name of the group of these ascending ranks, made at its first use by its members."""
    return plane_of().groups.group(ranks)


def groups(mesh: Mesh, *axes: str) -> dict[str, tuple[int, ...]]:
    """Makes the groups of this rank: of `axes` together, or of each axis and of the whole mesh.

    Returns their names and ranks. An exported graph names its groups so; ranks outside the mesh
    make none. Collective over the members of each group.

    >>> with local_cluster(2) as cluster:
    ...     names = cluster.run(lambda: fd.collectives.groups(Mesh(x=2)))

    >>> names[0] == names[1], list(names[0].values())
    (True, [(0, 1)])
    """
    if not isinstance(mesh, Mesh):
        raise no_mesh(mesh)
    if not initialized():
        raise CommError(
            "there is no process group, and so there are no groups to make.",
            mesh=mesh,
            hint="Start with torchrun and call connect(mesh) first.",
        )
    coord = mesh.coord(dist.get_rank())
    if coord is None:
        return {}
    wanted = [axes] if axes else [*((axis,) for axis in mesh.axes), mesh.axes]
    made = {}
    for some in wanted:
        ranks = tuple(sorted(mesh.coset(some, coord)))
        if len(ranks) > 1:
            made[group_of(ranks)] = ranks
    return made


# --- the end of the process ------------------------------------------------------------------


@functools.cache
def _tell_at_the_end() -> None:
    """Has this process tell the other ranks when it ends, and of what."""
    hook, last = sys.excepthook, [""]

    def note(kind: Any, error: BaseException, trace: Any) -> None:
        last[0] = told_of(error)
        hook(kind, error, trace)

    def leave() -> None:
        for plane in _all():
            if os.getpid() == plane.pid:
                plane.end_watch()
                with suppress(RuntimeError, OSError):
                    plane.leave(last[0])

    sys.excepthook = note
    atexit.register(leave)


def _all() -> list[Plane]:
    return [plane for lanes in list(_planes.values()) for plane in list(lanes.values())]


def _forked() -> None:
    for plane in _all():
        for ledger in plane.ledgers.values():
            ledger.stop = True


os.register_at_fork(after_in_child=_forked)
