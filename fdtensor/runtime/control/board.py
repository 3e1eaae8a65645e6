"""`Board`: where the ranks of a set post what has gone wrong, as keys in a store."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs

from fdtensor.runtime.control.posts import Post

__all__ = ["Board"]


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
        found = {}
        for rank in ranks:
            key = f"{self.prefix}/post/{rank}"
            if self.store.check([key]):
                found[rank] = Post.from_json(self.store.get(key))
        return found

    def settled(self, text: str) -> str:
        """The one account of what has gone wrong: `text`, unless another rank was first."""
        return self._first("account", text)

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

    def all_back(self, ranks: Iterable[int]) -> bool:
        """Whether all ranks have raised their errors."""
        return self.store.check([f"{self.prefix}/back/{rank}" for rank in ranks])

    def _put(self, name: str, text: str) -> None:
        key = f"{self.prefix}/{name}"
        self.store.set(key, text)
        self.store.check([key])  # a store answers no `set`: what others do next would overtake it

    def _first(self, name: str, text: str) -> str:
        return self.store.compare_set(f"{self.prefix}/{name}", "", text).decode()
