"""`python -m tests.operators.table`: writes TABLE.md, which says what each op moves on each layout.

A row is the largest of some samples of an op, on a mesh of 4, forward: one operand at a time in
another layout than `R`; and what the combinations of `R` and `S` come to, all together. Bytes are
those that the busiest rank receives, by prices where bytes decide.
"""

from __future__ import annotations

import argparse
import multiprocessing
import warnings
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track

from fdtensor.layouts.layout import Layout
from fdtensor.layouts.placement import Partial
from fdtensor.layouts.tensor_type import TensorType
from tests.operators.check import Checked, Result, sharded
from tests.operators.layouts import LINE, combinations, single
from tests.operators.samples import Sample, entries, samples_of

__all__ = ["TABLE", "header", "row"]

TABLE = Path(__file__).with_name("TABLE.md")
MOST = 24
"""Combinations that the shares are taken over."""

TITLES = ("op", "operands", "moves nothing", "bytes moved", "on replicas", "free", "peak")


def row(name: str) -> str:
    """The line of an op."""
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _line(name, *_cells(name))


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _cells(name: str) -> tuple[str, ...]:
    found = samples_of(name, 8)
    if not found:
        return "no tensor goes in", "", "", "", "", ""
    sample = max(found, key=lambda s: sum(t.numel() for t in s.tensors))
    shapes = " ".join(f"{_letter(i)}{list(s)}".replace(" ", "") for i, s in _numbered(sample))
    try:
        checked = Checked(sample, derivatives=False)
    except Exception as error:
        return shapes, f"the plain op fails: {type(error).__name__}", "", "", "", ""
    free: list[str] = []
    moves: list[str] = []
    whole: list[str] = []
    for layouts in single(sample.tensors)[1:]:
        result = checked.result(layouts)
        what = _changed(layouts)
        if result.kind == "random":
            return shapes, "draws random numbers", "", "", "", ""
        if result.kind != "right":
            whole.append(f"{what} {result.kind}")
        elif result.fallback:
            bytes = "" if result.fallback == "data" else f"{result.bytes} "
            whole.append(f"{what} {bytes}({result.fallback})")
        elif result.bytes:
            moves.append(f"{what} {result.bytes}")
        else:
            free.append(what)
    together = [r for r in _together(checked, sample) if r.kind == "right"]
    shares = ["", ""]
    if together:
        quiet = sum(r.moves in ("none", "slice") for r in together)
        peak = sum(r.peak for r in together) / len(together)
        shares = [f"{quiet}/{len(together)}", f"{peak:.2f}"]
    return shapes, ", ".join(free), ", ".join(moves), ", ".join(whole), *shares


def _numbered(sample: Sample) -> list[tuple[int, tuple[int, ...]]]:
    return list(enumerate(sample.shapes))[:8]


def _letter(i: int) -> str:
    return "abcdefghijklmnopqrstuvwxyz"[i % 26]


def _changed(layouts: tuple[Layout, ...]) -> str:
    (i,) = (i for i, layout in enumerate(layouts) if layout != LINE.layout())
    return f"{_letter(i)}:{layouts[i].placements[0]}"


def _together(checked: Checked, sample: Sample) -> list[Result]:
    """The sharded combinations without pending terms."""
    found = []
    for layouts in combinations(sample.tensors, LINE, MOST, "table"):
        types = [TensorType(f.shape, f.dtype, lay) for f, lay in zip(checked.fulls, layouts)]
        pending = any(isinstance(lay.placements[0], Partial) for lay in layouts)
        if not pending and sharded(types):
            found.append(checked.result(layouts))
    return found


def header(rows: list[str]) -> list[str]:
    """What stands above the rows, with their totals."""
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in rows]
    quiet, count = 0, 0
    for line in cells:
        some, _, of = line[5].partition("/")
        if of:
            quiet, count = quiet + int(some), count + int(of)
    peaks = [float(line[6].rstrip(" |")) for line in cells if line[5]]
    whole = [line for line in cells if line[4]]
    return [
        "# What each op moves",
        "",
        "Written by `python -m tests.operators.table`; `test_operators.py` keeps it true.",
        "A sample of each op in torch's own database, on a mesh of 4 ranks, forward: for each",
        "layout of one operand, the others replicated, the bytes that the busiest rank receives.",
        "*On replicas* stands what gathers its operands, with the op that has no rule for them,",
        "or `data` where shapes depend on values. *Free*: of the combinations of `R` and `S(d)`",
        "with a sharded operand, how many receive nothing. *Peak*: the most bytes of a rank, as",
        "part of what replicated operands need.",
        "",
        f"{len(rows)} ops; {len(whole)} of them run on replicas for some layout; "
        f"{100 * quiet / max(1, count):.1f}% of {count} sharded combinations receive nothing; "
        f"mean peak {sum(peaks) / max(1, len(peaks)):.2f}.",
        "",
        _line(*TITLES),
        _line(*("---" for _ in TITLES)),
    ]


def main() -> int:
    """Writes the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.operators.table", description=__doc__)
    parser.add_argument("--workers", type=int, default=multiprocessing.cpu_count())
    given = parser.parse_args()
    names = list(entries())
    with multiprocessing.get_context("spawn").Pool(given.workers) as pool:
        made = pool.imap(row, names, chunksize=4)
        console = Console(stderr=True)
        rows = list(track(made, "ops", total=len(names), console=console))
    TABLE.write_text("\n".join([*header(rows), *rows]) + "\n")
    print("\n".join(header(rows)[-4:-3]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
