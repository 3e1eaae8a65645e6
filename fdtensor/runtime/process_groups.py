"""Process groups: of sets of mesh axes or of two meshes, named by their ranks; bringing them up."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from fdtensor.layouts.errors import CommError
from fdtensor.layouts.text import spans
from fdtensor.layouts.torch_private import (
    any_unwaited,
    c10d_group,
    group_tables,
    new_group_helper,
    prefixed,
    register_group,
    rendezvous,
    set_group_timeout,
    unregister_group,
)
from fdtensor.runtime.control.sockets import limit_silence
from fdtensor.runtime.interfaces import choose_interface, own_place, unreachable

__all__ = [
    "SECONDS",
    "backend_of",
    "default_device",
    "free_group",
    "group_name",
    "initialized",
    "make_group",
    "renamed",
    "set_timeout",
    "this_rank",
    "up",
]


SECONDS = 60.0
"""How long ranks wait for each other where nobody says otherwise."""


@functools.lru_cache(maxsize=4096)
def group_name(ranks: tuple[int, ...], lane: str = "") -> str:
    """The name of the process group of these ranks: the same on every rank and in every graph.

    Threads other than the main one have groups of their own, each in a `lane` of its name.
    """
    text = "_".join(map(str, sorted(ranks)))
    if len(text) > 40:
        text = f"{len(ranks)}_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    return f"fdtensor_{text}" + (f"@{lane}" if lane else "")


def make_group(
    ranks: tuple[int, ...], name: str, store: Any, seconds: float, backend: str | None = None
) -> None:
    """Makes and registers a group under a name of ours, without waiting for its other members.

    Its ranks find each other in `store` and wait for each other `seconds` at most. `backend` is by
    default that of the default group. `dist.new_group` derives names from how many groups a rank
    has made, which differs between ranks that make groups when they need them, and then hangs; so
    this calls what it calls.
    """
    world, default = group_tables(), cast(Any, dist.group.WORLD)
    bound = default.bound_device_id
    default.bound_device_id = None  # else NCCL splits the default group, which needs every rank
    try:
        with _connecting_late():
            made, _ = new_group_helper(
                len(ranks),
                ranks.index(dist.get_rank()),
                list(ranks),
                backend or world.pg_map[default][0],
                store,
                name,
                timeout=timedelta(seconds=seconds),
            )
    finally:
        default.bound_device_id = bound
    world.pg_group_ranks[made] = {rank: place for place, rank in enumerate(ranks)}


def free_group(group: Any) -> None:
    """Frees the threads and connections of a group whose connections are shut down.

    Freeing waits for what is under way, during which Python stands still: a group in which that
    may be so, and one of another backend than gloo, is kept.
    """
    backend = group_tables().pg_map.get(group, ("", None))[0]
    if backend == "gloo" and not any_unwaited():
        dist.destroy_process_group(group)


def set_timeout(group: Any, seconds: float) -> None:
    """Sets how long the ranks of a group wait for each other, where its backend lets one."""
    backend = group_tables().pg_map.get(group, ("", None))[0]
    if "gloo" in backend or "nccl" in backend:  # torch warns of any other
        set_group_timeout(group, seconds)


def renamed(name: str, to: str) -> None:
    """Lets the group of `name` be the one that collectives find by the name `to`."""
    unregister_group(to)
    register_group(to, c10d_group(name))


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


def backend_of(device: torch.device) -> str | None:
    """The backend of the default process group for a device: `gloo`, `nccl`, ...; None if none."""
    for entry in str(c10d.get_backend_config()).split(","):
        kind, _, backend = entry.partition(":")
        if kind == device.type:
            return backend
    return None


def up(seconds: float = SECONDS) -> bool:
    """Whether a process group is up; brings one up where torchrun's environment is there.

    All processes have `seconds` for that. Raises `CommError` where one does not come.
    """
    if not dist.is_available():
        return False
    if initialized():
        return True
    if all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")):
        _bring_up(seconds)
        return True
    return False


def _bring_up(seconds: float) -> None:
    limit, backend = timedelta(seconds=seconds), "nccl" if torch.cuda.is_available() else "gloo"
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store: Any = None
    try:
        store, rank, size = next(rendezvous("env://", rank, size, timeout=limit))
        store.set_timeout(limit)
        choose_interface(os.environ["MASTER_ADDR"])
        limit_silence(int(os.environ["MASTER_PORT"]), seconds)
        # torchrun's store outlives a restart, and has the addresses of processes that have ended
        store = prefixed(store, f"fdtensor_{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}")
        arrived = prefixed(store, "fdtensor_arrived")
        arrived.set(str(rank), own_place())
        ranks = [str(other) for other in range(size)]
        # a group of all ranks waits for the first of them that is missing, without its name
        arrived.wait(ranks, limit)
        _all_reached(arrived, ranks)  # under NCCL too, where ranks agree by gloo
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
    except CommError:
        raise
    except (RuntimeError, OSError) as error:
        raise _not_up(size, store, seconds, error) from None


def _not_up(size: int, store: Any, seconds: float, error: BaseException) -> CommError:
    """The error where not all processes have come."""
    missing = "the process that keeps the store"
    with suppress(RuntimeError, OSError, AttributeError):
        absent = [r for r in range(size) if not store.check([f"fdtensor_arrived/{r}"])]
        missing = f"rank{'s' * (len(absent) > 1)} {spans(absent, ', ')}" if absent else "a rank"
    return CommError(
        f"{missing} did not come to connect within {seconds:g} s.",
        ranks=size,
        **({} if store is not None else {"problem": str(error).partition("\n")[0]}),
        hint="Start as many processes as WORLD_SIZE says, or give them longer: "
        "connect(mesh, timeout=...).",
    )


def _all_reached(arrived: Any, ranks: Sequence[str]) -> None:
    """Raises on all ranks where some listen to their own machine alone, and others are elsewhere.

    gloo would connect them to whatever listens at that port of their own machine, and wait.
    """
    if arrived.add("looked", 1) == 1:  # one rank looks for all
        places = [text.decode() for text in arrived.multi_get(list(ranks))]
        lost = unreachable(places)
        at = dict.fromkeys(places[i].partition(" ")[2] for i in lost)
        arrived.set("unreached", f"{spans(lost, ', ')}|{', '.join(at)}" if lost else "")
    unreached, _, at = arrived.get("unreached").decode().partition("|")
    if unreached:
        raise CommError(
            f"ranks {unreached} listen to their own machine alone, and others are on another one.",
            at=at,
            hint="Name one that leads to the other machines: GLOO_SOCKET_IFNAME=eth0 on each of "
            "them, for NCCL NCCL_SOCKET_IFNAME; `ip -br addr` lists them.",
        )


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
