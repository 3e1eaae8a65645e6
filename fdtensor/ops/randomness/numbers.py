"""`Numbers`: the random numbers of a function, with a stream for each of its random ops.

The state of torch's own generator tells which stream is next. Code that restores the state, as
`torch.utils.checkpoint` does before it recomputes a function, gets the same numbers again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from typing import Any, ClassVar

import torch

from fdtensor.layouts.errors import TraceError
from fdtensor.layouts.torch_private import without_modes
from fdtensor.ops.random_bits import RECORDING
from fdtensor.ops.randomness.draw import DRAW, draw_by

__all__ = ["PASS_A_KEY", "Numbers", "drawn_again"]

PASS_A_KEY = (
    "Pass one in the call: key=random.key(0); or switch dropout off with eval(), and build modules "
    "outside, or on the meta device."
)
"""What to do where there is no key, for a function of the user."""


def drawn_again() -> Callable[[], None]:
    """A function after which the stream is next that is next now, for code that runs again."""
    with without_modes():
        state = torch.default_generator.get_state()

    def back() -> None:
        with without_modes():
            torch.default_generator.set_state(state)

    return back


class Numbers:
    """The streams of the key that a function draws from, if it has one."""

    active: ClassVar[list[Numbers]] = []
    """Those of the functions that are running, the innermost last."""

    def __init__(self) -> None:
        self.key: torch.Tensor | None = None
        self._streams: dict[bytes, int] = {}
        self._before: torch.Tensor | None = None

    def stream(self) -> int:
        """The number of the next stream."""
        with without_modes():
            state = torch.default_generator.get_state()
            if self._before is None:
                self._before = state
            torch.rand(())  # on to the next state
            return self._streams.setdefault(state.numpy().tobytes(), len(self._streams))

    @contextlib.contextmanager
    def apart(self) -> Generator[None]:
        """A context for a function inside, with a key of its own: its streams count from 0."""
        before = self.key, self._streams
        self._streams = {}
        try:
            yield
        finally:
            self.key, self._streams = before

    @contextlib.contextmanager
    def aside(self) -> Generator[None]:
        """A context after which it is as if nothing had been drawn in it."""
        with without_modes():
            state = torch.default_generator.get_state()
        try:
            with self.apart():
                yield
        finally:
            with without_modes():
                torch.default_generator.set_state(state)

    def __enter__(self) -> Numbers:
        self.active.append(self)
        RECORDING.append(draw_by)
        return self

    def __exit__(self, *_: object) -> None:
        """Restores the state of torch's generator."""
        self.active.pop()
        RECORDING.pop()
        if self._before is not None:
            with without_modes():
                torch.default_generator.set_state(self._before)

    def draw(
        self, op: Any, kind: str, size: Sequence[int], dtype: torch.dtype, *ends: float
    ) -> torch.Tensor:
        """Numbers for the op; raises `TraceError` where there is no key."""
        if self.key is None:
            raise TraceError(
                f"{op} draws random numbers, and has no key to draw from.",
                hint=PASS_A_KEY,
            )
        return DRAW(self.key, self.stream(), kind, list(ends), list(size), dtype)
