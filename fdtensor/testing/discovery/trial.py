"""`judged`: which trials hold when an op runs on blocks, in many settings."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import attrs
import torch

from fdtensor.layouts.dtypes import reducible
from fdtensor.layouts.placement import Partial, Placement, Replicate, Shard
from fdtensor.ops.graph import Full
from fdtensor.testing.discovery.sample import Place, Sample, Setting, close, cut, run
from fdtensor.testing.values import reduced

__all__ = ["PENDING", "Attempt", "Judged", "R", "Trial", "judged", "size_cut"]

R = Replicate()
PENDING = tuple(Partial(op) for op in ("sum", "max", "min", "avg"))


@attrs.frozen
class Attempt:
    """Placements of the operands that may be those of a row."""

    ins: tuple[Placement, ...]
    resized: tuple[tuple[Place, int], int] | None = None
    """An argument that is the shape of an output, and the dim of it that is cut."""

    def fits(self, sample: Sample) -> bool:
        """Whether the sample has these dims, of one size."""
        ins = sample.ins
        if len(ins) != len(self.ins):
            return False
        size = size_cut(self.ins, ins)
        if self.resized is None or size is None:
            return size is not None
        (place, number), dim = self.resized
        if (place, number) not in sample.sizes() or dim >= sample.outs[number].ndim:
            return False
        length = sample.outs[number].shape[dim]
        return length > 1 and size in (0, length)


def size_cut(placements: Sequence[Placement], ins: Sequence[Full]) -> int | None:
    """The one size of the dims that are cut, 0 where none is; None where they cannot be cut so."""
    sizes = set()
    for p, full in zip(placements, ins, strict=True):
        if isinstance(p, Shard):
            if p.dim >= full.ndim or full.shape[p.dim] < 2:
                return None
            sizes.add(full.shape[p.dim])
        elif isinstance(p, Partial) and not reducible(full.dtype, p.reduce_op):
            return None
    return None if len(sizes) > 1 else next(iter(sizes), 0)


@attrs.frozen(eq=False)
class Trial:
    """An attempt and the samples on which it must hold, by number."""

    attempt: Attempt
    samples: tuple[int, ...]


def plains(size: int | None) -> list[Setting]:
    """The settings in which a row must hold: those that divide a dim of `size` and that do not."""
    if size is None:
        return [Setting(count, seed=seed) for seed, count in enumerate((2, 3, 4, 2, 3))]
    settings = [Setting(n, "even", n) for n in (3, 2, 4) if n <= size]
    return settings + [Setting(2, "chunk", 7)] * (size > 2)


def mixes(size: int | None) -> list[Setting]:
    """Those in which blocks are any part of a dim."""
    return [Setting(n, "mixed", seed) for n, seed in ((2, 5), (3, 6)) if size and n <= size]


def empties(size: int | None) -> list[Setting]:
    """Those in which ranks hold nothing."""
    return [Setting(3, "empty", 3)] + [Setting(4, "chunk", 4)] * (size < 4) if size else []


PHASES = (plains, mixes, empties, empties)
"""The phases of a trial: plain cuts; any cuts; empty blocks where the op takes them; all."""


Judged = tuple[int, int, tuple[Placement, ...] | None]
"""The number of a trial, a phase, and the outputs of the row if it holds."""


def judged(
    draws: Sequence[Sequence[Sample]],
    trials: Sequence[Trial],
    start: int = 0,
    fatal: Collection[tuple[int, int]] = (),
    note: Any = None,
) -> Iterator[Judged]:
    """The verdicts of trials from `start` on, but for phases that kill; notes the current one."""
    for number in range(start, len(trials)):
        trial, outs = trials[number], None
        for phase in range(len(PHASES) + 1):
            if (number, phase) in fatal:
                if phase == 0:
                    break
                continue
            if note is not None:
                note[:16] = struct.pack("qq", number, phase)
            samples = [draws[i] for i in trial.samples]
            if phase == len(PHASES):
                placed = outs if _stretches(samples[0][0], trial.attempt) else None
            else:
                placed = _holds(samples, trial.attempt, phase, outs)
            outs = outs if phase else placed
            if outs is None:
                break
            yield number, phase, placed


def _stretches(sample: Sample, attempt: Attempt) -> bool:
    """Whether the op runs when one of the operands that are cut has size 1 there."""
    cuts = [(i, p.dim) for i, p in enumerate(attempt.ins) if isinstance(p, Shard)]
    for i, dim in cuts if len(cuts) > 1 else ():
        tensors = list(sample.tensors)
        tensors[i] = tensors[i].narrow(dim, 0, 1)
        with contextlib.suppress(Exception):
            run(sample.call, tensors)
            return True
    return False


def _holds(
    draws: Iterable[Sequence[Sample]],
    attempt: Attempt,
    phase: int,
    outs: tuple[Placement, ...] | None,
) -> tuple[Placement, ...] | None:
    """The outputs of the row, which are `outs` if they are known; None where it does not hold."""
    options: list[set[Placement]] | None = [{p} for p in outs] if outs else None
    for samples in draws:
        for sample in samples:
            size = size_cut(attempt.ins, sample.ins) or None
            if attempt.resized is not None:
                (_, number), dim = attempt.resized
                size = sample.outs[number].shape[dim]
            for setting in PHASES[phase](size):
                possible = outcome(sample, attempt, setting, size, strict=phase != 2)
                if possible is None:
                    return None
                options = (
                    possible
                    if options is None
                    else [a & b for a, b in zip(options, possible, strict=True)]
                )
                if not all(options):
                    return None
    if options is None:
        return None
    return tuple(min(o, key=_rank) for o in options)


def _rank(placement: Placement) -> int:
    """The simplest first: what is replicated is also a maximum of its terms."""
    order = (R, Partial("max"), *PENDING)
    return order.index(placement) if placement in order else 1


def outcome(
    sample: Sample, attempt: Attempt, setting: Setting, size: int | None, strict: bool
) -> list[set[Placement]] | None:
    """The placements that each output may have when an op runs on blocks; None where one has none.

    Dims of `size` are cut. Unless `strict`, a rank may refuse operands that are empty.
    """
    operands = [sample.blocks(i, p, setting) for i, p in enumerate(attempt.ins)]
    expected = [_due(sample, i, size, setting) for i in range(len(sample.outs))]
    resized: list[Any] = [None] * setting.count
    if attempt.resized is not None:
        (place, number), dim = attempt.resized
        blocks = expected[number][Shard(dim)]
        expected[number] = {Shard(dim): blocks}
        resized = [(place, list(block.shape)) for block in blocks]
    possible = [set(options) for options in expected]
    terms: list[list[torch.Tensor]] = [[] for _ in expected]
    for rank in range(setting.count):
        ins = [blocks[rank] for blocks in operands]
        try:
            results = run(sample.call, ins, resized[rank])
        except Exception:
            if strict or not any(
                b.numel() == 0 < t.numel() for b, t in zip(ins, sample.tensors, strict=True)
            ):
                return None
            continue
        if len(results) != len(expected):
            return None
        for i, block in enumerate(results):
            possible[i] = {p for p in possible[i] if _may_be(block, expected[i][p][rank], p)}
            if not possible[i]:
                return None
            terms[i].append(block)
    for i, out in enumerate(sample.outs):
        pending = [p for p in possible[i] if isinstance(p, Partial)]
        if pending and terms[i]:
            stacked = torch.stack(terms[i])
            possible[i] -= {p for p in pending if not close(reduced(stacked, p.reduce_op), out)}
    return possible if all(possible) else None


def _due(
    sample: Sample, number: int, size: int | None, setting: Setting
) -> dict[Placement, list[torch.Tensor]]:
    """The placements that an output may have, each with what the ranks hold then."""
    key = number, size, setting
    if key not in sample.due:
        out = sample.outs[number]
        whole = [out] * setting.count
        blocks: dict[Placement, list[torch.Tensor]] = {R: whole}
        blocks |= {p: whole for p in PENDING if reducible(out.dtype, p.reduce_op)}
        cuts = [d for d, n in enumerate(out.shape) if n == size]
        sample.due[key] = blocks | {Shard(d): cut(out, d, setting) for d in cuts}
    return sample.due[key]


def _may_be(block: torch.Tensor, expected: torch.Tensor, placement: Placement) -> bool:
    if isinstance(placement, Partial):
        return block.shape == expected.shape and block.dtype == expected.dtype
    return close(block, expected)
