"""`digest_of`: fingerprints of what ranks compare, which keep what they are of, for errors."""

from __future__ import annotations

import hashlib

__all__ = ["Digest", "digest_of", "lines_of", "windows"]

_BEFORE, _LONGEST = 60, 300
"""The letters before the first that differs, and of the longest text, that an error tells."""


class Digest(str):
    """A hexadecimal fingerprint, and `of`, what it is of, which prints what errors tell."""

    __slots__ = ("of",)

    def __new__(cls, digest: str, *of: object) -> Digest:
        """The fingerprint of a plan, its cost model or the like."""
        self = super().__new__(cls, digest)
        self.of = of
        return self


def digest_of(text: str) -> Digest:
    """A hexadecimal fingerprint of a text."""
    return Digest(hashlib.sha256(text.encode()).hexdigest()[:32], text)


def lines_of(digest: str) -> list[str]:
    """The lines of what a fingerprint is of; of one that does not keep it, none."""
    of = digest.of if isinstance(digest, Digest) else ()
    return [" ".join(line.split()) for part in of for line in str(part).splitlines()]


def windows(texts: dict[int, str]) -> dict[int, str]:
    """The parts of long texts that show where they first differ."""
    if all(len(text) <= _LONGEST for text in texts.values()):
        return texts
    columns = enumerate(zip(*texts.values(), strict=False))  # as far as the shortest goes
    shortest = min(map(len, texts.values()))
    parted = next((i for i, letters in columns if len(set(letters)) > 1), shortest)
    return {key: _window(text, max(0, parted - _BEFORE)) for key, text in texts.items()}


def _window(text: str, start: int) -> str:
    end = start + _LONGEST
    return ("... " if start else "") + text[start:end] + (" ..." if end < len(text) else "")
