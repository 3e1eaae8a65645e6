"""`open_shapes`: the shapes of arguments of which the sizes of some dims are not known."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, count
from typing import Any, cast

import optree

from fdtensor.layouts.errors import TraceError
from fdtensor.layouts.free_type import FreeType
from fdtensor.layouts.placement import Ragged, Spans
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.layouts.tree import argument, flatten, paths
from fdtensor.layouts.words import near
from fdtensor.ops.sizes import Computed, Shape, new_symbol
from fdtensor.programs.arguments import arguments_of

__all__ = ["Dims", "Names", "are_dims", "named_dims", "open_shapes"]

Dims = Mapping[str | int, int | Sequence[int]]
"""The dims of arguments whose sizes are not known, by the names or positions of these."""


def are_dims(value: Any) -> bool:
    """Whether it gives the dims of arguments."""
    if not isinstance(value, Mapping):
        return False
    known = cast("Mapping[Any, Any]", value)
    each = [d for given in known.values() for d in (given if _several(given) else (given,))]
    names = all(isinstance(argument, (str, int)) for argument in known)
    return names and all(isinstance(d, int) and not isinstance(d, bool) for d in each)


def _several(given: object) -> bool:
    return isinstance(given, (tuple, list))


Names = tuple[tuple[str, ...], ...]
"""For each leaf of the arguments, and each dim of it, the name of its size; "" for a known one."""

Types = Sequence[TensorType | FreeType | None]


def named_dims(dims: Dims, f: Callable[..., Any], spec: optree.PyTreeSpec, types: Types) -> Names:
    """The names of the sizes that are not known.

    Raises `TraceError` for an argument that the function does not have, for a dim that a tensor
    does not have, and for one that is cut in given sizes.
    """
    places, parameters = paths(spec, "args"), _parameters(f)
    names = [[""] * (0 if t is None else t.ndim) for t in types]
    for key, given in dims.items():
        of_key = (given,) if isinstance(given, int) else tuple(given)
        name = key if isinstance(key, str) else (*parameters, *[f"argument{key}"] * (key + 1))[key]
        for leaf in _leaves_of(key, f, spec, parameters):
            type = types[leaf]
            for d in () if type is None else of_key:
                at = _dim_of(argument(places[leaf]), type, d)
                names[leaf][at] = f"{name}{at}" if len(of_key) > 1 else name
    return tuple(map(tuple, names))


def _parameters(f: Callable[..., Any]) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(f).parameters)
    except (TypeError, ValueError):
        return ()


def _leaves_of(
    key: str | int, f: Callable[..., Any], spec: optree.PyTreeSpec, parameters: Sequence[str]
) -> Iterator[int]:
    """The numbers of the leaves of an argument; none where a default stands for it."""
    arguments = arguments_of(f, spec, range(spec.num_leaves))
    given = arguments.names if isinstance(key, str) else range(len(arguments.args))
    if key in given:
        yield from flatten(arguments.of(key, "dynamic names"))[0]
    elif key not in parameters:
        raise TraceError(
            f"dynamic names argument {key!r}, which the function does not have.",
            arguments=", ".join(parameters) or "not known",
            hint=f"{near(key, parameters)}Give the name or the position of an argument.",
        )


def _dim_of(name: str, type: TensorType | FreeType | None, d: int) -> int:
    """The dim of an argument whose size is not known, from 0."""
    assert type is not None
    if not -type.ndim <= d < type.ndim:
        raise TraceError(
            f"dynamic names dim {d} of {name}, which has {type.ndim}.",
            type=type,
            hint="It holds for all tensors of an argument: give those of other shapes apart.",
        )
    at = d % type.ndim
    placements = type.layout.placements if isinstance(type, TensorType) else ()
    if any(isinstance(p, (Ragged, Spans)) and p.dim == at for p in placements):
        raise TraceError(
            f"dim {at} of {name} is cut in given sizes, so its own size is known.",
            type=type,
            hint="Cut it by Shard, which holds for all sizes, or leave it out of dynamic.",
        )
    return at


def open_shapes(names: Names, types: Types) -> list[Shape]:
    """The shapes of tensors; one symbol, of the first name, for unknown sizes that are equal now.

    Sizes that were equal by chance make another recording necessary where they differ, and sizes
    that must be equal cannot differ. Sizes of 0 and 1 are known: what is empty, and what may be
    broadcast, is computed otherwise.
    """
    known = [(n, t) for n, t in zip(names, types, strict=True) if t is not None]
    pairs = [list(zip(of_leaf, type.shape, strict=True)) for of_leaf, type in known]
    symbols: dict[int, Computed] = {}
    for name, size in (pair for of_leaf in pairs for pair in of_leaf):
        if name and size > 1 and size not in symbols:
            taken = {str(symbol) for symbol in symbols.values()}
            others = (f"{name}_{i}" for i in count(1))
            symbols[size] = new_symbol(next(n for n in chain([name], others) if n not in taken))
    return [
        tuple([symbols[n] if name and n > 1 else n for name, n in of_leaf]) for of_leaf in pairs
    ]
