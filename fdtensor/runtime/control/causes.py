"""What an error says to other ranks, and whether it came from the network."""

from __future__ import annotations

import torch

from fdtensor.layouts.errors import FdtensorError

__all__ = ["is_of_network", "told_of"]


def told_of(error: BaseException) -> str:
    """An error in one line."""
    if isinstance(error, FdtensorError):
        return f"{type(error).__name__}: {error.sentence.removesuffix('.')}"
    first = str(error).partition("\n")[0]
    return type(error).__name__ + (f": {first}" if first else "")


_NETWORK = ("gloo", "nccl", "Timed out", "timed out", "Connection", "connection", "pair closure",
            "Broken pipe", "socket", "Socket", "store")  # fmt: skip


def is_of_network(error: BaseException) -> bool:
    """Whether an error says that other ranks cannot be reached, in the words of torch."""
    if isinstance(error, FdtensorError) or not isinstance(error, RuntimeError):
        return False
    if isinstance(error, torch.distributed.DistError):
        return True
    return type(error) is RuntimeError and any(word in str(error) for word in _NETWORK)
