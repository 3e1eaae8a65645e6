"""A plan as JSON: tables of meshes, types and steps that refer to each other by index.

What is written of meshes, types, steps and costs is written so in programs too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, TypeVar

import attrs

from fdtensor.layouts.dtypes import dtype_name, parse_dtype
from fdtensor.layouts.json_fields import (
    Malformed,
    items,
    real,
    record,
    whole,
    word,
)
from fdtensor.layouts.kinds import is_dict, is_list
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh, mesh_of
from fdtensor.layouts.placement import parse_placement
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.plans.collectives import ALL, Step
from fdtensor.plans.cost import CostModel

if TYPE_CHECKING:
    from fdtensor.plans.planner import Plan

__all__ = [
    "Tables",
    "VERSION",
    "cost_of",
    "decode",
    "encode",
    "encoded_cost",
    "encoded_step",
    "entry",
    "step_of",
    "tables_of",
    "versioned",
]

T = TypeVar("T")

VERSION = 2
"""The version of what is written here, the value of the key `fdtensor`."""


class Tables:
    """The meshes and types that a text refers to by index, as they are met."""

    def __init__(self, types: Iterable[TensorType] = ()) -> None:
        self.meshes: dict[Mesh, int] = {}
        self.types: dict[TensorType, int] = {}
        for type in types:
            self.index(type)

    def index(self, type: TensorType) -> int:
        """The index of a type."""
        self.mesh_index(type.mesh)
        return self.types.setdefault(type, len(self.types))

    def mesh_index(self, mesh: Mesh) -> int:
        """The index of a mesh."""
        return self.meshes.setdefault(mesh, len(self.meshes))

    def encoded(self) -> dict[str, object]:
        """Both tables as plain values."""
        return {
            "meshes": [
                {
                    "axes": mesh.axes,
                    "sizes": mesh.sizes,
                    "ranks": None if isinstance(mesh.order, range) else mesh.order,
                    **({"links": dict(mesh.links)} if mesh.links else {}),
                }
                for mesh in self.meshes
            ],
            "types": [
                {
                    "shape": t.shape,
                    "dtype": dtype_name(t.dtype),
                    "mesh": self.meshes[t.mesh],
                    "placements": [str(p) for p in t.layout.placements],
                    "order": t.layout.order,
                }
                for t in self.types
            ],
        }


def encode(p: Plan) -> dict[str, object]:
    """A plan as plain values: tables of meshes and types, and the steps."""
    tables = Tables([p.src, p.dst])
    steps = [encoded_step(step, tables) for step in p.steps]
    return {
        "fdtensor": VERSION,
        **tables.encoded(),
        "src": tables.index(p.src),
        "dst": tables.index(p.dst),
        "steps": steps,
        "cost": encoded_cost(p.cost),
    }


def encoded_step(step: Step, tables: Tables) -> dict[str, object]:
    """A step as plain values: its types, its kind and the fields of its collective."""
    kind = type(step.collective)
    return {
        "src": tables.index(step.src),
        "dst": tables.index(step.dst),
        "kind": kind.__name__,
        **{f.name: getattr(step.collective, f.name) for f in attrs.fields(kind)},
    }


def encoded_cost(cost: CostModel) -> dict[str, object]:
    """A cost model as an object of its fields."""
    return {f.name: getattr(cost, f.name) for f in attrs.fields(CostModel)}


def decode(tree: object) -> tuple[TensorType, TensorType, tuple[Step, ...], CostModel]:
    """The fields of the plan that `encode` wrote; raises `Malformed`, or the errors of records."""
    _, meshes, types, src, dst, steps, cost = versioned(
        tree, "meshes", "types", "src", "dst", "steps", "cost"
    )
    _, table = tables_of(meshes, types)
    return (
        entry(table, src, "src"),
        entry(table, dst, "dst"),
        tuple([step_of(s, table, f"steps[{i}]") for i, s in enumerate(items(steps, "steps"))]),
        cost_of(cost),
    )


def versioned(tree: object, *names: str) -> list[object]:
    """The values of the outermost object, the version first."""
    if is_dict(tree) and tree.get("fdtensor", VERSION) != VERSION:
        raise Malformed(f"it is of version {tree['fdtensor']!r}, and this reads {VERSION}")
    return record(tree, "it", "fdtensor", *names)


def entry(table: Sequence[T], value: object, where: str) -> T:
    """The entry of a table with this index."""
    index = whole(value, where)
    if not 0 <= index < len(table):
        raise Malformed(f"{where} is {index}, in a table of {len(table)}")
    return table[index]


def tables_of(meshes: object, types: object) -> tuple[list[Mesh], list[TensorType]]:
    """The tables that `Tables` wrote."""
    known = [_mesh(m, f"meshes[{i}]") for i, m in enumerate(items(meshes, "meshes"))]
    return known, [_type(t, known, f"types[{i}]") for i, t in enumerate(items(types, "types"))]


def _mesh(tree: object, where: str) -> Mesh:
    linked = ["links"] if is_dict(tree) and "links" in tree else []
    axes, sizes, ranks, *links = record(tree, where, "axes", "sizes", "ranks", *linked)
    names = [word(axis, f"{where}.axes") for axis in items(axes, f"{where}.axes")]
    counts = [whole(n, f"{where}.sizes") for n in items(sizes, f"{where}.sizes")]
    if len(set(names)) < len(names) or len(names) != len(counts) or min(counts, default=1) < 1:
        raise Malformed(f"{where} has not one size, 1 or more, for each of its axes")
    named = _links(links[0], f"{where}.links") if links else None
    if ranks is None:
        return mesh_of(names, tuple(counts), range(prod(counts)), named)
    order = [whole(rank, f"{where}.ranks") for rank in items(ranks, f"{where}.ranks")]
    if len(order) != prod(counts):
        raise Malformed(f"{where} has {len(order)} ranks for a mesh of {prod(counts)}")
    return mesh_of(names, tuple(counts), order, named)


def _links(value: object, where: str) -> dict[str, str]:
    if not is_dict(value):
        raise Malformed(f"{where} is no object")
    return {axis: word(link, where) for axis, link in value.items()}


def _type(tree: object, meshes: Sequence[Mesh], where: str) -> TensorType:
    shape, dtype, mesh, placements, order = record(
        tree, where, "shape", "dtype", "mesh", "placements", "order"
    )
    placed = [word(p, f"{where}.placements") for p in items(placements, f"{where}.placements")]
    pairs = [items(pair, f"{where}.order") for pair in items(order, f"{where}.order")]
    if any(len(pair) != 2 for pair in pairs):
        raise Malformed(f"{where}.order has an entry that is no pair")
    orders = [(whole(d, f"{where}.order"), _words(axes, f"{where}.order")) for d, axes in pairs]
    if len(dict(orders)) < len(orders):
        raise Malformed(f"{where}.order has a dim twice")
    sizes = [whole(n, f"{where}.shape") for n in items(shape, f"{where}.shape")]
    layout = Layout(
        entry(meshes, mesh, f"{where}.mesh"), list(map(parse_placement, placed)), dict(orders)
    )
    return TensorType(sizes, parse_dtype(word(dtype, f"{where}.dtype")), layout)  # type: ignore[arg-type]


def step_of(tree: object, types: Sequence[TensorType], where: str) -> Step:
    """The step that `encoded_step` wrote."""
    name = tree.get("kind") if is_dict(tree) else None
    kind = _KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise Malformed(f"{where} is no step of a kind that there is")
    names = [f.name for f in attrs.fields(kind)]
    src, dst, _, *values = record(tree, where, "src", "dst", "kind", *names)
    fields = [_FIELDS[n](value, f"{where}.{n}") for n, value in zip(names, values, strict=True)]
    ends = entry(types, src, f"{where}.src"), entry(types, dst, f"{where}.dst")
    return Step(kind(*fields), *ends)


_KINDS = {kind.__name__: kind for kind in ALL}


def _axes(value: object, where: str) -> tuple[str, ...] | None:
    return None if value is None else _words(value, where)


def _words(value: object, where: str) -> tuple[str, ...]:
    return tuple([word(axis, where) for axis in items(value, where)])


def _dims(value: object, where: str) -> tuple[int, ...]:
    return tuple([whole(dim, where) for dim in items(value, where)])


def _reduce_op(value: object, where: str) -> str | None:
    return None if value is None else word(value, where)


_FIELDS: dict[str, Callable[[object, str], Any]] = {
    "axes": _axes,
    "dims": _dims,
    "src_dim": whole,
    "dst_dim": whole,
    "reduce_op": _reduce_op,
    "root": whole,
    "way": word,
    "pieces": whole,
}
"""The types of the fields of collectives, by name."""


def cost_of(tree: object) -> CostModel:
    """The cost model that is written as an object of its fields."""
    names = [f.name for f in attrs.fields(CostModel)]
    return CostModel(
        **{
            name: _cost_field(value, f"cost.{name}")
            for name, value in zip(names, record(tree, "cost", *names), strict=True)
        }
    )


def _cost_field(value: object, where: str) -> Any:
    """A name, a number or a table of rows, each a word and its numbers."""
    if isinstance(value, str):
        return word(value, where)
    if isinstance(value, bool):
        return value
    if not is_list(value):
        return real(value, where)
    rows = [items(row, where) for row in value]
    return tuple(
        [tuple([word(v, where) if isinstance(v, str) else real(v, where) for v in r]) for r in rows]
    )
