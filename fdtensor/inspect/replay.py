"""`replayed`: what the records of ranks tell, where they part, and whether their steps run."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fdtensor.layouts.errors import CommError, FdtensorError
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.layouts.text import Text, spans
from fdtensor.plans.planner import Plan
from fdtensor.programs.program import Program
from fdtensor.runtime.control.posts import Call, Post, parting
from fdtensor.runtime.interpreter import run
from fdtensor.runtime.simulator import SimulatedComm
from fdtensor.tensors.distribution import distribute
from fdtensor.tensors.dtensor import DTensor

__all__ = ["replayed"]

AROUND = 2
"""How many calls are shown before and after the one at which ranks part."""

Record = Mapping[str, Any]


def replayed(folder: str | os.PathLike[str]) -> Text:
    """What the records in a folder tell, as `fd.io.dump_calls` writes them: one for each rank.

    Where ranks part, the calls around that; else where each of them is. Then every plan that they
    ran runs on simulated ranks, and must give the tensor that it moves, and so does every program.
    Raises `CommError` where there are no records.
    """
    paths = sorted(Path(folder).glob("rank*.json"))
    if not paths:
        raise CommError(
            f"there are no records in {str(folder)!r}.",
            hint="fd.io.dump_calls(comm, folder) writes them; FDTENSOR_CALLS=folder, at an error.",
        )
    records = [json.loads(path.read_text()) for path in paths]
    lines = [f"records of {_named([record['rank'] for record in records])}"]
    for ranks in dict.fromkeys(tuple(s["ranks"]) for record in records for s in record["sets"]):
        lines += _set(ranks, records)
    ran = {digest: part for record in records for digest, part in record["ran"].items()}
    return Text("\n".join([*lines, *_run_again(ran)]))


def _set(ranks: tuple[int, ...], records: Sequence[Record]) -> Iterator[str]:
    """The lines about a set of ranks."""
    calls: dict[int, dict[int, Record]] = {}
    posts: dict[int, Post] = {}
    for record in records:
        for own in record["sets"]:
            if tuple(own["ranks"]) == ranks:
                calls[record["rank"]] = {call["number"]: call for call in own["calls"]}
                posts[record["rank"]] = _post(record["rank"], own["calls"])
    last = max((post.number for post in posts.values()), default=0)
    number = parting(posts)
    said = "they agree" if number is None else f"they part at call {number}"
    yield f"\n{_named(ranks)}, {last} calls since the last error: {said}"
    shown = range(last, last + 1) if number is None else range(number - AROUND, number + AROUND + 1)
    for n in shown:
        groups: dict[str, list[int]] = {}
        for rank in calls:
            groups.setdefault(_told(calls[rank].get(n), posts[rank].number), []).append(rank)
        for text, some in groups.items():
            if text:
                mark = ">" if n == number else " "
                yield f"  {mark} call {n:<5} {_named(some)}: {text}"


def _post(rank: int, calls: Sequence[Record]) -> Post:
    kept = tuple([Call(c["number"], c["mark"], c["what"], c["line"]) for c in calls])
    return Post(rank, "waiting", kept[-1].number if kept else 0, calls=kept)


def _told(call: Record | None, last: int) -> str:
    if call is None:
        return f"not there: the last is call {last}" if last else ""
    line = f" {call['line']}" if call["line"] else ""
    took = (
        "not ended" if call["ended"] is None else f"{1e3 * (call['ended'] - call['began']):.1f} ms"
    )
    return f"`{call['what']}`{line}, {took}"


def _run_again(ran: Mapping[str, Record]) -> Iterator[str]:
    """What came of every plan and program on simulated ranks."""
    yield ""
    problems = 0
    for digest, part in ran.items():
        try:
            _try(part)
        except FdtensorError as error:
            problems += 1
            yield f"{part['kind']} {digest[:12]}: {error.sentence}"
    plans = sum(part["kind"] == "plan" for part in ran.values())
    what = f"{plans} plans and {len(ran) - plans} programs"
    yield f"{what} on simulated ranks: {f'{problems} fail' if problems else 'all run'}"


def _try(part: Record) -> None:
    """Runs a plan or a program; raises where it does not, or moves a tensor wrongly."""
    if part["kind"] == "program":
        program = Program.from_json(part["json"])
        comm = SimulatedComm(program.mesh)
        run(program, [_some(type, comm).local for type in program.in_types], comm)
        return
    plan = Plan.from_json(part["json"])
    ranks = sorted({*plan.src.mesh.order, *plan.dst.mesh.order})
    comm = SimulatedComm(Mesh.from_ranks(ranks, "ranks"))
    before = _some(plan.src, comm)
    after = DTensor(run(plan, before.local, comm), plan.dst, comm)
    if not torch.equal(before.full(), after.full()):
        raise CommError("it does not give the tensor that it moves.")


def _some(type: TensorType, comm: Any) -> DTensor[Any]:
    """A tensor of this type, of small numbers."""
    full = (torch.arange(type.numel) % 2).reshape(type.shape).to(type.dtype)
    return distribute(full, type.layout, comm)


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {spans(ranks, ', ')}"
