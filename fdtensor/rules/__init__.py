"""The rules: which layouts each op allows along one mesh axis. Every file here is a family."""

import importlib
import pkgutil

from fdtensor.rules.core import At, Block, P, R, Row, Rule, S, U, rule

__all__ = ["At", "Block", "P", "R", "Row", "Rule", "S", "U", "rule"]

for _family in sorted(module.name for module in pkgutil.iter_modules(__path__)):
    importlib.import_module(f"{__name__}.{_family}")
