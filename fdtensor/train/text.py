"""Real text that every Python has: the sources of its standard library, a token a byte."""

from __future__ import annotations

import functools
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch

__all__ = ["VOCABULARY", "batches", "corpus", "files"]

VOCABULARY = 256
"""How many tokens there are: the values of a byte."""

_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings"}
"""Folders that are not the library's own code, or are tables of numbers."""


def files() -> list[Path]:
    """The sources, in the order of their names: the same on every machine with this Python."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = []
    for folder, below, names in os.walk(root):
        below[:] = [name for name in below if name not in _LEFT_OUT]
        paths += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(path for path in paths if not path.is_symlink())


@functools.cache
def corpus() -> torch.Tensor:
    """All sources, one after the other, as uint8."""
    text = b"".join(path.read_bytes() for path in files())
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def batches(
    seed: int, steps: int, batch: int, length: int, text: torch.Tensor | None = None
) -> Iterator[torch.Tensor]:
    """The tokens of each step: int64 of shape (batch, length + 1), excerpts drawn at random.

    They depend on the seed and the step only: every rank, and a longer run, draws the same.
    Token `i + 1` is the one to predict from those up to `i`.
    """
    text = corpus() if text is None else text
    ahead = torch.arange(length + 1)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        starts = torch.randint(len(text) - length, (batch, 1), generator=generator)
        yield text[starts + ahead].long()
