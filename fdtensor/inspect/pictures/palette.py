"""Colors of blocks: their lightness rises with the rank, so that they also read in grey.

The anchors are those of viridis (Smith and van der Walt, 2015, matplotlib), which is made for
readers who do not tell red from green.
"""

from __future__ import annotations

import functools

__all__ = ["color", "ink"]

_ANCHORS = (
    (0x44, 0x01, 0x54),
    (0x48, 0x28, 0x78),
    (0x3E, 0x49, 0x89),
    (0x31, 0x68, 0x8E),
    (0x26, 0x82, 0x8E),
    (0x1F, 0x9E, 0x89),
    (0x35, 0xB7, 0x79),
    (0x6E, 0xCE, 0x58),
    (0xB5, 0xDE, 0x2B),
    (0xFD, 0xE7, 0x25),
)
_FROM, _TO = 0.14, 0.94
"""The part of the range that is used: its ends are close to the backgrounds of pages."""


def color(t: float) -> str:
    """The color at `t`, from 0 (dark) to 1 (light), as `#rrggbb`."""
    return "#" + "".join(f"{round(part):02x}" for part in _rgb(t))


def ink(t: float) -> str:
    """The color of text on `color(t)`: white or black, whichever contrasts more."""
    light = _luminance(_rgb(t))
    return "#ffffff" if 1.05 / (light + 0.05) > (light + 0.05) / 0.05 else "#000000"


@functools.cache
def _rgb(t: float) -> tuple[float, ...]:
    place = (_FROM + (_TO - _FROM) * min(1.0, max(0.0, t))) * (len(_ANCHORS) - 1)
    i = min(int(place), len(_ANCHORS) - 2)
    low, high = _ANCHORS[i], _ANCHORS[i + 1]
    return tuple(a + (b - a) * (place - i) for a, b in zip(low, high, strict=True))


def _luminance(rgb: tuple[float, ...]) -> float:
    """Relative luminance, as WCAG 2 defines it."""
    linear = [c / 255 / 12.92 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in rgb]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
