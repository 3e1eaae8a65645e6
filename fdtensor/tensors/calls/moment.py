"""`Moment`: what held at a call, for what is recorded of its function later.

Derivatives of some results alone, and those of higher order, are recorded when they are first
wanted: under the settings of torch of the call, and of the values that it has read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fdtensor.layouts.errors import TraceError
from fdtensor.ops.ambient import Ambient, ambient, restored
from fdtensor.tensors.calls.reads import Reads, argument_key
from fdtensor.tensors.calls.text import shown

__all__ = ["Moment"]


class Moment:
    """The settings of torch at a call, and the values that its function is given and reads."""

    def __init__(self, reads: Reads, given: Sequence[tuple[str, Any]]) -> None:
        self._settings: Ambient = ambient()
        self._reads, self._given = reads, given
        self._values: list[tuple[str, Any]] | None = None

    def end(self) -> None:
        """Notes the values: what a recording itself has changed is no change."""
        self._values = self._now()

    def _now(self) -> list[tuple[str, Any]]:
        """The values as keys, each with its name."""
        given = [(name, argument_key(value)) for name, value in self._given]
        return [*self._reads.named(), *given]

    @contextlib.contextmanager
    def again(self, f: Callable[..., Any]) -> Iterator[None]:
        """A context with those settings. Raises `TraceError` where a value is another one now."""
        before, values = self._values or [], self._now() if self._values else []
        changed = next((a[0] for a, b in zip(before, values, strict=False) if a != b), None)
        if changed is None and len(before) != len(values):
            changed = "what it reads"
        if changed is not None:
            raise TraceError(
                f"{shown(f)} is recorded once more for this derivative, and {changed} has changed "
                "since the call.",
                hint="Take the derivative before it changes, or pass it as an argument.",
            )
        with restored(self._settings):
            yield
