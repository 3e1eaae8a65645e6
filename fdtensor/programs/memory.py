"""`bytes_held`: what ranks hold while each line of a program runs, as a run really does.

A value that is a view shares the memory of the one it is a view of. Inputs and constants are the
caller's and stay; other memory is freed after the last line that reads a value in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import numpy.typing as npt
import torch

from fdtensor.layouts.remembered import remembered
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.ops.graph import Var
from fdtensor.ops.loop_ops import ENTRY, LOOP_IN, LOOP_OUT, WITH_ENTRY
from fdtensor.ops.notation.reshape import UNSAFE
from fdtensor.plans.collectives import Step
from fdtensor.programs.eqn import Eqn, Together, is_view_line, parts
from fdtensor.programs.local_calls import held_beside, takes_several
from fdtensor.programs.loops import loops_among

if TYPE_CHECKING:
    from fdtensor.programs.program import Program

Bytes = npt.NDArray[Any]
"""Of int64, or of Python's integers where a sum of blocks might not fit in it."""

LARGE_BLOCK = 2**40

__all__ = [
    "Bytes",
    "Lines",
    "Usage",
    "buffer_bytes",
    "bytes_held",
    "least_held",
    "lines_of",
    "lives",
    "local_bytes",
    "owners",
    "sizes",
    "usage_of",
]


@attrs.frozen(eq=False)
class Lines:
    """The lines of a program, without checks of its types."""

    inputs: frozenset[int]
    """The numbers of its inputs and constants."""
    eqns: tuple[Eqn, ...]
    outs: tuple[Var, ...]
    types: Sequence[TensorType]
    ranks: tuple[int, ...]
    """The ranks whose bytes count."""


def lines_of(program: Program, ranks: tuple[int, ...]) -> Lines:
    """The lines of a program, on these ranks."""
    sources = (*program.inputs, *(v for v, _ in program.constants))
    inputs = frozenset(v.index for v in sources)
    return Lines(inputs, program.eqns, program.outs, program.types, ranks)


def owners(lines: Lines) -> list[int]:
    """For each value the number of the one whose memory it is in: itself, or what it is a view of.

    What was reduced together is in the memory of the first of it.
    """
    owner = list(range(len(lines.types)))
    views = parts(lines.eqns)
    maker: dict[Var | None, Eqn] = {}
    for i, eqn in enumerate(lines.eqns):
        shares = i in views or eqn.op in (LOOP_OUT, ENTRY, WITH_ENTRY)
        shares = shares or (is_view_line(eqn) and not _copies(eqn, maker))
        maker.update(dict.fromkeys(eqn.outs, eqn))
        source = owner[eqn.ins[0].index] if shares else _first(eqn)
        for v in eqn.outs:
            if v is not None and source is not None:
                owner[v.index] = source
    return owner


def _copies(eqn: Eqn, maker: Mapping[Var | None, Eqn]) -> bool:
    """Whether what stands for a view is a copy: of what lies in another order than its dims.

    torch writes this op for a reshape that copies, and after products of matrices, which are new.
    """
    if eqn.op is not UNSAFE:
        return False
    made_by = maker.get(eqn.ins[0])
    if made_by is None or is_view_line(made_by):
        return True
    return torch.Tag.pointwise in getattr(made_by.op, "tags", ())


def _first(eqn: Eqn) -> int | None:
    """The number of the value whose memory all results of a line are in; None for their own."""
    first = eqn.outs[0] if eqn.outs else None
    if eqn.op is LOOP_IN:  # a tie is the same tensor
        return next(v.index for v in eqn.outs if v is not None)
    return first.index if first is not None and _is_one_buffer(eqn) else None


def _is_one_buffer(eqn: Eqn) -> bool:
    return isinstance(eqn.op, Together) and eqn.op.collective.one_buffer


