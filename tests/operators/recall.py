"""`python -m tests.operators.recall`: which of the rows that hold our rules have, and DTensor's.

The aten calls that torch's database of ops leads to are run on blocks by `discover`. Of the rows
that hold, ours has those of `rows_of`; DTensor has those whose operands it takes without moving
them, and whose results it gives the same placements.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, _dispatch, placement_types
from torch.testing._internal.distributed.fake_pg import FakeStore

from fdtensor.layouts.errors import FdtensorError
from fdtensor.layouts.placement import Partial, Placement, Shard
from fdtensor.ops.graph import Call, Full, Var, substituted
from fdtensor.ops.notation.core import rule_of
from fdtensor.ops.recorder import record
from fdtensor.ops.rules import Row
from fdtensor.testing.discovery import discover
from fdtensor.testing.discovery.search import attempts
from fdtensor.testing.discovery.trial import Sample, run
from tests.operators.check import gradient_of, tensors_in
from tests.operators.progress import bar
from tests.operators.samples import entries, float_tensors, samples_of

__all__ = ["Recalled", "calls_of", "fake_mesh", "recalled"]

LARGEST = 20_000
"""Elements of an operand beyond which a call is left out."""

MOST = 4_000
"""Attempts on a call beyond which it is left out: ops of many operands would take hours."""


@attrs.frozen(eq=False)
class Recalled:
    """A row that holds, and who has it."""

    op: str
    shapes: str
    row: str
    plain: bool
    """Whether its placements are R, S and pending sums."""
    ours: bool
    dtensor: bool


def calls_of(name: str, samples: int) -> Iterator[tuple[Any, Any, Any]]:
    """The aten calls of an entry of the database and of its gradients: op, args, kwargs."""
    for sample in samples_of(name, samples):
        wanted = float_tensors(sample.tensors)
        ways = [sample.f]
        if wanted and entries()[name].supports_autograd:
            ways.append(gradient_of(sample.f, wanted))
        for way in ways:
            yield from _calls(way, sample.tensors)


def _calls(f: Any, tensors: Sequence[torch.Tensor]) -> Iterator[tuple[Any, Any, Any]]:
    """The calls that a function makes on these tensors."""
    types = [Full(tuple(t.shape), t.dtype) for t in tensors]
    with warnings.catch_warnings(), contextlib.suppress(Exception):  # some cannot be recorded
        warnings.simplefilter("ignore")
        graph = record(lambda given: tensors_in(f(*given)), types)
        env: dict[Var, Any] = dict(zip(graph.inputs, tensors)) | dict(graph.constants)
        for call in graph.calls:
            args, kwargs = substituted((call.args, call.kwargs), env.__getitem__)
            order = {v: Var(i) for i, v in enumerate(call.ins)}
            given = [env[v] for v in order]
            numbered = substituted((call.args, call.kwargs), order.__getitem__)
            made = run(Call(call.op, *numbered, call.outs), given)
            env.update((v, t) for v, t in zip(call.outs, made) if v is not None)
            yield call.op, args, dict(kwargs)


def chosen(found: Iterable[tuple[Any, Any, Any]], most: int) -> dict[Any, list[Any]]:
    """At most so many calls of each op that has a rule, those whose dims tell most first."""
    by_op: dict[Any, dict[str, tuple[float, Any]]] = {}
    for op, args, kwargs in found:
        tensors = tensors_in((args, tuple(kwargs.values())))
        if rule_of(op) is None or not tensors or any(t.numel() > LARGEST for t in tensors):
            continue
        sizes = [n for t in tensors for n in t.shape]
        tells = len({n for n in sizes if n > 2}) + 0.1 * sum(n > 2 for n in sizes)
        shapes = [tuple(t.shape) for t in tensors]
        if sizes and min(sizes) and sum(n > 1 for n in sizes):
            ndims = str([len(s) for s in shapes])
            known = by_op.setdefault(op, {})
            if ndims not in known or known[ndims][0] < tells:
                known[ndims] = tells, (tuple(args), kwargs)
    return {
        op: [call for _, call in sorted(calls.values(), key=lambda c: -c[0])[:most]]
        for op, calls in by_op.items()
    }


def recalled(op: Any, args: Any, kwargs: Any, mesh: DeviceMesh) -> list[Recalled]:
    """The rows of a call that hold, and who has each."""
    sample = Sample.of(op, args, kwargs)
    if sum(1 for _ in attempts(sample)) > MOST:
        raise FdtensorError(f"{op} takes too many tensors.")
    found = discover(op, (args, kwargs))
    missing = set(found.missing())
    shapes = ", ".join(str(list(t.shape)) for t in sample.tensors)
    rest = [a for a in (*args, *kwargs.items()) if not tensors_in((a,))]
    text = f"{shapes}; {rest}" if rest else shapes
    return [
        Recalled(str(op), text, str(r), _plain(r), r not in missing, by_dtensor(sample, r, mesh))
        for case in found.cases
        for r in case.rows
    ]


def _plain(row: Row) -> bool:
    return all(p == Partial("sum") or not isinstance(p, Partial) for p in (*row.ins, *row.outs))


class _Moved(Exception):
    """DTensor wants to move an operand."""


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise _Moved


def by_dtensor(sample: Sample, row: Row, mesh: DeviceMesh) -> bool:
    """Whether DTensor takes the operands as they are and gives the results of the row."""
    try:
        with _unmoved(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            held = [_placed(t, p, mesh) for t, p in zip(sample.tensors, row.ins)]
            made = run(sample.call, held)
    except Exception:
        return False
    if len(made) != len(row.outs) or not all(isinstance(t, DTensor) for t in made):
        return False
    return [t.placements for t in made] == [(to_torch(p),) for p in row.outs]


def to_torch(placement: Placement) -> placement_types.Placement:
    """The placement of DTensor that is the same."""
    match placement:
        case Shard(dim):
            return placement_types.Shard(dim)
        case Partial(op):
            return placement_types.Partial(op)
    return placement_types.Replicate()


@contextlib.contextmanager
def _unmoved() -> Iterator[None]:
    """Within, DTensor raises where it would move an operand."""
    known = _dispatch.redistribute_local_tensor
    _dispatch.redistribute_local_tensor = _refuse
    try:
        yield
    finally:
        _dispatch.redistribute_local_tensor = known


def _placed(tensor: torch.Tensor, placement: Placement, mesh: DeviceMesh) -> DTensor:
    """What the first rank has of a tensor."""
    local = tensor
    if isinstance(placement, Shard):
        local = tensor.chunk(mesh.size(), placement.dim)[0].contiguous()
    return DTensor.from_local(
        local,
        mesh,
        [to_torch(placement)],
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


@contextlib.contextmanager
def fake_mesh() -> Iterator[DeviceMesh]:
    """A mesh of two ranks that do not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        yield DeviceMesh("cpu", [0, 1])
    finally:
        dist.destroy_process_group()


