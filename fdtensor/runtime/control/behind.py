"""`put_behind` and `catch_up`: ledgers of other ranks, after one of them has failed.

Two ledgers that have ranks in common may use the same groups. After an error these are made anew,
by all of their ranks at one time: before the next call of whichever ledger has it first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fdtensor.runtime.control.ledger import Ledger

__all__ = ["catch_up", "put_behind"]


def put_behind(ledger: Ledger, failed: Ledger) -> None:
    """Notes for a ledger that another one has failed, if they may use a group both."""
    if ledger is not failed and len(set(ledger.ranks) & set(failed.ranks)) > 1:
        if failed not in ledger.behind:
            ledger.behind.append(failed)
        ledger.stop = True


def catch_up(ledger: Ledger) -> None:
    """Makes the groups anew that a ledger shares with those that have failed."""
    while ledger.behind:
        other = ledger.behind[0]
        if other.failed:
            other.anew([rank for rank in ledger.ranks if rank in other.ranks])
        ledger.behind.pop(0)
    ledger.stop = ledger.failed or ledger.alarmed
