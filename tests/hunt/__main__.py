"""`python -m tests.hunt`: random programs beside plain torch.

`python -m tests.hunt ops` takes the ops of torch's database, in every dtype.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import attrs

from tests.hunt.crew import Child
from tests.hunt.findings import Row, Rows, alike, known_as, ops_of, signature, stored_as, table
from tests.hunt.generate import Extent
from tests.hunt.records import Program
from tests.hunt.script import script
from tests.hunt.shrink import shrunk
from tests.hunt.ways import GOOD, Outcome
from tests.operators.progress import bar

SHRINKS = 2
"""How many failures of one signature are shrunk: more are only counted."""


def main() -> int:
    """Hunts; 1 where something is wrong that is not known."""
    if sys.argv[1:2] == ["ops"]:
        from tests.hunt.database import main as database

        return database(sys.argv[2:])
    given = _parser().parse_args()
    folder = given.out or Path(tempfile.mkdtemp(prefix="hunt-"))
    folder.mkdir(parents=True, exist_ok=True)
    extent = Extent(
        given.least, given.most, given.ranks, given.gloo, given.formats, tuple(given.without)
    )
    about = {"seed": given.seed, **attrs.asdict(extent), "without": given.without}
    rows = Rows(given.resume or folder / "hunt.jsonl", about)
    numbers = [given.program] if given.program is not None else range(given.first, given.programs)
    hunt = _Hunt(Child(given.limit), rows, folder, given.seed, extent, given.ways)
    end = time.monotonic() + given.seconds
    try:
        with bar() as progress:
            task = progress.add_task("programs", total=len(numbers))
            for number in numbers:
                if time.monotonic() > end:
                    break
                if number not in rows.numbers or given.program is not None:
                    text = hunt.hunted(number)
                    if text:
                        progress.print(text, markup=False, highlight=False, soft_wrap=True)
                progress.update(task, advance=1)
    except KeyboardInterrupt:
        pass
    finally:
        hunt.child.close()
    print(table(rows.rows))
    print(f"results in {rows.path}, scripts in {folder}")
    return int(any(row.signature and not known_as(row.signature) for row in rows.rows))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.hunt", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--programs", type=int, default=1000, help="numbers up to this one")
    parser.add_argument("--first", type=int, default=0, help="the first number")
    parser.add_argument("--program", type=int, help="this number alone, whether known or not")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="when to stop")
    parser.add_argument("--resume", type=Path, help="the file of results to go on with")
    parser.add_argument("--out", type=Path, help="where scripts go (default: a new folder)")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds until one is slow")
    parser.add_argument("--least", type=int, default=10, help="lines of a program, at least")
    parser.add_argument("--most", type=int, default=40, help="and at most")
    parser.add_argument("--gloo", action="store_true", help="small meshes on real ranks")
    parser.add_argument("--no-formats", dest="formats", action="store_false")
    parser.add_argument(
        "--without", nargs="*", default=[], help="ops and moments that are not drawn"
    )
    parser.add_argument(
        "--ways", nargs="*", default=[], help="the ways to run, all of them if none"
    )
    parser.add_argument("--ranks", type=int, default=12, help="the most ranks of a mesh")
    return parser


@attrs.frozen(eq=False)
class _Hunt:
    child: Child
    rows: Rows
    folder: Path
    seed: int
    extent: Extent
    ways: Sequence[str] = ()

    def hunted(self, number: int) -> str:
        """Runs a program and keeps what came of it; the text of a failure that is new."""
        program = self.child.draw(self.seed, number, self.extent)
        if isinstance(program, Outcome):
            self.rows.add(Row(number, "hunt", (), 0.0, "", f"drawing: {program.kind}"))
            return f"program {number} cannot be drawn: {program}"
        if self.ways and program.setting.way not in self.ways:
            return ""
        found = self.child.run(program)
        row = Row(number, found.kind, ops_of(program), found.seconds, program.setting.way)
        if found.kind in GOOD:
            self.rows.add(row)
            return ""
        raw = signature(found)
        if self.rows.counts[raw] >= SHRINKS:
            self.rows.add(attrs.evolve(row, signature=raw))
            return ""
        return self._kept(row, program, found)

    def _kept(self, row: Row, program: Program, found: Outcome) -> str:
        """Shrinks a failure, and keeps its script where there is none like it."""

        small = shrunk(program, lambda smaller: alike(self.child.run(smaller), found))
        seen = self.child.run(small)
        name = signature(seen, ops_of(small))
        new = not self.rows.counts[name]
        text = script(small, seen)
        path = stored_as(self.folder, name, text) if new else Path()
        self.rows.add(attrs.evolve(row, signature=name, script=path.name))
        return f"program {row.number}: {name}\n{text}" if new else ""


if __name__ == "__main__":
    raise SystemExit(main())
