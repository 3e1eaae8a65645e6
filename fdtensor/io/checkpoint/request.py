"""`Request`: what is asked of files against what they hold; every mistake is told at once."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import optree
import torch

from fdtensor.io.checkpoint.names import Leaf, Path, named, nested, with_words
from fdtensor.io.checkpoint.stored import Contents, Stored
from fdtensor.layouts.errors import CheckpointError, FdtensorError
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.prefixes import uncut
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.layouts.tree import unflatten
from fdtensor.ops.random_bits import Key
from fdtensor.runtime.comm import Comm, contained
from fdtensor.tensors.dtensor import DTensor

__all__ = ["Asked", "Request", "request"]

NEAR = 20
"""For how many names that are missing others like them are looked up: each costs a search."""


@attrs.frozen
class Asked:
    """One entry that is asked for: a DTensor of a type, else a plain tensor or another object."""

    stored: Stored | None = None
    """None for an object."""
    type: TensorType | None = None
    comm: Comm[Any] | None = None
    device: torch.device | None = None
    """That of a plain tensor."""


@attrs.frozen
class Request:
    """The entries that are asked for, by name, and the pytree that they fill."""

    asked: Mapping[str, Asked]
    spec: optree.PyTreeSpec
    places: Sequence[Sequence[tuple[Path, str]]]
    """For each leaf of the pytree the names that it stands for, with the keys below it."""
    keys: frozenset[str]
    """The names of random keys, which are read as tensors of their words."""

    def filled(self, values: Mapping[str, Any]) -> Any:
        """The pytree with what was found for each name."""
        known = {**values, **{name: _key(values[name]) for name in self.keys}}
        leaves = [nested([(path, known[name]) for path, name in place]) for place in self.places]
        return unflatten(self.spec, leaves)


def request(like: Any, contents: Contents, comm: Comm[Any], strict: bool, where: str) -> Request:
    """The request that a pytree makes of files with these contents.

    A leaf is the type or layout of a DTensor, a DTensor or tensor that it is like, or anything else
    for an object. A layout, or a function of name and `Stored` that gives one, may stand for all
    below its name. Raises `CheckpointError`, which lists whatever is missing, wrong or left over.
    """
    leaves, spec = named(like)
    faults = _Faults()
    asked: dict[str, Asked] = {}
    places: list[list[tuple[Path, str]]] = []
    keys = frozenset(leaf.name for leaf in leaves if isinstance(leaf.value, Key))
    for leaf in map(with_words, leaves):
        below = _below(leaf, contents)
        places.append([(path, name) for path, name in below])
        if not below and (leaf.path or not _is_rule(leaf.value)):
            faults.missing.append(leaf.name or "a name: pass a dict")
        for path, name in below:
            value = leaf.value
            if path and isinstance(value, Layout) and (held := contents[name]) and not held.shape:
                value = uncut(value)  # it stands for all below, and this has nothing to cut
            fault, entry = _matched(value, name, contents[name], comm)
            asked[name] = entry
            if fault:
                faults.wrong.append(f"{name} {fault}")
    counts = Counter(name for place in places for _, name in place)
    faults.wrong += [f"{name} is asked for twice" for name, n in counts.items() if n > 1]
    faults.extra = [name for name in contents if name not in asked]
    faults.refuse(strict, where)
    for place in places:
        nested(place)  # raises where names lead to a value and to others
    return Request(asked, spec, places, keys)


def _key(words: torch.Tensor) -> Key:
    return Key(*[word & 0xFFFFFFFF for word in words.tolist()])


def _below(leaf: Leaf, contents: Contents) -> list[tuple[Path, str]]:
    """The names that a leaf stands for, with the keys below it."""
    if leaf.path and leaf.name in contents:
        return [((), leaf.name)]
    if not _is_rule(leaf.value):
        return []
    if not leaf.path:
        return [(contents.path(name), name) for name in contents]
    below = [name for name in contents if name.startswith(f"{leaf.name}.")]
    keys = len(leaf.path)
    return [
        (contents.path(name)[keys:] or (name[len(leaf.name) + 1 :],), name)
        if contents.path(name)[:keys] == leaf.path
        else ((name[len(leaf.name) + 1 :],), name)
        for name in below
    ]


def _is_rule(value: object) -> bool:
    """Whether it says the layout of any tensor."""
    return isinstance(value, Layout) or _is_function(value)


def _is_function(value: object) -> bool:
    return callable(value) and not isinstance(value, (type, torch.nn.Module, torch.Tensor, DTensor))


def _matched(
    value: Any, name: str, stored: Stored | None, comm: Comm[Any]
) -> tuple[str | None, Asked]:
    """The fault of a leaf that stands for an entry, if it has one, and its request."""
    rule = _is_rule(value)
    tensor = rule or isinstance(value, (TensorType, DTensor, torch.Tensor))
    if stored is None:
        kind = str(value.type) if isinstance(value, DTensor) else _told(value)
        return (f"is an object, asked for as {kind}" if tensor and not rule else None), Asked()
    if not tensor:
        return f"is {stored}, asked for as {_told(value)}", Asked()
    if isinstance(value, torch.Tensor):
        if type(value) not in (torch.Tensor, torch.nn.Parameter):
            return f"is asked for as torch's {type(value).__name__}: pass a layout", Asked()
        device = comm.device if value.is_meta else value.device
        asked = Asked(stored, device=device or torch.device("cpu"))
        return _differs(stored, tuple(value.shape), value.dtype), asked
    try:
        wanted: Any = value
        if isinstance(value, DTensor):
            wanted, comm = value.type, value.comm
        elif _is_function(value):
            wanted = wanted(name, stored)
        if isinstance(wanted, Layout):
            wanted = TensorType(stored.shape, stored.dtype, wanted)
        if not isinstance(wanted, TensorType):
            return f"has no layout: the function gave {_told(wanted)}", Asked()
        contained("it", [wanted.mesh], comm.mesh)
    except FdtensorError as error:
        return f"({stored}): {error.sentence.removesuffix('.')}", Asked()
    return _differs(stored, wanted.shape, wanted.dtype), Asked(stored, wanted, comm)


def _differs(stored: Stored, shape: tuple[int, ...], dtype: torch.dtype) -> str | None:
    wanted = Stored(shape, dtype)
    return None if stored == wanted else f"is {stored}, asked for as {wanted}"


def _told(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return str(Stored(tuple(value.shape), value.dtype))
    return str(value) if isinstance(value, TensorType) else type(value).__name__


@attrs.define
class _Faults:
    """Whatever does not fit, by kind."""

    missing: list[str] = attrs.field(factory=list)
    wrong: list[str] = attrs.field(factory=list)
    extra: list[str] = attrs.field(factory=list)

    def refuse(self, strict: bool, where: str) -> None:
        """Raises one error for all faults; what is left over is one where `strict`."""
        if not self.missing and not self.wrong and not (strict and self.extra):
            return
        near = self._near()
        lines = [
            f"{n} (there is {other})" if other else n
            for n, other in zip(self.missing, near, strict=True)
        ]
        known = {*near} if strict else {*self.extra}
        rest = [name for name in self.extra if name not in known]
        groups = {"missing": lines, "wrong": self.wrong, "left over": rest}
        counts = [f"{len(lines)} {kind}" for kind, lines in groups.items() if lines]
        raise CheckpointError(
            f"what is asked of {where} is not what is there: {', '.join(counts)}.",
            **{kind: "\n".join(lines) for kind, lines in groups.items() if lines},
            hint="checkpoint_contents(path) prints what it holds"
            + ("; strict=False leaves the rest out." if rest else "."),
        )

    def _near(self) -> list[str | None]:
        """For each name that is missing the one left over that it may stand for."""
        by_end: dict[str, list[str]] = {}
        for name in self.extra:
            by_end.setdefault(name.rpartition(".")[2], []).append(name)
        near: list[str | None] = []
        for i, name in enumerate(self.missing):
            alike = by_end.get(name.rpartition(".")[2], [])
            alike = [n for n in alike if f".{n}".endswith(f".{name}") or name.endswith(f".{n}")]
            if not alike and i < NEAR:
                alike = difflib.get_close_matches(name, self.extra, 1)
            near.append(alike[0] if alike else None)
        return near
