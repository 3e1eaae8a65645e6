"""`function_of`: the function of DTensors that `call` makes of a function, for as long as it lives.

A lambda that closes over tensors goes as soon as nobody holds it, with its programs and tensors.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from fdtensor.programs.options import Options
from fdtensor.programs.recording import refuse_no_function
from fdtensor.tensors.calls.function import Spmd
from fdtensor.tensors.calls.kept import CACHED
from fdtensor.tensors.calls.weakly import OWN

__all__ = ["DEFAULT", "MadeOf", "function_of"]

DEFAULT = Options(on_data_dependent="replicate", choice="follow", eager=True)
"""The options of `call`."""


class MadeOf:
    """What is made of functions, a dict for each: as long as it lives, of others the last ones."""

    def __init__(self) -> None:
        self._of_users: WeakKeyDictionary[Any, dict[Any, Any]] = WeakKeyDictionary()
        self._others: OrderedDict[Any, dict[Any, Any]] = OrderedDict()
        """Of torch's functions, of methods and of objects."""

    def of(self, fn: Callable[..., Any]) -> dict[Any, Any]:
        """What is made of this one, to be filled."""
        table: Any = self._of_users if fn.__class__ in OWN else self._others
        try:
            known = table.get(fn)
        except TypeError:  # of what has no hash nothing is kept
            refuse_no_function(fn)
            return {}
        if known is None:
            if len(table) >= CACHED:
                del table[next(iter(table))]
            known = table[fn] = {}
        return known


_MADE = MadeOf()


def function_of(fn: Callable[..., Any], options: Options | None = None) -> Spmd[..., Any]:
    """The function of DTensors made of `fn`, which does not keep it, by default as `call` does."""
    known = _MADE.of(fn)
    function = known.get(options)
    if function is None:
        weak = fn.__class__ in OWN
        function = known[options] = Spmd(fn, options or DEFAULT, weak=weak)
    return function
