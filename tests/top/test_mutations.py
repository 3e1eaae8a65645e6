"""The faults of `python -m tests.mutations` are of lines that are there."""

import shutil
from pathlib import Path

import pytest

import fdtensor
from tests.mutations import FAULTS, put


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_can_be_put_into_one_line(fault, tmp_path):
    package = Path(fdtensor.__file__).parent
    (path,) = (p for p in package.rglob("*.py") if fault.line in p.read_text())
    shutil.copy(path, tmp_path)
    assert fault.instead in put(fault, tmp_path).read_text()
    assert fault.instead != fault.line
