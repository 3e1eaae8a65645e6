"""`replayed`: what the records of ranks tell, where they part, and whether their steps run."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fdtensor.inspect.records import CallSet, Stored, read_record
from fdtensor.layouts.errors import CommError, FdtensorError
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.layouts.text import Text, spans
from fdtensor.plans.planner import Plan
from fdtensor.programs.program import Program
from fdtensor.runtime.control.posts import parting
from fdtensor.runtime.interpreter import run
from fdtensor.runtime.simulator import SimulatedComm
from fdtensor.tensors.distribution import distribute
from fdtensor.tensors.dtensor import DTensor

__all__ = ["replayed"]

AROUND = 2
"""How many calls are shown before and after the one at which ranks part."""


def replayed(folder: str | os.PathLike[str]) -> Text:
    """What the records in a folder tell, as `fd.io.dump_calls` writes them: one for each rank.

    Where ranks part, the calls around that; else where each of them is. Then every plan that they
    ran runs on simulated ranks, and must give the tensor that it moves, and so does every program.
    Raises `CommError` where there are no records, or a file is none.
    """
    paths = sorted(Path(folder).glob("rank*.json"))
    if not paths:
        raise CommError(
            f"there are no records in {str(folder)!r}.",
            hint="fd.io.dump_calls(comm, folder) writes them; FDTENSOR_CALLS=folder, at an error.",
        )
    records = [read_record(path) for path in paths]
    lines = [f"records of {_named([record.rank for record in records])}"]
    epochs: dict[tuple[tuple[int, ...], int], dict[int, CallSet]] = {}
    for record in records:
        for own in record.sets:
            epochs.setdefault((own.ranks, own.errors), {})[record.rank] = own
    for (ranks, errors), sets in sorted(epochs.items()):
        is_last = errors > 0 and (ranks, errors + 1) not in epochs
        lines += _told_of(ranks, " since the last error" if is_last else "", sets)
    ran = {digest: part for record in records for digest, part in record.ran.items()}
    return Text("\n".join([*lines, *_run_again(ran)]))


def _told_of(ranks: tuple[int, ...], when: str, sets: Mapping[int, CallSet]) -> Iterator[str]:
    """The lines about what ranks called on a set of ranks, up to an error or since one."""
    posts = {rank: own.post(rank) for rank, own in sets.items()}
    last = max(post.number for post in posts.values())
    least = min(post.number for post in posts.values())
    number = parting(posts)
    if number is not None:
        said, first, end = f"they part at call {number}", number - AROUND, number + AROUND
    else:
        said = "they agree" if least == last else f"they agree up to call {least}"
        first, end = max(least, last - AROUND), last
    yield f"\n{_named(ranks)}, {last} calls{when}: {said}"
    for n in range(max(first, 1), min(end, last) + 1):
        groups: dict[str, list[int]] = {}
        for rank, own in sets.items():
            groups.setdefault(own.told(n), []).append(rank)
        for text, some in groups.items():
            mark = ">" if n == number else " "
            yield f"  {mark} call {n:<5} {_named(some)}: {text}"


def _run_again(ran: Mapping[str, Stored]) -> Iterator[str]:
    """What came of every plan and program on simulated ranks."""
    yield ""
    problems = 0
    for digest, part in ran.items():
        try:
            _try(part)
        except FdtensorError as error:
            problems += 1
            yield f"{part.kind} {digest[:12]}: {error.sentence}"
    plans = sum(part.kind == "plan" for part in ran.values())
    what = f"{plans} plans and {len(ran) - plans} programs"
    yield f"{what} on simulated ranks: {f'{problems} fail' if problems else 'all run'}"


def _try(part: Stored) -> None:
    """Runs a plan or a program; raises where it does not, or moves a tensor wrongly."""
    if part.kind == "program":
        program = Program.from_json(part.json)
        comm = SimulatedComm(program.mesh)
        run(program, [_some(type, comm).local for type in program.in_types], comm)
        return
    plan = Plan.from_json(part.json)
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
