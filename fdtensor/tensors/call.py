"""`call`: one function of DTensors, now."""

# pyright: reportOverlappingOverload=false

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, overload

import attrs
import torch

from fdtensor.layouts.opaque import opaque
from fdtensor.layouts.torch_private import transforms_active
from fdtensor.ops.ambient import settings, unusual
from fdtensor.programs.options import EVERY_CALL, Check, OnMissingRule, Plain
from fdtensor.runtime.replication import watching
from fdtensor.tensors.calls.function import Spmd
from fdtensor.tensors.calls.functions import DEFAULT, function_of
from fdtensor.tensors.calls.kept import CACHED
from fdtensor.tensors.dtensor import DTensor
from fdtensor.tensors.foreach import by_comm, is_foreach
from fdtensor.tensors.operators import computes
from fdtensor.tensors.owed import Collecting, Owed

__all__ = ["call"]

P = ParamSpec("P")

_CONSTANT = frozenset(
    {int, bool, str, type(None), type(...), torch.dtype, torch.device, torch.memory_format}
)

_CONTAINERS = frozenset({list, tuple, torch.Size})


@overload
def call(fn: Callable[P, torch.Tensor], *args: P.args, **kwargs: P.kwargs) -> DTensor[Any]: ...


@overload
def call(fn: Callable[P, Any], *args: P.args, **kwargs: P.kwargs) -> Any: ...


@overload
def call(fn: Callable[..., Any], *args: Any, out_layouts: Any, **kwargs: Any) -> Any: ...


@overload
def call(fn: Callable[..., Any], *args: Any, plain: Plain, **kwargs: Any) -> Any: ...


@overload
def call(
    fn: Callable[..., Any], *args: Any, on_missing_rule: OnMissingRule, **kwargs: Any
) -> Any: ...


@overload
def call(fn: Callable[..., Any], *args: Any, check: Check | None, **kwargs: Any) -> Any: ...


@overload
def call(fn: Callable[..., Any], *args: Any, check_indices: bool, **kwargs: Any) -> Any: ...


@overload
def call(
    fn: Callable[..., Any], *args: Any, reduce_dtype: torch.dtype | None, **kwargs: Any
) -> Any: ...


@overload
def call(fn: Callable[..., Any], *args: Any, deterministic: bool, **kwargs: Any) -> Any: ...


@computes
@opaque
def call(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`fn(*args, **kwargs)` on DTensors: a torch function, an aten overload, or your own.

    Its program is made once for each set of types and Python arguments, and kept. A function whose
    output shapes depend on data runs on replicated operands. `torch._foreach_*` takes tensors of
    several meshes, which it runs one after the other. `out_layouts`, `plain`,
    `on_missing_rule`, `check`, `check_indices`, `reduce_dtype` and `deterministic` are those of
    `spmd`. Without `out_layouts` the layouts of operands decide, and a sum of several elements that
    is still to be taken waits for what needs it whole, or moves it.

    >>> mesh = Mesh(x=2)
    >>> x = distribute(torch.arange(6), mesh.layout("x"), SimulatedComm(mesh))
    >>> total = call(torch.sum, x)
    >>> print(total.type)
    i64[]
    >>> total.full()
    tensor(15)
    """
    key: list[Any] = [settings()]
    values: list[Any] = []
    comm = _keyed(args, key, values, None)
    if kwargs and comm is not None:
        comm = _keyed_by_name(kwargs, key, values, comm)
    if comm is None or unusual() or transforms_active():
        function = _spmd_of(fn, kwargs)
        parts = by_comm(function, args, kwargs) if comm is None and is_foreach(fn) else None
        return function(*args, **kwargs) if parts is None else parts
    if len(values) > 1 and (values[0] is values[1] or len(values) > 2):
        key += map([*map(id, values)].index, map(id, values))  # a write to one shows in the other
    function = function_of(fn)
    read, known = function.reads, function.quick
    whole = (comm, read and read.key(), *key)
    entry = known.get(whole)
    if entry is _REDUCED_FIRST:
        for owed, of in _owed((args, [*kwargs.values()])):
            owed.local(of)
        return call(fn, *args, **kwargs)
    if entry is not None:
        if entry.short is None or watching():
            return entry.result(entry.go(values), comm)
        return entry.short(values)
    owed = [*_owed((args, [*kwargs.values()]))]
    result = function(*args, **kwargs)
    entry = function.last
    if any(not sum.is_due for sum, _ in owed):
        entry = _REDUCED_FIRST
    elif entry is None or entry.traced is None or entry.closed or comm.check in EVERY_CALL:
        return result
    if len(known) >= CACHED:
        known.pop(next(iter(known)))
    known[whole] = entry
    return result


def _keyed(args: Any, key: list[Any], values: list[Any], comm: Any) -> Any:
    """Adds what identifies arguments to the key and their local tensors to the values.

    Returns their Comm; None for what takes the long way: derivatives, simulated ranks, other
    arguments, none at all.
    """
    for a in args:
        kind = a.__class__
        if kind is DTensor:
            local, type = a.held, a.type  # the property costs as much as the rest
            if local.__class__ is not torch.Tensor:
                if local.__class__ is Owed:
                    local, type = local.known
                elif local.__class__ is Collecting:
                    local = local.value
                    key.append(Collecting)
                if local.__class__ is tuple:
                    return None
            if a.comm is not comm:
                if comm is not None and comm is not _ANY:
                    return None
                comm = a.comm
            values.append(local)
            key += type, local.requires_grad
        elif kind in _CONSTANT or (kind is float and a):
            key += kind, a
        elif kind in _CONTAINERS:
            key += kind, len(a)
            inner = _keyed(a, key, values, comm or _ANY)
            if inner is None:
                return None
            if inner is not _ANY:
                comm = inner
        elif kind is slice:
            key.append(slice)
            if _keyed((a.start, a.stop, a.step), key, values, _ANY) is not _ANY:
                return None
        else:
            return None
    return comm


def _keyed_by_name(named: dict[str, Any], key: list[Any], values: list[Any], comm: Any) -> Any:
    """The same for arguments by name, none of them an option; they have the `comm` of others."""
    if not _ELSEWHERE.isdisjoint(named):
        return None
    key += _BY_NAME, tuple(named)
    return _keyed([named[name] for name in sorted(named)], key, values, comm)


_ANY = object()

_BY_NAME = object()

_REDUCED_FIRST: Any = object()
"""The entry of calls whose operands owe sums that are to be taken first."""


def _owed(args: Any) -> Iterator[tuple[Owed, Any]]:
    """The sums that arguments owe, with their Comms."""
    for a in args:
        if a.__class__ is DTensor:
            if a.held.__class__ is Owed and a.held.is_due:
                yield a.held, a.comm
        elif a.__class__ is list or a.__class__ is tuple:
            yield from _owed(a)


def _spmd_of(fn: Callable[..., Any], kwargs: dict[str, Any]) -> Spmd[..., Any]:
    """The function of DTensors that `call` has made of `fn`; takes its options out of `kwargs`."""
    named = {name: kwargs.pop(name) for name in _NAMES if name in kwargs}
    return function_of(fn, attrs.evolve(DEFAULT, **named) if named else None)


_NAMES = (
    *("out_layouts", "plain", "on_missing_rule", "check", "check_indices"),
    *("reduce_dtype", "deterministic"),
)
"""The options that `call` takes from among the arguments."""

_ELSEWHERE = frozenset({*_NAMES, "key"})
"""The names of arguments that take the long way."""
