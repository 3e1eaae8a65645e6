"""`Effort`: how much a search for the best choice does at most."""

from __future__ import annotations

import attrs

__all__ = ["CHOICE", "PROOF", "Effort"]


@attrs.frozen
class Effort:
    """How much a search does at most."""

    rounds: int
    """How often combinations are added to the relaxation."""
    solved: int
    """How often it is solved in a round, as moves of a solution take more than was known."""
    asked: int
    """How often, after each, moves and combinations are asked what they take."""
    sweeps: int
    """How often all sites are valued anew before that."""
    patience: int
    """How many rounds in a row may gain little."""
    searched: int
    """The number of combinations among which the best is searched, where the relaxation is not
    whole."""
    branches: int
    """How many branches of that search are solved: not seconds, in which ranks differ."""


PROOF = Effort(rounds=12, solved=20, asked=8, sweeps=4, patience=3, searched=500, branches=200)
"""For a bound that is near."""

CHOICE = Effort(rounds=4, solved=20, asked=3, sweeps=2, patience=1, searched=150, branches=60)
"""For a choice, which is asked for at every trace."""
