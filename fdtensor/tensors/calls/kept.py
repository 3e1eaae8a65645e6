"""`keep_few`: drops the programs of a function that were made first, where there are many."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

__all__ = ["CACHED", "keep_few"]

CACHED = 1024
"""How many programs a function keeps, the last ones."""

_COMMS = 32
"""For how many Comms it keeps them."""


def keep_few(programs: OrderedDict[Any, Any], quick: dict[Any, Any], guards: list[Any]) -> None:
    """Drops the programs that were made first: of many, and of the Comms before the last.

    They are by the keys of calls and of quick ones, which begin with a Comm, and in guards.
    """
    comms = list(dict.fromkeys(key[0] for key in programs))
    left = comms[0] if len(comms) > _COMMS else None
    old = [key for key in programs if key[0] is left]
    if len(programs) > CACHED:
        old.append(next(iter(programs)))
    gone = {id(programs.pop(key, None)) for key in old}
    if gone:
        guards.clear()
    for key in [k for k, entry in quick.items() if k[0] is left or id(entry) in gone]:
        del quick[key]
