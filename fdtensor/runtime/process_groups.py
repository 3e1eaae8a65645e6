"""Process groups: of sets of mesh axes or of two meshes, made when needed, named by their ranks."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.torch_private import (
    default_group,
    group_tables,
    new_group_helper,
    register_group,
    timeout_of,
)

__all__ = [
    "backend_of",
    "default_device",
    "group_name",
    "group_of",
    "groups",
    "initialized",
    "make_group",
    "this_rank",
    "up",
]


def group_name(ranks: Sequence[int]) -> str:
    """The name of the process group of these ranks: the same on every rank and in every graph."""
    text = "_".join(map(str, sorted(ranks)))
    if len(text) > 40:
        text = f"{len(ranks)}_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    return f"fdtensor_{text}"


_made: WeakKeyDictionary[Any, dict[tuple[int, ...], str]] = WeakKeyDictionary()
"""For each default group, which does not outlive `destroy_process_group`, the names of ours."""


def group_of(ranks: tuple[int, ...]) -> str:
    """The name of the group of these ascending ranks, made at its first use by its members."""
    world = dist.group.WORLD
    made = _made.setdefault(world, {})
    name = made.get(ranks)
    if name is None:
        name = group_name(ranks)
        if ranks == tuple(range(dist.get_world_size())):
            register_group(name, world)
        else:
            make_group(ranks, name)
        made[ranks] = name
    return name


def make_group(ranks: tuple[int, ...], name: str) -> None:
    """Makes and registers a group under a name of ours, without waiting for its other members.

    `dist.new_group` derives names from how many groups a rank has made, which differs between ranks
    that make groups when they need them, and then hangs; so this calls what it calls.
    """
    world, default = group_tables(), default_group()
    backend, store = world.pg_map[default]
    bound = default.bound_device_id
    default.bound_device_id = None  # else NCCL splits the default group, which needs every rank
    try:
        with _connecting_late():
            made, _ = new_group_helper(
                len(ranks),
                ranks.index(dist.get_rank()),
                list(ranks),
                backend,
                store,
                name,
                timeout=timeout_of(default, backend),
            )
    finally:
        default.bound_device_id = bound
    world.pg_group_ranks[made] = {rank: place for place, rank in enumerate(ranks)}


@contextmanager
def _connecting_late() -> Iterator[None]:
    """Lets gloo connect ranks when they first talk, so that making a group waits for nobody.

    Else ranks that make overlapping groups in different orders would wait for each other.
    """
    name = "TORCH_GLOO_LAZY_INIT"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def groups(mesh: Mesh, *axes: str) -> dict[str, tuple[int, ...]]:
    """Makes the groups of this rank: of `axes` together, or of each axis and of the whole mesh.

    Returns their names and ranks. An exported graph names its groups so; ranks outside the mesh
    make none. Collective over the members of each group.

    >>> with local_cluster(2) as cluster:
    ...     names = cluster.run(lambda: fd.collectives.groups(Mesh(x=2)))

    >>> names[0] == names[1], list(names[0].values())
    (True, [(0, 1)])
    """
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


def backend_of(device: torch.device) -> str | None:
    """The backend of the default process group for a device: `gloo`, `nccl`, ...; None if none."""
    for entry in str(c10d.get_backend_config()).split(","):
        kind, _, backend = entry.partition(":")
        if kind == device.type:
            return backend
    return None


def up() -> bool:
    """Whether a process group is up; brings one up where torchrun's environment is there."""
    if not dist.is_available():
        return False
    if initialized():
        return True
    if all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")):
        dist.init_process_group(backend="nccl" if torch.cuda.is_available() else "gloo")
        return True
    return False


def initialized() -> bool:
    """Whether a process group is up."""
    return dist.is_available() and dist.is_initialized()


def this_rank() -> int | None:
    """The rank of this process; None where there is no process group, nor torchrun around it."""
    if initialized():
        return dist.get_rank()
    return int(os.environ["RANK"]) if "RANK" in os.environ else None


def default_device() -> str:
    """The device that the default process group serves: this rank's CUDA device, or the CPU."""
    if dist.get_backend() == "nccl" or "nccl" in str(dist.get_backend()):
        index = int(os.environ.get("LOCAL_RANK", dist.get_rank())) % torch.cuda.device_count()
        torch.cuda.set_device(index)
        return f"cuda:{index}"
    return "cpu"
