"""The life of a rank: the phases in order, with a fault in one of them, and what came of it."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from types import SimpleNamespace
from typing import Any

import torch

import fdtensor as fd
from tests.faults.phases import PHASES

__all__ = ["FAULTS", "FAULTY", "RANKS", "live"]

FAULTS = ("kill", "exit", "raise", "stop", "slow", "skip", "swap")
"""What the faulty rank does in place of a phase; `slow` is within the time that others wait."""

FAULTY, RANKS = 2, 4


def live(rank: int, port: int, phase: str, fault: str, timeout: float, answers: Any) -> None:
    """Runs the phases on a rank and sends what came of it: when, which error, usable after."""
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(RANKS),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        GLOO_SOCKET_IFNAME="lo",
    )
    torch.set_num_threads(1)
    has = SimpleNamespace(mesh=fd.Mesh(x=RANKS), timeout=timeout, name=f"fdtensor_faults_{port}")
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
        if not isinstance(error, (fd.CommError, fd.errors.FdtensorError, Boom, SystemExit)):
            outcome["trace"] = traceback.format_exc()
        if isinstance(error, SystemExit):
            answers.send({"rank": rank, "ended": time.time(), "began": began, **outcome})
            raise
    outcome["ended"] = time.time()
    answers.send({"rank": rank, "began": began, **outcome, "usable": _usable(has, phase, fault)})


class Boom(KeyError):
    """What the user's code raises."""


def _order(rank: int, phase: str, fault: str) -> list[tuple[str, Any]]:
    """The phases of this rank, the faulty one with its fault."""
    steps = list(PHASES.items())
    if rank != FAULTY or phase not in PHASES:
        return steps
    at = list(PHASES).index(phase)
    match fault:
        case "kill":
            steps.insert(at, (phase, lambda _: os.kill(os.getpid(), signal.SIGKILL)))
        case "exit":
            steps.insert(at, (phase, lambda _: sys.exit(0)))
        case "raise":
            steps[at] = (phase, _raising)
        case "stop":
            steps.insert(at, (phase, lambda _: os.kill(os.getpid(), signal.SIGSTOP)))
        case "slow":
            steps.insert(at, (phase, lambda has: time.sleep(has.timeout / 2)))
        case "skip":
            del steps[at]
        case "swap" if at + 1 < len(steps):
            steps[at], steps[at + 1] = steps[at + 1], steps[at]
        case _:
            pass
    return steps


def _raising(has: SimpleNamespace) -> None:
    """Raises inside of a call where the others do not."""

    def raises(x: Any) -> Any:
        raise Boom("lost")

    if not hasattr(has, "x"):
        raise Boom("lost")
    fd.spmd(raises)(has.x)


def _usable(has: SimpleNamespace, phase: str, fault: str) -> str:
    """Whether the ranks that live can go on: on the same mesh, or on one without the faulty one."""
    try:
        mesh = has.mesh
        if fault in ("kill", "exit", "stop"):
            mesh = fd.Mesh.from_ranks([r for r in range(RANKS) if r != FAULTY], ("x",))
            has.comm = fd.connect(mesh, timeout=has.timeout)
        x = fd.distribute(torch.ones(12), mesh.layout("x"), has.comm)
        total = fd.call(torch.sum, x).full().item()
        return "yes" if total == 12 else f"wrong: {total}"
    except BaseException as error:
        return f"{type(error).__name__}: {error}".partition("\n")[0]
