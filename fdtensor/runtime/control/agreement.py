"""`agree`: the ranks of a ledger compare what they are about to do, and what they did before."""

from __future__ import annotations

import torch

from fdtensor.layouts.errors import CommError
from fdtensor.runtime.comm import misfit
from fdtensor.runtime.control.ledger import Ledger
from fdtensor.runtime.control.posts import account
from fdtensor.runtime.world import functional

__all__ = ["agree"]

_all_gather = functional("all_gather_into_tensor")


def agree(ledger: Ledger, about: str, digest: str, mistake: str | None) -> None:
    """Raises `CommError` on all ranks if digests or calls before differ, or one has a mistake.

    Collective over the ranks of the ledger, in a group that carries no data.
    """
    ledger.begin(int(digest[:15], 16), about)
    try:
        error = _disagreement(ledger, about, mistake)
    except BaseException as problem:
        raise ledger.failure(problem)  # noqa: B904 - the same error, unless the network failed
    ledger.end()
    if error is not None:
        ledger.renewed()
        raise error


def _disagreement(ledger: Ledger, about: str, mistake: str | None) -> CommError | None:
    """The error of all ranks; None where they agree."""
    group = ledger.plane.control_group(ledger.ranks)
    facts = torch.tensor([ledger.number, ledger.mark, mistake is not None])
    rows = _all_gather(facts, len(ledger.ranks), group).view(-1, 3).tolist()
    if not any(row[2] for row in rows) and all(row == rows[0] for row in rows):
        return None
    board = ledger.board
    board.put(ledger.post("raised" if mistake else "waiting", mistake or ""))
    _all_gather(facts, len(ledger.ranks), group)  # every rank has posted now
    posts = board.posts(ledger.ranks)
    mistakes = [post.text for post in posts.values() if post.kind == "raised"]
    if mistakes:
        error = misfit(about, "; ".join(mistakes))
    elif all(row == rows[0] for row in rows):
        return None
    else:
        error = account(ledger.ranks, posts, ledger.plane.seconds, about).error()
    _all_gather(facts, len(ledger.ranks), group)  # every rank has read them
    error.common = True
    return error
