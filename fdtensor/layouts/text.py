"""`Text`: a str whose repr is itself; `spans`: numbers in few characters."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["Text", "spans"]


class Text(str):
    """A text that shows as it is, also where a prompt, a notebook or a list echoes it."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def spans(ranks: Iterable[int], comma: str = ",") -> str:
    """The ranks in few characters: `0-3` or `0,2-3`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return comma.join(str(run[0]) + (f"-{run[-1]}" if len(run) > 1 else "") for run in runs)
