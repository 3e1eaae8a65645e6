"""`python tests/support/lowest.py`: the lowest versions that pyproject.toml allows, for pip.

Without torch, whose builds for CPUs are not all to be had.
"""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["lowest"]

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def lowest() -> list[str]:
    """Of what fdtensor needs, and its tests: `name==version`."""
    lists = re.findall(r"^(?:dependencies|testing) = \[(.*?)\]", PYPROJECT.read_text(), re.M | re.S)
    pairs = re.findall(r'"([\w-]+)>=([\d.]+)', "".join(lists))
    return [f"{name}=={version}" for name, version in pairs if name != "torch"]


if __name__ == "__main__":
    print("\n".join(lowest()))
