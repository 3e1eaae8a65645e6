"""The rules: which layouts each op allows along one mesh axis. Each file is a family of ops."""

import importlib
import pkgutil

from fdtensor.ops.notation import At, Block, Halo, P, R, Row, Rule, S, Units, Window, rule

__all__ = ["At", "Block", "Halo", "P", "R", "Row", "Rule", "S", "Units", "Window", "rule"]

for _family in sorted(module.name for module in pkgutil.iter_modules(__path__)):
    importlib.import_module(f"{__name__}.{_family}")
