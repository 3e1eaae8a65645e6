"""The life of a rank: the phases in order, with a fault in one of them, and what came of it."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from types import SimpleNamespace
from typing import Any

import torch

import fdtensor as fd
from tests.faults.partition import ADDRESS, CABLE, cut, enter
from tests.faults.phases import PHASES

__all__ = ["FAULTS", "FAULTY", "RANKS", "live"]

FAULTS = (
    "kill",
    "exit",
    "raise",
    "stop",
    "slow",
    "skip",
    "swap",
    "differ",
    "interrupt",
    "partition",
)
"""What the faulty rank does in place of a phase.

`differ` gives it another number at a later call. `slow` is within the time that others wait. With
`interrupt` it is as slow, and rank 0 gets Ctrl-C while it waits for it. With `partition`, ranks 0
and 1 are on another host, and the cable between the two is pulled.
"""

FAULTY, RANKS = 2, 4

ENDS = {
    "raise": ("connect", "distribute"),
    "skip": ("connect", "distribute", "first_call", "redistribute", "save"),
    "swap": ("connect", "distribute", "first_call", "redistribute", "save"),
}
"""The phases in which a fault ends the process: its script has not what it goes on with."""


def warm() -> None:
    """Imports what first calls import, so that ranks, forks of this process, are at one pace."""
    torch.set_num_threads(1)
    mesh = fd.Mesh(x=2)
    comm = fd.SimulatedComm(mesh)
    x = fd.distribute(torch.ones(4, 4), mesh.layout("x"), comm).requires_grad_()
    fd.spmd(lambda x: (x @ x).sum())(x).full().backward()
    with tempfile.TemporaryDirectory() as folder:
        fd.save_checkpoint({"x": x.detach()}, folder + "/x", comm)


if multiprocessing.current_process().name != "MainProcess":
    warm()


def live(
    rank: int, port: int, phase: str, fault: str, timeout: float, answers: Any, host: str | None
) -> None:
    """Runs the phases on a rank and sends what came of it: when, which error, usable after."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), MASTER_PORT=str(port))
    if host is None:
        own = {"TORCHELASTIC_USE_AGENT_STORE": "True", "GLOO_SOCKET_IFNAME": "lo"}
        os.environ.update(own, MASTER_ADDR="127.0.0.1")
    else:  # rank 0 keeps the store
        enter(host)
        os.environ.update(MASTER_ADDR=ADDRESS, GLOO_SOCKET_IFNAME=CABLE)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # where torch tells of every timeout
    has = SimpleNamespace(mesh=fd.Mesh(x=RANKS), timeout=timeout, factor=2.0, seed=1)
    has.name = f"fdtensor_faults_{port}"
    began = time.time()
    try:
        for name, run in _order(rank, phase, fault):
            if name == phase:
                began = time.time()
            run(has)
        fd.call(torch.neg, has.x).full()  # divergence is told here at the latest
        outcome = {"error": "", "kind": ""}
    except BaseException as error:
        outcome = {"error": str(error), "kind": type(error).__name__}
        if not isinstance(error, (fd.errors.FdtensorError, Boom, SystemExit, KeyboardInterrupt)):
            outcome["trace"] = traceback.format_exc()
        if isinstance(error, SystemExit) or (rank == FAULTY and phase in ENDS.get(fault, ())):
            own = {"rank": rank, "ended": time.time(), "began": began, "usable": "apart"}
            answers.send({**own, **outcome})
            _end(error)
    outcome["ended"] = time.time()
    answers.send(
        {"rank": rank, "began": began, **outcome, "usable": _usable(has, rank, phase, fault)}
    )


def _end(error: BaseException) -> None:
    """Ends this process as Python does; a process of `multiprocessing` would skip that."""
    if not isinstance(error, SystemExit):
        sys.excepthook(type(error), error, None)
    atexit._run_exitfuncs()
    os._exit(0)


class Boom(KeyError):
    """What the user's code raises."""


def _order(rank: int, phase: str, fault: str) -> list[tuple[str, Any]]:
    """The phases of this rank, the faulty one with its fault."""
    steps = list(PHASES.items())
    at = list(PHASES).index(phase)
    if fault == "interrupt" and rank == 0:
        steps.insert(at, (phase, _interrupted_soon))
    if rank != FAULTY:
        return steps
    match fault:
        case "kill":
            steps.insert(at, (phase, lambda _: os.kill(os.getpid(), signal.SIGKILL)))
        case "exit":
            steps.insert(at, (phase, lambda _: sys.exit(0)))
        case "raise":
            steps[at] = (phase, _raising)
        case "stop":
            steps.insert(at, (phase, lambda _: os.kill(os.getpid(), signal.SIGSTOP)))
        case "interrupt":
            steps.insert(at, (phase, lambda has: time.sleep(has.timeout / 2)))
        case "partition":
            steps.insert(at, (phase, lambda _: cut()))
        case "slow":
            steps.insert(at, (phase, lambda has: time.sleep(has.timeout / 2)))
        case "differ":
            steps.insert(at, (phase, lambda has: vars(has).update(factor=3.0, seed=2)))
        case "skip":
            del steps[at]
        case "swap" if at + 1 < len(steps):
            steps[at], steps[at + 1] = steps[at + 1], steps[at]
        case _:
            pass
    return steps


def _interrupted_soon(has: SimpleNamespace) -> None:
    """Lets this process get Ctrl-C while it waits."""
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()


def _raising(has: SimpleNamespace) -> None:
    """Raises inside of a call where the others do not."""

    def raises(x: Any) -> Any:
        raise Boom("lost")

    if not hasattr(has, "x"):
        raise Boom("lost")
    fd.spmd(raises)(has.x)


def _usable(has: SimpleNamespace, rank: int, phase: str, fault: str) -> str:
    """Whether the ranks that live can go on: on the same mesh, or on one without the faulty one."""
    try:
        mesh = has.mesh
        if not hasattr(has, "comm"):
            return "no group"
        if fault in ("kill", "exit", "stop") or phase in ENDS.get(fault, ()):
            mesh = fd.Mesh.from_ranks([r for r in range(RANKS) if r != FAULTY], ("x",))
            has.comm = fd.connect(mesh, timeout=has.timeout)
        elif fault == "partition":  # the store is on their host
            mesh = fd.Mesh.from_ranks([0, 1], ("x",))
            if rank not in mesh.order:
                return "apart"
            has.comm = fd.connect(mesh, timeout=has.timeout)
        x = fd.distribute(torch.ones(12), mesh.layout("x"), has.comm)
        total = fd.call(torch.sum, x).full().item()
        return "yes" if total == 12 else f"wrong: {total}"
    except BaseException as error:
        return f"{type(error).__name__}: {error}".partition("\n")[0]
