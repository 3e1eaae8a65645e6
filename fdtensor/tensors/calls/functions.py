"""`function_of`: the function of DTensors that `call` makes of a function, for as long as it lives.

A lambda that closes over tensors goes as soon as nobody holds it, with its programs and tensors.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from fdtensor.programs.options import Options
from fdtensor.tensors.calls.function import CACHED, Spmd
from fdtensor.tensors.calls.weakly import OWN

__all__ = ["DEFAULT", "function_of"]

DEFAULT = Options(on_data_dependent="replicate", quiet=True)
"""The options of `call`."""

_of_users: WeakKeyDictionary[Any, dict[Options | None, Spmd[..., Any]]] = WeakKeyDictionary()

_others: OrderedDict[Any, dict[Options | None, Spmd[..., Any]]] = OrderedDict()
"""Those of torch's functions, of methods and of objects: the last `CACHED`."""


def function_of(fn: Callable[..., Any], options: Options | None = None) -> Spmd[..., Any]:
    """The function of DTensors made of `fn`, which does not keep it, by default as `call` does."""
    own = fn.__class__ in OWN
    table: Any = _of_users if own else _others
    known = table.get(fn)
    if known is None:
        if len(table) >= CACHED:
            del table[next(iter(table))]
        known = table[fn] = {}
    function = known.get(options)
    if function is None:
        function = known[options] = Spmd(fn, options or DEFAULT, weak=own)
    return function
