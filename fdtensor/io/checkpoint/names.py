"""Names: a pytree as a flat list of named leaves, named as torch's state dicts are stored.

The keys on the way to a leaf are joined by dots: `{"model": {"w": ...}}` has `model.w`, and
`{"layers": [{"w": ...}]}` has `layers.0.w`. As there, a list without tensors is one leaf, and so is
a tuple or a dataclass without DTensors; None is a leaf as well. A random key is stored as its
words, a tensor.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence, Set
from typing import Any

import attrs
import optree
import torch

from fdtensor.layouts.errors import CheckpointError
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.layouts.tree import flatten_admitting
from fdtensor.ops.random_bits import Key
from fdtensor.tensors.dtensor import DTensor

__all__ = ["Leaf", "Path", "hides_a_tensor", "joined", "named", "nested", "with_words"]

Path = tuple[str | int, ...]
"""The keys on the way to a leaf: a str for an entry of a dict, an int for one of a list."""


@attrs.frozen
class Leaf:
    """A leaf of a pytree, with the keys on the way to it."""

    path: Path
    value: Any

    @property
    def name(self) -> str:
        """The keys joined by dots; empty for a pytree that is itself a leaf."""
        return joined(self.path)


def joined(path: Path) -> str:
    """The name of a leaf at these keys."""
    return ".".join(map(str, path))


def named(tree: Any) -> tuple[list[Leaf], optree.PyTreeSpec]:
    """The leaves of a pytree with their keys, and its structure."""
    leaves, spec = flatten_admitting(tree, is_leaf=_is_leaf)
    paths = [tuple(map(_key, accessor)) for accessor in spec.accessors()]
    return [Leaf(path, leaf) for path, leaf in zip(paths, leaves, strict=True)], spec


def with_words(leaf: Leaf) -> Leaf:
    """The leaf as it is stored: a random key as the tensor of its words."""
    return attrs.evolve(leaf, value=leaf.value.tensor()) if isinstance(leaf.value, Key) else leaf


def nested(values: Sequence[tuple[Path, Any]], at: Path = ()) -> Any:
    """Dicts and lists that have these values at these keys; a value alone, without keys, itself.

    As in torch, an entry of a list that has no value is None. Raises `CheckpointError` for a value
    whose keys lead to others as well.
    """
    if len(values) == 1 and not values[0][0]:
        return values[0][1]
    if not all(path for path, _ in values):
        below = sorted(joined(path) for path, _ in values if path)
        raise CheckpointError(
            "a checkpoint has a value and a dict in one place.",
            place=joined(at),
            below=", ".join(below),
            hint="Dicts with keys such as 0 and '0' are so: load by a pytree like the saved one.",
        )
    groups: dict[str | int, list[tuple[Path, Any]]] = {}
    for path, value in values:
        groups.setdefault(path[0], []).append((path[1:], value))
    entries = {key: nested(group, (*at, key)) for key, group in groups.items()}
    if entries and all(isinstance(key, int) for key in entries):
        return [entries.get(i) for i in range(max(entries) + 1)]  # type: ignore[operator]
    return entries


def _key(entry: Any) -> str | int:
    if isinstance(entry, optree.NamedTupleEntry):
        return entry.field
    if isinstance(entry, (optree.SequenceEntry, optree.FlattenedEntry)):
        return int(entry.entry)
    return str(entry.entry)


def _is_leaf(node: object) -> bool:
    match node:
        case None:
            return True
        case list():
            return not _splits(node)
        case tuple():
            return not _has_ours(node)
        case _:
            return _is_ours(node) or (_fields(node) is not None and not _has_ours(node))


def hides_a_tensor(value: object) -> bool:
    """Whether a leaf has a DTensor where it would be no entry: in a set, or an attribute."""
    if _is_ours(value) or isinstance(value, torch.Tensor):
        return False
    parts = value if isinstance(value, (Set, deque)) else [*getattr(value, "__dict__", {}).values()]
    return any(map(_has_ours, parts))


def _fields(node: object) -> list[Any] | None:
    """The values of the fields of a dataclass; None for all others."""
    names = getattr(type(node), "__dataclass_fields__", None)
    return None if names is None else [getattr(node, name, None) for name in names]


def _splits(node: list[Any]) -> bool:
    """Whether torch stores the entries of a list one by one."""
    return any(
        _splits(entry)
        if isinstance(entry, list)
        else isinstance(entry, (Mapping, torch.Tensor)) or _has_ours(entry)
        for entry in node
    )


def _has_ours(node: object) -> bool:
    if isinstance(node, Mapping):
        return any(map(_has_ours, node.values()))
    if isinstance(node, (list, tuple)):
        return any(map(_has_ours, node))
    return _is_ours(node) or any(map(_has_ours, _fields(node) or ()))


def _is_ours(node: object) -> bool:
    return isinstance(node, (DTensor, TensorType, Layout, Key))
