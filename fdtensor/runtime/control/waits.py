"""`waited`: the wait for what a call has begun and left under way."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from fdtensor.runtime.control.ledger import Ledger

__all__ = ["waited"]

T = TypeVar("T")


def waited(ledger: Ledger, wait: Callable[[], T]) -> T:
    """The result of `wait`. The last call of the ledger is open again for as long.

    So this rank hears, as in any call, of an error for which what it waits for does not come.
    """
    ledger.done = max(ledger.number - 1, 0)
    try:
        out = wait()
    except BaseException as error:
        raise ledger.failure(error)  # noqa: B904 - the same error, unless the network failed
    ledger.end()
    return out
