"""`flight_record`: the last calls of a rank as data, with the plans and programs that they ran.

`dump_calls` writes it to a file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fdtensor.layouts.errors import CommError
from fdtensor.layouts.expected import check_path
from fdtensor.plans.fused import Fused
from fdtensor.plans.planner import Plan
from fdtensor.programs.program import Program
from fdtensor.runtime.comm import refuse_no_comm
from fdtensor.runtime.control.kept import Entry
from fdtensor.runtime.control.ledger import Ledger
from fdtensor.runtime.control.places import line_of
from fdtensor.runtime.control.posts import Ran, described

__all__ = ["FOLDER", "dump_calls", "flight_record", "write"]

FOLDER = "FDTENSOR_CALLS"
"""The variable of the environment that names a folder, to which ranks write at an error."""


def flight_record(rank: int, ledgers: Sequence[Ledger]) -> dict[str, Any]:
    """The last calls of a rank, on each set of ranks, in order.

    Those since the last error are a set of their own, after those before it. A call has its number,
    the fingerprint up to it, its name, where it was, what it receives at most, and when it began
    and ended, in seconds since 1970. `ran` has each plan and program once.
    """
    ran: dict[str, Any] = {}
    sets = []
    for ledger in ledgers:
        before = ledger.epoch - 1, True, ledger.before
        since = ledger.epoch, ledger.failed, ledger.entries()
        for epoch, failed, entries in (before, since):
            calls = [_call(entry, ran) for entry in entries]
            facts = {"ranks": ledger.ranks, "errors": epoch, "failed": failed}
            sets += [{**facts, "calls": calls}] if calls else []
    return {"rank": rank, "sets": sets, "ran": ran}


def _call(entry: Entry, ran: dict[str, Any]) -> dict[str, Any]:
    number, mark, what, place, began, ended = entry
    facts = {"number": number, "mark": mark, "what": described(what), "line": line_of(place)}
    facts |= {"began": began, "ended": ended}
    for part in what.plans if isinstance(what, Fused) else (what,):
        if isinstance(part, (Plan, Ran)):
            facts["bytes"] = facts.get("bytes", 0) + part.received_bytes
            if _stored(part, ran):
                facts.setdefault("ran", []).append(part.digest)
    return facts


def _stored(part: Plan | Ran, ran: dict[str, Any]) -> bool:
    """Puts a plan or a program into `ran`; False for a program that nobody has any more."""
    if part.digest not in ran:
        kind, whole = ("plan", part) if isinstance(part, Plan) else ("program", part.program())
        if whole is None:
            return False
        ran[part.digest] = {"kind": kind, "json": _json(whole)}
    return True


def _json(part: Plan | Program) -> str:
    try:
        return part.to_json()
    except (TypeError, ValueError) as error:  # a program of functions that no name finds
        return json.dumps({"unwritten": str(error)})


def dump_calls(comm: Any, folder: str | os.PathLike[str]) -> Path:
    """Writes the last calls of this rank to a file in a folder, and returns its path.

    They are the last 2,048 on each set of ranks: what each call was, where, what it receives, when
    it began and ended, and the plans that ran, with the programs that are still there.
    `python -m fdtensor replay FOLDER` reads the files of all ranks. Ranks write by themselves at an
    error where the variable FDTENSOR_CALLS names a folder. Raises `CommError` on simulated ranks,
    which have one process, and cannot part.

    >>> import tempfile
    >>> def calls(folder):
    ...     comm = connect(Mesh(x=2))
    ...     distribute(torch.arange(4), Mesh(x=2).layout("x"), comm).full()
    ...     return fd.io.dump_calls(comm, folder).name
    >>> with tempfile.TemporaryDirectory() as folder, local_cluster(2) as ranks:
    ...     print(ranks.run(calls, folder))
    ['rank0.json', 'rank1.json']
    """
    refuse_no_comm(comm)
    check_path("folder", folder)
    if comm.rank is None:
        raise CommError(
            "simulated ranks share a process, and keep no calls.",
            comm=comm,
            hint="Connect a mesh of processes: torchrun, or local_cluster(n).",
        )
    return write(comm.rank, list(comm.plane.ledgers.values()), folder)


def write(rank: int, ledgers: Sequence[Ledger], folder: str | os.PathLike[str]) -> Path:
    """Writes the record of a rank to a folder, and returns its path."""
    path = Path(folder) / f"rank{rank}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    record = flight_record(rank, ledgers)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(record))
    part.replace(path)
    return path
