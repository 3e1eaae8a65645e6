"""A cell: a phase and a fault on four processes, and what each rank had to say."""

from __future__ import annotations

import multiprocessing
import time
from typing import Any

import attrs
from torch.distributed import TCPStore

from tests.faults.partition import Hosts, two_hosts
from tests.faults.rank import FAULTY, RANKS, live

__all__ = ["Cell", "run_cell"]


@attrs.frozen
class Cell:
    """What came of a fault."""

    phase: str
    fault: str
    seconds: float
    """From the fault until all living ranks had an error; until all were done where none had."""
    errors: tuple[str, ...]
    """The different errors of living ranks, without that which the faulty one raised itself."""
    silent: bool
    """Whether some living rank had no error, and another had."""
    hangs: bool
    usable: tuple[str, ...]
    answers: tuple[dict[str, Any], ...]


def run_cell(phase: str, fault: str, timeout: float = 4.0) -> Cell:
    """Runs the phases on four processes, one of which does something wrong in one of them."""
    if fault != "partition":
        return _run(phase, fault, timeout, None)
    with two_hosts() as hosts:
        return _run(phase, fault, timeout, hosts)


def _run(phase: str, fault: str, timeout: float, hosts: Hosts | None) -> Cell:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.faults.rank"])
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes, processes = [], []
    for rank in range(RANKS):
        ours, theirs = context.Pipe(duplex=False)
        host = None if hosts is None else hosts.of(rank)
        args = (rank, store.port, phase, fault, timeout, theirs, host)
        process = context.Process(target=live, args=args)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    deadline = time.monotonic() + 4 * timeout + 30
    answers = []
    living = [r for r in range(RANKS) if r != FAULTY or fault not in ("kill", "stop", "exit")]
    for rank in living:
        if pipes[rank].poll(max(0.1, deadline - time.monotonic())):
            try:
                answers.append(pipes[rank].recv())
            except EOFError:
                answers.append({"rank": rank, "error": "died", "kind": "?", "usable": "no"})
    for process in processes:
        process.join(0.5 if len(answers) == len(living) else 0)
        process.kill()
    return _judged(phase, fault, answers, len(living))


def _judged(phase: str, fault: str, answers: list[dict[str, Any]], living: int) -> Cell:
    own = ("Boom", "KeyboardInterrupt", "AttributeError")  # of the user's script, on one rank
    fair = [a for a in answers if a["kind"] not in own]
    errors = tuple(dict.fromkeys(a["error"] for a in fair if a["error"]))
    began = [a["began"] for a in answers if a["rank"] == FAULTY and "began" in a]
    began = began or [max((a["began"] for a in answers if "began" in a), default=0.0)]
    ended = max((a["ended"] for a in answers if "ended" in a), default=0.0)
    failed = [a for a in answers if a["kind"]]
    return Cell(
        phase,
        fault,
        ended - began[0],
        errors,
        bool(failed) and len(failed) < len(answers),
        len(answers) < living,
        tuple(dict.fromkeys(a.get("usable", "no") for a in answers)),
        tuple(answers),
    )
