"""`gloo_ranks`: real ranks for tests of pytest, as a fixture.

A conftest.py takes it by `pytest_plugins = ["fdtensor.testing.fixtures"]`, or by importing it.

    def test_it_adds(gloo_ranks):
        assert gloo_ranks(4).run(lambda: dist.get_world_size()) == [4] * 4
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import pytest
import torch.distributed as dist

from fdtensor.testing.pool import GlooPool

__all__ = ["gloo_ranks"]


@pytest.fixture(scope="session")
def gloo_ranks() -> Iterator[Callable[[int], GlooPool]]:
    """The function that gives a test its real ranks: `gloo_ranks(4)` is a pool of four.

    Ranks start at the first run and stay up until the session ends; tests that ask for as many
    share them. A test is skipped where torch cannot make such ranks.
    """
    pools: dict[int, GlooPool] = {}

    def ranks(n: int) -> GlooPool:
        missing = _missing()
        if missing:
            pytest.skip(f"no real ranks here: {missing}.")
        if n not in pools:
            pools[n] = GlooPool(n)
        return pools[n]

    yield ranks
    for pool in pools.values():
        pool.close()


def _missing() -> str | None:
    """The requirement that this machine lacks, or None."""
    if not dist.is_available():
        return "torch is built without torch.distributed"
    if not dist.is_gloo_available():
        return "torch is built without gloo"
    if sys.platform == "win32":
        return "ranks need Linux or macOS"
    return None
