"""`bar`: what shows how far a measure is."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

__all__ = ["bar"]


def bar() -> Progress:
    """A progress bar on standard error: what is at work, how many are done, the time left."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=Console(stderr=True))
