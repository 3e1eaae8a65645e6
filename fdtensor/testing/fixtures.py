"""`gloo_ranks`: real ranks for tests of pytest, as a fixture.

A conftest.py takes it by `pytest_plugins = ["fdtensor.testing.fixtures"]`, or by importing it.

    def test_it_adds(gloo_ranks):
        assert gloo_ranks(4).run(lambda: dist.get_world_size()) == [4] * 4
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from fdtensor.testing.pool import GlooPool

__all__ = ["Ranks", "gloo_ranks"]


class Ranks:
    """Pools of real ranks by how many there are in each: `ranks(4)` is a pool of four.

    >>> from fdtensor.testing.fixtures import Ranks
    >>> ranks = Ranks()
    >>> ranks(2) is ranks(2)
    True
    >>> ranks(2)
    <local cluster of 2 ranks: not started>
    """

    def __init__(self) -> None:
        self._pools: dict[int, GlooPool] = {}

    def __call__(self, n: int) -> GlooPool:
        """The pool of `n` ranks, which start at its first run; a test is skipped without gloo."""
        missing = _missing()
        if missing:
            pytest.skip(f"no real ranks here: {missing}.")
        if n not in self._pools:
            self._pools[n] = GlooPool(n)
        return self._pools[n]

    def close(self) -> None:
        """Stops all ranks; the next run of a pool starts new ones. Threads of gloo never rest."""
        for pool in self._pools.values():
            pool.close()


@pytest.fixture(scope="session")
def gloo_ranks() -> Iterator[Ranks]:
    """What gives a test its real ranks: `gloo_ranks(4)` is a pool of four.

    Ranks start at the first run and stay up until the session ends, or `gloo_ranks.close()`; tests
    that ask for as many share them. A test is skipped where torch cannot make such ranks.
    """
    ranks = Ranks()
    yield ranks
    ranks.close()


def _missing() -> str | None:
    """The requirement that this machine lacks, or None."""
    if not dist.is_available():
        return "torch is built without torch.distributed"
    if not dist.is_gloo_available():
        return "torch is built without gloo"
    if sys.platform == "win32":
        return "ranks need Linux or macOS"
    return None
