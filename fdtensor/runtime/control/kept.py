"""`entries`: the last calls of a ledger, which it keeps in two rings, in their order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["KEPT", "Entry", "Record", "entries"]

KEPT = 2048
"""How many calls are kept."""

Record = tuple[int, int, Any, Any, float]
"""A call: its number, the fingerprint up to it, what it was, the user's place, when it began."""

Entry = tuple[int, int, Any, Any, float, float | None]
"""A call, and when it ended, in seconds since 1970; None where it has not."""


def entries(records: Sequence[Record | None], ended: Sequence[float], done: int) -> list[Entry]:
    """The calls that are kept, in order; those up to number `done` have ended."""
    kept = sorted(filter(None, records), key=lambda record: record[0])
    return [(*r, ended[r[0] % KEPT] if r[0] <= done else None) for r in kept]
