"""What an error says to other ranks, whether it came from the network, and errors without posts."""

from __future__ import annotations

from collections.abc import Container, Sequence

import torch

from fdtensor.layouts.errors import CommError, FdtensorError
from fdtensor.layouts.text import spans

__all__ = ["is_of_network", "not_back", "told_of", "without_store"]


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


def without_store(ranks: Sequence[int], rank: int, at: str, problem: str) -> CommError:
    """The error where the store is gone, so that nobody hears of the others."""
    return CommError(
        "the store through which ranks find each other does not answer: the process that keeps "
        "it has ended or cannot be reached.",
        ranks=", ".join(map(str, ranks)),
        **{f"rank {rank}": at},
        problem=problem.partition("\n")[0],
        hint="Rank 0 keeps it where torchrun does not. Start all ranks again.",
    )


def not_back(ranks: Sequence[int], back: Container[int], seconds: float) -> CommError:
    """The error where some ranks have not raised the last one."""
    return CommError(
        f"not all ranks have raised the last error within {seconds:g} s.",
        missing=spans([rank for rank in ranks if rank not in back], ", "),
        hint="Connect a mesh of the ranks that are left, or start all of them again.",
    )
