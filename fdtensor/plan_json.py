"""A plan as JSON: tables of meshes, types and steps that refer to each other by index."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import attrs

from fdtensor import collective as collectives
from fdtensor.collective import Step
from fdtensor.cost import CostModel
from fdtensor.dtypes import dtype_name, parse_dtype
from fdtensor.layout import Layout, TensorType
from fdtensor.mesh import Mesh
from fdtensor.placement import parse_placement

if TYPE_CHECKING:
    from fdtensor.planner import Plan

__all__ = ["decode", "encode"]


def encode(found: Plan) -> dict[str, Any]:
    """A plan as plain values: tables of meshes, types and steps."""
    meshes: dict[Mesh, int] = {}
    types: dict[TensorType, int] = {}

    def type_index(type: TensorType) -> int:
        meshes.setdefault(type.mesh, len(meshes))
        return types.setdefault(type, len(types))

    src, dst = type_index(found.src), type_index(found.dst)
    steps = [
        {
            "src": type_index(step.src),
            "dst": type_index(step.dst),
            "kind": type(step.collective).__name__,
            **{
                f.name: getattr(step.collective, f.name)
                for f in attrs.fields(type(step.collective))
            },
        }
        for step in found.steps
    ]
    cost = {f.name: getattr(found.cost, f.name) for f in attrs.fields(CostModel)}
    return {
        "fdtensor": 1,
        "meshes": [
            {
                "axes": mesh.axes,
                "sizes": mesh.sizes,
                "ranks": None if isinstance(mesh.order, range) else mesh.order,
            }
            for mesh in meshes
        ],
        "types": [
            {
                "shape": t.shape,
                "dtype": dtype_name(t.dtype),
                "mesh": meshes[t.mesh],
                "placements": [str(p) for p in t.layout.placements],
                "order": t.layout.order,
            }
            for t in types
        ],
        "src": src,
        "dst": dst,
        "steps": steps,
        "cost": cost,
    }


def decode(
    data: dict[str, Any],
) -> tuple[TensorType, TensorType, tuple[Step, ...], CostModel]:
    """The fields of the plan that `encode` wrote."""
    meshes = [
        Mesh._make(
            m["axes"],
            tuple(m["sizes"]),
            range(prod(m["sizes"])) if m["ranks"] is None else m["ranks"],
        )
        for m in data["meshes"]
    ]
    types = [
        TensorType(
            t["shape"],
            parse_dtype(t["dtype"]),
            Layout(
                meshes[t["mesh"]],
                [parse_placement(p) for p in t["placements"]],
                {d: tuple(axes) for d, axes in t["order"]},
            ),
        )
        for t in data["types"]
    ]
    steps = []
    for entry in data["steps"]:
        kind = getattr(collectives, entry["kind"])
        fields = {f.name: _tuples(entry[f.name]) for f in attrs.fields(kind)}
        steps.append(Step(kind(**fields), types[entry["src"]], types[entry["dst"]]))
    cost = CostModel(**{name: _tuples(value) for name, value in data["cost"].items()})
    return types[data["src"]], types[data["dst"]], tuple(steps), cost


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