def main() -> None:
    """Prints who has which share of the rows that hold, and those that we lack."""
    parser = argparse.ArgumentParser(prog="python -m tests.operators.recall", description=__doc__)
    parser.add_argument("ops", nargs="*", help="names or beginnings of names; default: all")
    parser.add_argument("--samples", type=int, default=3, help="samples of an entry (default 3)")
    parser.add_argument("--calls", type=int, default=2, help="calls of an op (default 2)")
    parser.add_argument("--results", type=Path, default=Path("build/recall.jsonl"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    names = [n for n in entries() if not given.ops or any(n.startswith(o) for o in given.ops)]
    found: list[Recalled] = []
    given.results.parent.mkdir(parents=True, exist_ok=True)
    with bar() as progress, given.results.open("w") as file:
        task = progress.add_task("recording", total=len(names))
        seen = []
        for name in names:
            progress.update(task, advance=1, description=f"recording {name}"[:32])
            seen += calls_of(name, given.samples)
        calls = chosen(seen, given.calls)
        task = progress.add_task("discovering", total=len(calls))
        with fake_mesh() as mesh:
            for op, each in calls.items():
                progress.update(task, advance=1, description=str(op)[:32])
                for args, kwargs in each:
                    try:
                        rows = recalled(op, args, kwargs, mesh)
                    except (FdtensorError, RuntimeError) as error:
                        progress.print(f"{op}: {str(error)[:200]}", markup=False)
                        continue
                    found += rows
                    file.writelines(json.dumps(attrs.asdict(r)) + "\n" for r in rows)
                    file.flush()
    report(found)


def report(found: Sequence[Recalled]) -> None:
    """Prints the totals and what we lack, by op."""
    for what, some in (
        ("R, S and P(sum)", [r for r in found if r.plain]),
        ("with maxima, minima and averages", found),
    ):
        ours, theirs = sum(r.ours for r in some), sum(r.dtensor for r in some)
        count = len(some)
        print(f"{what}: {count} rows of {len({r.op for r in some})} ops")
        print(
            f"    fdtensor {ours} ({share(ours, count)}), DTensor {theirs} ({share(theirs, count)})"
        )
    lacking: dict[str, dict[str, Recalled]] = {}
    for r in found:
        if r.plain and not r.ours:
            lacking.setdefault(r.op, {}).setdefault(r.row, r)
    for op, rows in lacking.items():
        print(op)
        for row, r in rows.items():
            print(f"    {row}    {r.shapes[:80]}{'    DTensor has it' * r.dtensor}")


def share(part: int, whole: int) -> str:
    """A part as a percentage."""
    return f"{100 * part / max(1, whole):.1f}%"


if __name__ == "__main__":
    main()
