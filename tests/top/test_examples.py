"""The examples in the docstrings of public names run, and show what they say.

`torch`, `fd` and the names of `from fdtensor import *` are there; nothing else is.
"""

import contextlib
import doctest
import inspect

import pytest
import torch

import fdtensor
from tests.top.test_public import NAMESPACES

NAMES = {name: getattr(fdtensor, name) for name in fdtensor.__all__}
NAMES |= {
    f"{space}.{name}": getattr(getattr(fdtensor, space), name)
    for space in NAMESPACES
    for name in getattr(fdtensor, space).__all__
}
ONCE = {id(value): name for name, value in NAMES.items() if callable(value)}
EXAMPLES = {
    name: NAMES[name] for name in ONCE.values() if ">>>" in (inspect.getdoc(NAMES[name]) or "")
}

ON_RANKS = "local_cluster", "LocalCluster", "GlooPool"
"""An example with one of these words starts processes."""


def cases(names):
    for name, value in names.items():
        ranks = any(word in example_lines(value) for word in ON_RANKS)
        yield pytest.param(name, marks=[pytest.mark.mesh] * ranks)


def example_lines(value):
    lines = (inspect.getdoc(value) or "").splitlines()
    return "\n".join(line for line in lines if line.startswith((">>>", "...")))


@pytest.fixture(scope="module")
def ranks():
    """The ranks of all examples but those that are about them: most of the time is their start."""
    with fdtensor.local_cluster(2) as cluster:
        yield cluster


@pytest.mark.parametrize("name", list(cases(EXAMPLES)))
def test_an_example_shows_what_it_says(name, ranks):
    space = {"torch": torch, "fd": fdtensor}
    exec("from fdtensor import *", space)
    if EXAMPLES[name] is not fdtensor.local_cluster:
        space["local_cluster"] = lambda n: contextlib.nullcontext({2: ranks}[n])
    torch.manual_seed(0)
    text = inspect.getdoc(EXAMPLES[name])
    example = doctest.DocTestParser().get_doctest(text, space, name, None, None)
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    told = []
    doctest.DocTestRunner(optionflags=flags).run(example, out=told.append)
    assert "".join(told) == ""


def test_every_public_name_has_an_example():
    assert set(ONCE.values()) == set(EXAMPLES)
