"""What an error says to other ranks, and whether it came from the network."""

from __future__ import annotations

import torch

from fdtensor.layouts.errors import FdtensorError

__all__ = ["is_noted", "is_of_network", "note", "told_of"]


def told_of(error: BaseException) -> str:
    """An error in one line."""
    if isinstance(error, FdtensorError):
        return f"{type(error).__name__}: {error.sentence.removesuffix('.')}"
    first = str(error).partition("\n")[0]
    return type(error).__name__ + (f": {first}" if first else "")


def note(error: BaseException, name: str) -> None:
    """Notes on an error that other ranks have been told of it, as an error of this name."""
    error.__dict__.setdefault("_fdtensor_told", set()).add(name)


def is_noted(error: BaseException, name: str) -> bool:
    """Whether other ranks have been told of an error, or of one that it came from."""
    at: BaseException | None = error
    while at is not None:
        if name in at.__dict__.get("_fdtensor_told", ()):
            return True
        at = at.__cause__ or at.__context__
    return False


_NETWORK = ("gloo", "nccl", "Timed out", "timed out", "Connection", "connection", "pair closure",
            "Broken pipe", "socket", "Socket", "store")  # fmt: skip


def is_of_network(error: BaseException) -> bool:
    """Whether an error says that other ranks cannot be reached, in the words of torch."""
    if isinstance(error, FdtensorError) or not isinstance(error, RuntimeError):
        return False
    if isinstance(error, torch.distributed.DistError):
        return True
    return type(error) is RuntimeError and any(word in str(error) for word in _NETWORK)
