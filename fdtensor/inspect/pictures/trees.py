"""`of_tree`: what the picture of a dict of tensors says: their layouts and the bytes of a rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fdtensor.inspect.explanation.tables import counted
from fdtensor.inspect.pictures.facts import Description, Facts, Row, Section, Table
from fdtensor.inspect.pictures.holders import most_nbytes
from fdtensor.layouts.dtypes import dtype_name
from fdtensor.layouts.errors import ValueTreeError
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.layouts.tree import flatten, paths
from fdtensor.layouts.words import a_kind
from fdtensor.plans.text import bytes_text
from fdtensor.tensors.dtensor import DTensor

__all__ = ["of_tree"]

MOST_TENSORS = 100
"""How many tensors are listed; the smallest of more are counted."""


def of_tree(tree: object) -> Description:
    """The tensors of a tree by name, each with its type and with what a rank holds of it.

    Plain tensors are those of each rank. Raises `ValueTreeError` for leaves that are no tensors.
    """
    leaves, spec = flatten(tree, is_leaf=lambda x: isinstance(x, (DTensor, TensorType)))
    names = [name.removeprefix("tree") for name in paths(spec, "tree")]
    types = [leaf.type if isinstance(leaf, DTensor) else leaf for leaf in leaves]
    wrong = {
        f"tree{name}": f"{a_kind(leaf)}."
        for name, leaf in zip(names, types, strict=True)
        if not isinstance(leaf, (TensorType, torch.Tensor))
    }
    if wrong:
        raise ValueTreeError(
            f"{len(wrong)} of {len(leaves)} leaves cannot be shown.",
            **wrong,
            hint="Show a tree of DTensors, types and tensors.",
        )
    on = list(dict.fromkeys(t.mesh for t in types if isinstance(t, TensorType)))
    return Description(_title(len(types), on), (_facts(types), _table(names, types)))


def _title(count: int, meshes: Sequence[Mesh]) -> str:
    where = f" on {', '.join(map(repr, meshes))}" if meshes else ""
    return f"{counted(count, 'tensor')}{where}"


def _facts(types: Sequence[TensorType | torch.Tensor]) -> Section:
    held, full = sum(map(_held, types)), sum(t.nbytes for t in types)
    return Facts((("bytes", f"{bytes_text(held)} a rank at most, {bytes_text(full)} in full"),))


def _table(names: Sequence[str], types: Sequence[TensorType | torch.Tensor]) -> Section:
    held = list(map(_held, types))
    order = sorted(range(len(types)), key=lambda i: -held[i])
    listed = sorted(order[:MOST_TENSORS]) if len(order) > MOST_TENSORS else range(len(order))
    total = sum(held) or 1
    rows = [Row((names[i], _text(types[i]), bytes_text(held[i])), held[i] / total) for i in listed]
    rest = len(types) - len(rows)
    if rest:
        small = sum(held) - sum(held[i] for i in listed)
        rows.append(Row((f"... {rest} smaller ones", "", bytes_text(small)), small / total))
    return Table(("", "type", "a rank"), tuple(rows), "<<>", bars=True)


def _held(t: TensorType | torch.Tensor) -> int:
    """The bytes of the rank that holds most."""
    return most_nbytes(t) if isinstance(t, TensorType) else t.nbytes


def _text(t: TensorType | torch.Tensor) -> str:
    if isinstance(t, TensorType):
        return str(t)
    return f"{dtype_name(t.dtype)}[{','.join(map(str, t.shape))}], plain"
