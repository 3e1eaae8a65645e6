"""Every public name has a docstring, and the manual names all of them."""

import importlib
import inspect
import re
import types

import pytest

import fdtensor
from tests.top.test_public import NAMESPACES

MODULES = (fdtensor, *[getattr(fdtensor, name) for name in NAMESPACES])

PUBLIC = [(module, name) for module in MODULES for name in module.__all__]


@pytest.mark.parametrize(("module", "name"), PUBLIC, ids=lambda x: getattr(x, "__name__", x))
def test_every_public_name_says_what_it_is(module, name):
    found = getattr(module, name)
    own = found.__dict__.get("__doc__") if inspect.isclass(found) else inspect.getdoc(found)
    if inspect.isclass(found) or callable(found):
        assert own
    if inspect.isclass(found):
        silent = [
            member
            for member, value in vars(found).items()
            if not member.startswith("_")
            and isinstance(value, (types.FunctionType, property, classmethod, staticmethod))
            and not inspect.getdoc(inspect.getattr_static(found, member))
            and not inspect.getdoc(getattr(found, member))
        ]
        assert silent == []


def test_the_manual_names_all_that_is_public_and_nothing_else():
    manual = fdtensor.__doc__.partition("Where tensors lie:")[2]
    named = set(re.findall(r"[A-Za-z_]+", manual))
    assert [name for name in fdtensor.__all__ if name not in named] == []
    lists = re.findall(r"^    (\S.*?)(?:  .*)?$", manual, re.M)
    listed = [name for line in lists for name in re.findall(r"\w+", line)]
    assert [name for name in listed if not hasattr(fdtensor, name)] == []


def test_names_are_sorted_and_unique():
    for module in MODULES:
        names = module.__all__
        assert len(set(names)) == len(names)
        assert [name for name in names if not hasattr(module, name)] == []


def test_what_imports_of_everything_bring_is_what_is_public():
    space: dict[str, object] = {}
    exec("from fdtensor import *", space)
    assert {name for name in space if not name.startswith("__")} == set(fdtensor.__all__)
    assert importlib.import_module("fdtensor").__doc__
