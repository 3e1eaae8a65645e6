"""The rules: which layouts each op allows along one mesh axis. Every file here is a family."""

import importlib
import pkgutil

from fdtensor.ops.notation import At, Block, Needs, P, R, Row, Rule, S, U, Window, rule

__all__ = ["At", "Block", "Needs", "P", "R", "Row", "Rule", "S", "U", "Window", "rule"]

for _family in sorted(module.name for module in pkgutil.iter_modules(__path__)):
    importlib.import_module(f"{__name__}.{_family}")
