"""`Patience`: how long a rank waits for others, some of which may be planning."""

from __future__ import annotations

import time
from typing import Any

__all__ = ["Patience", "tell_of_planning"]

_KEY = "planning"
"""The key in the store that counts how often some rank has said that it plans."""

_EVERY = 0.25
"""Seconds between two looks at it, so that a fault is told that much late at most."""


def tell_of_planning(store: Any) -> None:
    """Tells all ranks that this one plans: it chooses layouts, or writes a program down."""
    store.add(_KEY, 1)


class Patience:
    """The end of a wait for others: `seconds` after it began, or after one last said that it plans.

    Choosing layouts takes as long as the model is large and the machine busy: a rank that is late
    for that reason is not a fault.
    """

    def __init__(self, store: Any, seconds: float) -> None:
        self.store, self.seconds = store, seconds
        now = time.monotonic()
        self.latest, self.next = now + seconds, now + _EVERY
        self.said: int | None = None

    def is_over(self) -> bool:
        """Whether the wait is over; looks at the store four times a second at most."""
        now = time.monotonic()
        if now < self.next:
            return False
        self.next = now + _EVERY
        said = self.store.add(_KEY, 0)
        if self.said not in (None, said):
            self.latest = now + self.seconds
        self.said = said
        return now > self.latest
