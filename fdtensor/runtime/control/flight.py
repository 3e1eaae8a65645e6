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
from fdtensor.runtime.control.ledger import KEPT, Ledger
from fdtensor.runtime.control.places import line_of
from fdtensor.runtime.control.posts import Ran, described

__all__ = ["FOLDER", "dump_calls", "flight_record", "write"]

FOLDER = "FDTENSOR_CALLS"
"""The variable of the environment that names a folder, to which ranks write at an error."""


def flight_record(rank: int, ledgers: Sequence[Ledger]) -> dict[str, Any]:
    """The last calls of a rank, on each set of ranks, in order.

    A call has its number, the fingerprint up to it, its name, where it was, what it receives at
    most, and when it began and ended, in seconds since 1970. `ran` has each plan and program once.
    """
    ran: dict[str, Any] = {}
    sets = []
    for ledger in ledgers:
        records = filter(None, ledger.records)
        calls = [_call(ledger, record, ran) for record in sorted(records, key=lambda r: r[0])]
        facts = {"ranks": ledger.ranks, "errors": ledger.epoch, "failed": ledger.failed}
        sets.append({**facts, "calls": calls})
    return {"rank": rank, "sets": sets, "ran": ran}


def _call(ledger: Ledger, record: Any, ran: dict[str, Any]) -> dict[str, Any]:
    number, mark, what, place, began = record
    ended = ledger.ended[number % KEPT] if number <= ledger.done else None
    facts = {"number": number, "mark": mark, "what": described(what), "line": line_of(place)}
    facts |= {"began": began, "ended": ended}
    for part in _parts(what):
        if isinstance(part, (Plan, Program)):
            digest = part.digest
            if digest not in ran:
                kind = "plan" if isinstance(part, Plan) else "program"
                ran[digest] = {"kind": kind, "json": _json(part)}
            facts.setdefault("ran", []).append(digest)
            facts["bytes"] = facts.get("bytes", 0) + part.received_bytes
    return facts


def _parts(what: Any) -> Sequence[Any]:
    """The plans of a call, or its program if it is still there."""
    match what:
        case Fused():
            return what.plans
        case Ran():
            return (what.program(),)
        case _:
            return (what,)


def _json(part: Plan | Program) -> str:
    try:
        return part.to_json()
    except (TypeError, ValueError) as error:  # a program of functions that no name finds
        return json.dumps({"unwritten": str(error)})


def dump_calls(comm: Any, folder: str | os.PathLike[str]) -> Path:
    """Writes the last calls of this rank to a file in a folder, and returns its path.

    They are the last 2,048 on each set of ranks: what each call was, where, what it receives, when
    it began and ended. `python -m fdtensor replay FOLDER` reads the files of all ranks. Ranks write
    by themselves at an error where the variable FDTENSOR_CALLS names a folder. Raises `CommError`
    on simulated ranks, which have one process, and cannot part.

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
