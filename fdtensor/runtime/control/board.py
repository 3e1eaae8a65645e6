"""`Board`: where the ranks of a set post what has gone wrong, as keys in a store."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import attrs

from fdtensor.runtime.control.patience import Patience
from fdtensor.runtime.control.posts import Account, Post, account, not_back

__all__ = ["Board"]

ANSWER_SECONDS = 1.5
"""How long ranks that are alive have to say where they are."""

_SLICE = 0.02
"""Seconds between two looks at the board."""


@attrs.frozen
class Board:
    """The keys of a set of ranks from one error to the next; they begin with `prefix`.

    Whatever the store raises, such as at the end of the process that keeps it, goes to the caller.
    """

    store: Any
    prefix: str

    def ring(self, why: str) -> None:
        """Tells all ranks that something has gone wrong."""
        self._put("alarm", why)

    def rings(self) -> bool:
        """Whether some rank has told so."""
        return self.store.check([f"{self.prefix}/alarm"])

    def put(self, post: Post) -> None:
        """Hangs up what this rank says of itself."""
        self._put(f"post/{post.rank}", post.to_json())

    def posts(self, ranks: Iterable[int]) -> dict[int, Post]:
        """What the ranks say of themselves, of those that do."""
        posts = {}
        for rank in ranks:
            key = f"{self.prefix}/post/{rank}"
            if self.store.check([key]):
                posts[rank] = Post.from_json(self.store.get(key))
        return posts

    def account(self, ranks: Sequence[int], seconds: float) -> Account:
        """The account that all ranks give, when all that are alive have said where they are.

        `seconds` is how long they wait for each other.
        """
        latest = time.monotonic() + ANSWER_SECONDS
        posts = self.posts(ranks)
        while len(posts) < len(ranks) and time.monotonic() < latest:
            time.sleep(_SLICE)
            posts = self.posts(ranks)
        drawn = account(ranks, posts, seconds)
        return Account.from_json(self._first("account", drawn.to_json()))

    def mark(self, number: int, mark: int) -> int:
        """The fingerprint of call `number`: `mark`, unless another rank was first."""
        return int(self._first(f"mark/{number}", str(mark)))

    def forget(self, number: int) -> None:
        """Takes the fingerprint of a call down."""
        self.store.delete_key(f"{self.prefix}/mark/{number}")

    def come_back(self, rank: int, clean: bool) -> None:
        """Tells that a rank has raised its error, with nothing of it under way if `clean`."""
        self._put(f"back/{rank}", str(int(clean)))

    def back(self, ranks: Iterable[int]) -> dict[int, bool]:
        """The ranks that have raised their error, and whether nothing is under way of each."""
        keys = {rank: f"{self.prefix}/back/{rank}" for rank in ranks}
        told = {rank: key for rank, key in keys.items() if self.store.check([key])}
        return {rank: self.store.get(key) == b"1" for rank, key in told.items()}

    def all_back(self, ranks: Sequence[int], seconds: float) -> dict[int, bool]:
        """The same once all ranks have raised their errors; raises where one has not by then."""
        patience = Patience(self.store, seconds)
        while not self.store.check([f"{self.prefix}/back/{rank}" for rank in ranks]):
            if patience.is_over():
                raise not_back(ranks, [*self.back(ranks)], seconds)
            time.sleep(_SLICE)
        return self.back(ranks)

    def _put(self, name: str, text: str) -> None:
        key = f"{self.prefix}/{name}"
        self.store.set(key, text)
        self.store.check([key])  # a store answers no `set`: what others do next would overtake it

    def _first(self, name: str, text: str) -> str:
        return self.store.compare_set(f"{self.prefix}/{name}", "", text).decode()
