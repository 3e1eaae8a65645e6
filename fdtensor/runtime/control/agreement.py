"""`agree`: the ranks of a ledger compare what they are about to do, and what they did before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from zlib import crc32

import torch

from fdtensor.layouts.errors import CommError
from fdtensor.runtime.comm import misfit
from fdtensor.runtime.control.ledger import Ledger
from fdtensor.runtime.control.patience import Patience
from fdtensor.runtime.control.posts import Post, account, parting
from fdtensor.runtime.digests import lines_of, windows
from fdtensor.runtime.world import functional

__all__ = ["agree", "pooled"]

_MOST = 16384
"""The letters of a line that are told at most: every rank reads those of all."""

_all_gather = functional("all_gather_into_tensor")


def agree(ledger: Ledger, about: str, digest: str, mistake: str | None) -> None:
    """Raises `CommError` on all ranks if digests or calls before differ, or one has a mistake.

    Collective over the ranks of the ledger, in a group that carries no data.
    """
    ledger.begin(int(digest[:15], 16), about)
    try:
        error = _disagreement(ledger, about, digest, mistake)
    except BaseException as problem:
        raise ledger.failure(problem)  # noqa: B904 - the same error, unless the network failed
    if error is not None:
        ledger.plane.record()
        ledger.end()
        ledger.renewed()
        raise error
    ledger.end()


def pooled(ledger: Ledger, about: str, numbers: Sequence[int]) -> list[list[int]]:
    """What each rank of a ledger has in place of these numbers. Collective over its ranks."""
    return ledger.noted(len(numbers), about, _pooled, ledger, numbers)


def _disagreement(ledger: Ledger, about: str, digest: str, mistake: str | None) -> CommError | None:
    """The error of all ranks; None where they agree."""
    if not _differ(ledger, mistake is not None):
        return None
    board, own = ledger.board, _parted_line(ledger, digest)
    board.put(ledger.post("raised" if mistake else "waiting", mistake or own))
    _differ(ledger, False)  # every rank has posted now
    posts = board.posts(ledger.ranks)
    _differ(ledger, False)  # every rank has read what the others say
    mistakes = [post.text for post in posts.values() if post.kind == "raised"]
    if mistakes:
        error = misfit(about, "; ".join(mistakes))
    elif {(parting(posts), about)} == {(post.number, post.what) for post in posts.values()}:
        error = CommError(
            f"the ranks do not agree on {about}.",
            **{f"rank {r}": f"{text} at {posts[r].call}" for r, text in _texts(posts).items()},
            hint="Every rank must run the same plans, of the same types, in the same order.",
        )
    else:
        error = account(ledger.ranks, posts, ledger.plane.seconds).error()
    error.common = True
    return error


def _parted_line(ledger: Ledger, digest: str) -> str:
    """The first line that ranks do not have alike of what they compare, as this rank has it."""
    lines = lines_of(digest)
    longest = max(count for (count,) in _pooled(ledger, [len(lines)]))
    own = [crc32(line.encode()) for line in lines] + [-1] * (longest - len(lines))
    columns = zip(*_pooled(ledger, [*own, 0]), strict=True)
    parted = next(i for i, column in enumerate(columns) if len(set(column)) > 1 or i == longest)
    if parted == longest:  # they print the same
        return f"fingerprint {digest[:12]}"
    return lines[parted][:_MOST] if parted < len(lines) else "no more lines"


def _texts(posts: Mapping[int, Post]) -> dict[int, str]:
    return windows({rank: post.text for rank, post in posts.items()})


def _differ(ledger: Ledger, wrong: bool) -> bool:
    """Whether calls differ so far, or one rank has something wrong."""
    rows = _pooled(ledger, [ledger.number, ledger.mark, wrong])
    return any(row[2] or row != rows[0] for row in rows)


def _pooled(ledger: Ledger, numbers: Sequence[int]) -> list[list[int]]:
    group = ledger.plane.control_group(ledger)
    own = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    ledger.patience = Patience(ledger.plane.store, ledger.plane.seconds)
    try:
        return _all_gather(own, len(ledger.ranks), group).view(len(ledger.ranks), -1).tolist()
    finally:
        ledger.patience = None
