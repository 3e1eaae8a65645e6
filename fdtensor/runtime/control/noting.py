"""`noting`: a function whose calls a ledger notes, by `counting` where they are brief."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import get_ident
from typing import TYPE_CHECKING, Any

from fdtensor.programs.program import Program
from fdtensor.runtime.control.kept import KEPT

if TYPE_CHECKING:
    from fdtensor.runtime.control.ledger import Ledger

__all__ = ["counting", "is_brief", "noting"]


def is_brief(program: Program) -> bool:
    """Whether a program is an op or two of this rank alone."""
    return len(program.eqns) < 3 and not program.collectives


def noting(
    ledger: Ledger, fact: int, what: Any, sends: bool, function: Callable[..., Any]
) -> Callable[..., Any]:
    """The function, whose calls are open from their begin to their end."""

    def noted(*args: Any) -> Any:
        ledger.begin(fact, what, sends)
        try:
            out = function(*args)
        except BaseException as error:
            raise ledger.failure(error)  # noqa: B904 - the same error, unless the network failed
        ledger.end()
        return out

    return noted


def counting(
    ledger: Ledger, fact: int, what: Any, function: Callable[..., Any]
) -> Callable[..., Any]:
    """The same of a function that is soon done and waits for nobody: noted once it has run."""

    def counted(*args: Any) -> Any:
        if ledger.stop or get_ident() != ledger.thread:
            ledger.halt()
        try:
            out = function(*args)
        except BaseException as error:
            ledger.begin(fact, what, False)
            raise ledger.failure(error)  # noqa: B904 - the same error, unless the network failed
        moment, number = time.time(), ledger.number + 1
        ledger.number = ledger.done = number
        ledger.mark = mark = hash((ledger.mark, fact))
        place = number % KEPT
        ledger.records[place], ledger.ended[place] = (number, mark, what, None, moment), moment
        return out

    return counted
