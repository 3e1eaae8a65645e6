"""What one would write by hand with torch.distributed for each case: `HAND`, in several ways.

Each takes this rank's tensor and its `Place` and returns a new tensor, as a redistribution does.
Names say how: `messages` are isend and irecv, into views of the result where that can be. The
fastest way at a size stands for what can be done by hand.
"""

from tests.bench.hand_line import LINE
from tests.bench.hand_square import SQUARE

__all__ = ["HAND"]

HAND = LINE | SQUARE
"""The ways for each case, by its name."""
