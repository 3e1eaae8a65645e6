"""Without the extras: what fdtensor itself depends on is enough to import, trace, keep and read."""

import os
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SCRIPT = """
import doctest, importlib, pkgutil, sys
import fdtensor
for module in pkgutil.walk_packages(fdtensor.__path__, "fdtensor."):
    if not module.name.startswith("fdtensor.testing") and not module.name.endswith("__main__"):
        importlib.import_module(module.name)
failed, tried = doctest.testfile(sys.argv[1], module_relative=False, optionflags=doctest.ELLIPSIS)
assert tried and not failed
assert sys.argv[2] in fdtensor.__path__[0]
"""


def needed():
    """The names of fdtensor's dependencies and theirs, as far as they are installed."""
    known, left = set(), ["fdtensor"]
    while left:
        name = left.pop()
        try:
            requires = distribution(name).requires or []
        except PackageNotFoundError:  # needed elsewhere: on other systems
            continue
        if name not in known:
            known.add(name)
            left += [re.match(r"[\w.-]+", r)[0] for r in requires if "extra ==" not in r]
    return known - {"fdtensor"}


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """A directory with the packages that fdtensor needs, and no other."""
    place = tmp_path_factory.mktemp("packages")
    for name in needed():
        installed = distribution(name)
        tops = {file.parts[0] for file in installed.files or () if file.parts[0] != ".."}
        for top in tops - {"__pycache__"}:
            if not (place / top).exists():
                (place / top).symlink_to(installed.locate_file(top))
    return place


def test_extras_are_not_needed(packages, tmp_path):
    assert not {"scipy", "hypothesis", "pytest"} & {p.name for p in packages.iterdir()}
    paths = os.pathsep.join([str(ROOT), str(packages)])
    env = {**os.environ, "PYTHONPATH": paths, "FDTENSOR_CACHE": str(tmp_path)}
    args = [sys.executable, "-S", "-c", SCRIPT, str(ROOT / "README.md"), str(ROOT)]
    done = subprocess.run(args, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
