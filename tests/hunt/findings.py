"""What a hunt keeps: a line for each program, and one script for each kind of failure."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import attrs

from tests.hunt.known import KNOWN
from tests.hunt.records import Program
from tests.hunt.ways import GOOD, Outcome

__all__ = [
    "Row",
    "Rows",
    "alike",
    "known_as",
    "message",
    "ops_of",
    "signature",
    "stored_as",
    "table",
]

BY_OPS = (
    "value",
    "shape",
    "dtype",
    "layout",
    "block",
    "replicas",
    "pending",
    "bytes",
    "mutated",
    "aliased",
    "crash",
    "slow",
    "poisoned",
)
"""Kinds of failure that the ops tell apart, not the message."""


def signature(found: Outcome, ops: Iterable[str] = ()) -> str:
    """What failures of the same cause have in common, as far as it shows."""
    names = " ".join(sorted(set(ops)))
    if found.kind == "missing":
        return f"missing: {found.op or names}: {message(found)}"
    if found.kind in BY_OPS:
        return f"{found.kind}: {names or found.op}"
    return f"{found.kind} {found.error}: {message(found)}"


def message(found: Outcome) -> str:
    """The text of an outcome without the values in it."""
    text = re.sub(r"'[^']*'|\"[^\"]*\"|`[^`]*`", "'...'", found.text)
    text = re.sub(r"\[[^\]]*\]|\([^)]*\)", "[...]", text)
    text = re.sub(r"-?\d+(\.\d+)?(e-?\d+)?", "#", text)
    text = re.sub(r"\b[a-z]+#?\[[^\]]*\](\{[^}]*\})?|torch\.\w+|aten\S*", "...", text)
    return text[:140]


def alike(found: Outcome, other: Outcome) -> bool:
    """Whether a smaller program fails as a larger one does."""
    if found.kind != other.kind or found.error != other.error:
        return False
    return found.kind not in ("error", "missing") or message(found) == message(other)


def known_as(name: str) -> str | None:
    """The sentence about a failure of this signature that is known, or None."""
    for pattern, sentence in KNOWN.items():
        if re.search(pattern, name):
            return sentence
    return None


@attrs.frozen
class Row:
    """What came of a program, in the file of results."""

    number: int
    kind: str
    ops: tuple[str, ...]
    seconds: float
    way: str
    signature: str = ""
    script: str = ""


class Rows:
    """The file of results: a line of JSON for each program, after one about the hunt."""

    def __init__(self, path: Path, about: dict[str, Any]) -> None:
        self.path, self.rows = path, []
        if path.exists():
            lines = [json.loads(t) for t in path.read_text().splitlines() if t.endswith("}")]
            if lines and lines[0] != about:
                raise SystemExit(f"{path} is of another hunt: {lines[0]}, not {about}")
            self.rows = [Row(**{**r, "ops": tuple(r["ops"])}) for r in lines[1:]]
        path.parent.mkdir(parents=True, exist_ok=True)
        if not self.rows:
            path.write_text(json.dumps(about) + "\n")

    def add(self, row: Row) -> None:
        """Keeps a row."""
        self.rows.append(row)
        with self.path.open("a") as file:
            file.write(json.dumps(attrs.asdict(row)) + "\n")

    @property
    def numbers(self) -> set[int]:
        """The programs that have run."""
        return {row.number for row in self.rows}

    @property
    def counts(self) -> Counter[str]:
        """How often each failure was seen."""
        return Counter(row.signature for row in self.rows if row.signature)


def stored_as(folder: Path, name: str, text: str) -> Path:
    """Where a script is kept; one file for each signature."""
    kind = re.sub(r"\W+", "_", name.split(":")[0]).strip("_")
    path = folder / f"{kind}_{hashlib.sha256(name.encode()).hexdigest()[:8]}.py"
    path.write_text(text)
    return path


def table(rows: list[Row]) -> str:
    """The summary: programs, ops covered, failures by kind and by signature."""
    kinds = Counter(row.kind for row in rows)
    ops = Counter(op for row in rows for op in row.ops)
    ways = Counter(row.way for row in rows)
    seconds = sum(row.seconds for row in rows)
    bad = [row for row in rows if row.kind not in GOOD]
    lines = [
        f"programs  {len(rows)}, {sum(len(row.ops) for row in rows)} lines, {seconds:.0f} s",
        f"ways      {', '.join(f'{k} {n}' for k, n in ways.most_common())}",
        f"kinds     {', '.join(f'{k} {n}' for k, n in kinds.most_common())}",
        f"ops       {len(ops)}: {', '.join(f'{k} {n}' for k, n in sorted(ops.items()))}",
        f"failures  {len(bad)}, {len({row.signature for row in bad})} distinct",
    ]
    first = {row.signature: row for row in reversed(bad)}
    for name, count in Counter(row.signature for row in bad).most_common():
        row = first[name]
        mark = "known  " if known_as(name) else "       "
        lines.append(f"  {count:5d}  {mark}{name}  (program {row.number}) {row.script}")
    return "\n".join(lines)


def ops_of(program: Program) -> tuple[str, ...]:
    """The ops of its lines."""
    return tuple(line.op for line in program.lines)
