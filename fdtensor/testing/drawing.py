"""`drawn`: examples of a strategy, outside of any test of hypothesis."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import TypeVar

from hypothesis import HealthCheck, Phase, currently_in_test_context, find, settings
from hypothesis.errors import NoSuchExample
from hypothesis.strategies import SearchStrategy

__all__ = ["drawn"]

T = TypeVar("T")


def drawn(strategy: SearchStrategy[T], count: int, seed: int) -> list[T]:
    """At most `count` examples, the same ones for the same seed."""
    options = settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=[*HealthCheck],  # type: ignore[list-item]
    )
    examples: list[T] = []

    def collect() -> None:
        try:
            find(
                strategy, lambda x: bool(examples.append(x)), settings=options, random=Random(seed)
            )
        except NoSuchExample:
            return

    if not currently_in_test_context():
        collect()
        return examples
    # a thread of its own, for hypothesis refuses tests inside of tests: in each thread it collects
    # garbage once, which takes seconds in a large process
    with ThreadPoolExecutor(1) as pool:
        pool.submit(collect).result()
    return examples