def sizes(lines: Lines, owner: Sequence[int]) -> dict[int, Bytes]:
    """For each memory its bytes on each rank."""
    known = {v: local_bytes(lines.types[v], lines.ranks) for v in lines.inputs}
    for eqn in lines.eqns:
        for v in eqn.outs:
            if v is not None and (owner[v.index] == v.index or _is_one_buffer(eqn)):
                size, first = local_bytes(lines.types[v.index], lines.ranks), owner[v.index]
                known[first] = known[first] + size if first in known else size
    return known


def lives(lines: Lines, owner: Sequence[int]) -> dict[int, list[int]]:
    """For each memory, the lines that make it and read it; -1 for inputs, the last for outputs."""
    ends: dict[int, list[int]] = {v: [-1] for v in lines.inputs}
    for i, eqn in enumerate(lines.eqns):
        for v in (*eqn.ins, *eqn.outs):
            if v is not None:
                times = ends.setdefault(owner[v.index], [])
                if not times or times[-1] != i:
                    times.append(i)
    for loop in loops_among(lines.eqns):
        for times in ends.values():  # what a loop reads of before stays until its end
            if times[0] < loop.start <= times[-1] < loop.stop:
                times.append(loop.stop - 1)
    for v in {owner[v.index] for v in lines.outs}:
        ends[v].append(len(lines.eqns))
    return ends


@attrs.frozen(eq=False)
class Usage:
    """What memory the values of some lines are in, when it is held, and how much of it there is."""

    owner: Sequence[int]
    """For each value the number of the one whose memory it is in."""
    sizes: Mapping[int, Bytes]
    """For each memory its bytes on each rank."""
    lives: Mapping[int, Sequence[int]]
    """For each memory, the lines that make it and read it; -1 for inputs, the last for outputs."""
    held: Bytes
    """The bytes that each rank holds while each line runs: a row for each line."""


def usage_of(lines: Lines) -> Usage:
    """What memory these lines use."""
    owner = owners(lines)
    size_of, times = sizes(lines, owner), lives(lines, owner)
    return Usage(owner, size_of, times, _held(lines, owner, size_of, times))


def bytes_held(lines: Lines) -> Bytes:
    """The bytes that each of `lines.ranks` holds while each line runs, results and buffers counted.

    An array of a row for each line and a column for each rank.
    """
    return usage_of(lines).held


def least_held(lines: Lines) -> int:
    """The bytes without which no order of these lines runs, whatever is made again.

    Those of the inputs, and of what the line with the most reads and gives, on the rank with most.
    """
    owner = owners(lines)
    size_of = sizes(lines, owner)
    given = sum([local_bytes(lines.types[v], lines.ranks) for v in lines.inputs])
    most = np.zeros(len(lines.ranks), np.int64)
    # the steps of a line that has several may run one after the other
    eqns = [eqn for eqn in lines.eqns if not isinstance(eqn.op, Together)]
    for values in (*((*eqn.ins, *filter(None, eqn.outs)) for eqn in eqns), lines.outs):
        own: dict[int, Bytes] = {}
        for v in values:
            memory = owner[v.index]
            if memory not in lines.inputs:
                size = local_bytes(lines.types[v.index], lines.ranks)
                size = np.minimum(size, size_of[memory])  # views may overlap, as those of unfold
                own[memory] = np.maximum(own.get(memory, size), size)
        most = np.maximum(most, sum(own.values(), np.zeros_like(most)))
    return int(np.max(given + most))


