"""What all tests share: pools of gloo ranks, how much of each law is tried, which worker runs it.

A run keeps the choices of layouts in a folder of its own, so that what several tests or ranks need
is chosen once; in tests of choosing each is made anew.

By default a law is tried on a few examples: `max_examples` of hypothesis, and of a parametrized
test with `@pytest.mark.few(n)` on `n` of its cases; with `@pytest.mark.one_of("count")`, of the
cases that differ in `count` alone, one of them runs, for the next such cases another one. With
`--deep` all of them run, forty times the examples, and the tests that are `@pytest.mark.deep`.
"""

import atexit
import gc
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import none

from fdtensor.testing.fixtures import gloo_ranks  # noqa: F401  (a fixture)
from fdtensor.testing.pool import GlooPool
from tests.support.depth import go_deep, is_deep, spread

torch.set_num_threads(1)  # tensors are tiny: threads would only wait for each other
os.environ.setdefault("OMP_NUM_THREADS", "1")  # nor have the processes that tests start more
if "PYTEST_XDIST_WORKER" not in os.environ:  # what one of them chooses, all take
    os.environ["FDTENSOR_CACHE"] = tempfile.mkdtemp(prefix="fdtensor-choices-")
    atexit.register(shutil.rmtree, os.environ["FDTENSOR_CACHE"], ignore_errors=True)

settings.register_profile(
    "fast",
    derandomize=True,
    deadline=None,
    max_examples=25,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "deep",
    deadline=None,
    max_examples=1000,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)


FIRST = (
    "real ranks",
    "tests/top/test_notebooks.py",
    "tests/workloads/test_workloads.py",
    "notebooks/MANUAL.md",
)
"""The longest of what one worker runs: begun last, each would keep the others waiting."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--deep", action="store_true", help="try every law at length")


def pytest_configure(config: pytest.Config) -> None:
    go_deep(config.getoption("deep"))
    settings.load_profile("deep" if is_deep() else "fast")
    config.option.loadscopereorder = False  # of xdist, which takes the most tests for the longest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not is_deep():
        kept = _few(items)
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]
    if config.pluginmanager.hasplugin("xdist"):
        for item in items:
            item.add_marker(pytest.mark.xdist_group(_group(item)))
        if hasattr(config, "workerinput"):
            places = {group: place for place, group in enumerate(FIRST)}
            items.sort(key=lambda item: (places.get(_group(item), len(places)), _ranks(item)))


def pytest_collection_finish() -> None:
    given(none())(lambda _: None)()  # hypothesis registers its random: it must see a holder
    gc.collect()
    gc.freeze()  # else each full collection walks all tests again
    gc.set_threshold(700, 10, 50)  # and what earlier tests have left in memory


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Stops ranks that the next test does not take: idle groups of gloo take time too."""
    used = getattr(item, "funcargs", {}).get("gloo_ranks")
    sorted_by_ranks = hasattr(item.config, "workerinput")
    if (
        used is not None
        and sorted_by_ranks
        and (nextitem is None or _ranks(nextitem) != _ranks(item))
    ):
        used.close()


def _ranks(item: pytest.Item) -> int:
    """Which real ranks a test takes: those of its own, eight, four or none."""
    names = getattr(item, "fixturenames", ())
    if "pool8" in names:
        return 1
    if "pool4" in names:
        return 2
    return 0 if "gloo_ranks" in names else 3


def _few(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """What runs by default: none of a deep test, some cases of one of which few do."""
    kept: set[pytest.Item] = set()
    cases: dict[str, list[pytest.Item]] = {}
    for item in _one_of(items):
        if item.get_closest_marker("deep"):
            continue
        if item.get_closest_marker("few"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
        else:
            kept.add(item)
    for some in cases.values():
        marker = some[0].get_closest_marker("few")
        assert marker is not None
        kept.update(spread(some, *marker.args))
    return kept


def _one_of(items: Iterable[pytest.Item]) -> Iterator[pytest.Item]:
    """Of the cases that differ only in the argument that `one_of` names one, each time the next."""
    cases: dict[str, dict[str, list[pytest.Item]]] = {}
    for item in items:
        marker, params = item.get_closest_marker("one_of"), _params(item)
        if marker is None or marker.args[0] not in params:
            yield item
            continue
        rest = repr([id(value) for name, value in params.items() if name != marker.args[0]])
        cases.setdefault(item.nodeid.partition("[")[0], {}).setdefault(rest, []).append(item)
    for groups in cases.values():
        for i, group in enumerate(groups.values()):
            yield group[i % len(group)]


def _params(item: pytest.Item) -> dict[str, Any]:
    return item.callspec.params if hasattr(item, "callspec") else {}  # type: ignore[attr-defined]


def _group(item: pytest.Item) -> str:
    """What one worker of `-n 2 --dist loadgroup` runs: a file, or all that shares real ranks."""
    ranks = "gloo_ranks" in getattr(item, "fixturenames", ())
    return "real ranks" if ranks else item.nodeid.partition("::")[0]


@pytest.fixture(scope="session")
def pool4(gloo_ranks) -> GlooPool:  # noqa: F811
    """Four gloo ranks, started by the first test that runs something on them."""
    return gloo_ranks(4)


@pytest.fixture(scope="session")
def pool8(gloo_ranks) -> GlooPool:  # noqa: F811
    """Eight gloo ranks, started by the first test that runs something on them."""
    return gloo_ranks(8)