def _held(
    lines: Lines,
    owner: Sequence[int],
    size_of: Mapping[int, Bytes],
    times: Mapping[int, Sequence[int]],
) -> Bytes:
    count = len(lines.eqns)
    kind = np.result_type(np.int64, *(size.dtype for size in size_of.values()))
    change = np.zeros((count + 2, len(lines.ranks)), kind)
    waits = _waits(lines)
    last = {v: ends[-1] for v, ends in times.items()}
    for i, wait in waits.items():
        eqn = lines.eqns[i]
        for v in eqn.ins if eqn.steps[0].collective.keeps_operands(eqn.steps) else ():
            last[owner[v.index]] = max(last[owner[v.index]], wait - 1)
    for v, size in size_of.items():
        change[max(times[v][0], 0)] += size
        if v not in lines.inputs:
            change[last[v] + 1] -= size
    after = change.cumsum(0)
    held = after[: max(count, 1)]
    for i, eqn in enumerate(lines.eqns):
        if eqn.steps:
            until = waits.get(i, i + 1)
            held[i:until] = held[i:until] + buffer_bytes(eqn, lines.ranks)
        elif takes_several(eqn):
            held[i] = held[i] + _beside(eqn, i, lines, owner, last)
    written = {v for eqn in lines.eqns if eqn.op is WITH_ENTRY for v in eqn.outs}
    for loop in loops_among(lines.eqns):
        for i in range(loop.rounds, loop.stop):  # each a copy, until the next step begins
            if lines.eqns[i].ins[1] in written:
                continue  # in the memory of what it was
            copied = local_bytes(lines.types[lines.eqns[i].ins[1].index], lines.ranks)
            held[i : loop.stop] = held[i : loop.stop] + copied
    # a result in the memory of an input is copied, last of all
    results = [v for v in dict.fromkeys(lines.outs) if owner[v.index] in lines.inputs]
    copies = sum([local_bytes(lines.types[v.index], lines.ranks) for v in results])
    held[-1] = np.maximum(held[-1], after[count] + copies)
    return held


def _beside(eqn: Eqn, i: int, lines: Lines, owner: Sequence[int], last: Mapping[int, int]) -> Bytes:
    """The bytes that each rank holds beside what line `i` reads and gives."""
    memories = [owner[v.index] for v in eqn.ins]
    freed = [  # what has memory of its own, which goes with this line
        m == v.index and m not in lines.inputs and last[m] == i and memories.count(m) == 1
        for v, m in zip(eqn.ins, memories, strict=True)
    ]
    return _integers([held_beside(eqn, lines.types, r, tuple(freed)) for r in lines.ranks])


def _waits(lines: Lines) -> dict[int, int]:
    """For each line that sends, the first one that reads a result of it."""
    first: dict[Var, int] = dict.fromkeys(lines.outs, len(lines.eqns))
    waits: dict[int, int] = {}
    for i in reversed(range(len(lines.eqns))):
        eqn = lines.eqns[i]
        if eqn.is_collective:
            waits[i] = min([first.get(v, i + 1) for v in eqn.outs if v is not None], default=i + 1)
        first.update(dict.fromkeys(eqn.ins, i))
    return waits


@remembered(1 << 16)
def local_bytes(type: TensorType, ranks: tuple[int, ...]) -> Bytes:
    """The bytes of the block of each rank."""
    return _integers([type.local_nbytes(rank) for rank in ranks])


def buffer_bytes(eqn: Eqn, ranks: tuple[int, ...]) -> Bytes:
    """The bytes of the buffers of a line of steps, beside its operands and results, by rank."""
    if isinstance(eqn.op, Step) and eqn.op.collective.is_part:
        return np.zeros(len(ranks), np.int64)
    results = np.sum([local_bytes(step.dst, ranks) for step in eqn.steps], 0)
    return _working_bytes(eqn.steps, ranks) - results


@remembered(1 << 16)
def _working_bytes(steps: tuple[Step, ...], ranks: tuple[int, ...]) -> Bytes:
    """The bytes of the results and the buffers of the steps of a line, by rank."""
    kind, (step, *others) = steps[0].collective, steps
    if others:
        return _integers([kind.working_together(steps, rank) for rank in ranks])
    itemsize = step.src.dtype.itemsize
    return _integers([kind.working_numel(step, r, owned=False) * itemsize for r in ranks])


def _integers(values: list[int]) -> Bytes:
    return np.array(values, object if max(values) > LARGE_BLOCK else np.int64)
