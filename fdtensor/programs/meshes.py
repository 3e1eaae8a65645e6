"""`one_mesh` and `on_mesh`: the mesh that a function is traced on, and what it is given seen there.

Arguments, results and values that `constrain` pins may have layouts on several meshes of the same
ranks. The program is on one whose axes those of all are products of; blocks stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import overload

import attrs

from fdtensor.layouts.errors import TraceError
from fdtensor.layouts.free_type import FreeType
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.refinement import refined, seen_on
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.ops.graph import Call, Full, Graph
from fdtensor.ops.pins import pinned
from fdtensor.programs.ends import Wanted
from fdtensor.programs.program import Program

__all__ = ["graph_on", "mesh_with", "on_mesh", "one_mesh", "seen_by_caller", "wants_on"]

_HINT = (
    "Redistribute to one mesh before: only those of the same ranks are taken as one, where the "
    "axes of each are products of axes that they could share."
)


def one_mesh(types: Sequence[TensorType | FreeType], mesh: Mesh | None = None) -> Mesh:
    """The mesh on which all types can be seen, and `mesh` where there is one.

    Raises `TraceError` where there is none.
    """
    given = [] if mesh is None else [mesh]
    meshes = [*dict.fromkeys([*given, *(t.mesh for t in types if isinstance(t, TensorType))])]
    if not meshes and types:
        raise TraceError(
            "the layouts of all arguments are free, and no mesh is given to choose them on.",
            arguments=", ".join(map(str, types)),
            hint="Write trace(f, ..., mesh=mesh), or give one argument a layout.",
        )
    if not meshes:
        raise TraceError(
            "no argument is a DTensor or a TensorType, so there is no mesh to run on.",
            hint="Pass at least one: trace(f, TensorType(shape, dtype, layout)).",
        )
    common = refined(*meshes)
    if common is None:
        raise TraceError(
            f"the arguments are on {len(meshes)} meshes, a traced function runs on one.",
            **{f"mesh {i}": m for i, m in enumerate(meshes)},
            hint=_HINT,
        )
    return common


def mesh_with(mesh: Mesh, graph: Graph, wants: Iterable[Wanted]) -> Mesh:
    """The mesh for a graph, what it pins, and the layouts that are asked of its results.

    Raises `TraceError` where there is none for all.
    """
    layouts = [x for x in (*wants, *map(pinned, graph.calls)) if isinstance(x, Layout)]
    for other in dict.fromkeys(layout.mesh for layout in layouts):
        common = refined(mesh, other)
        if common is None:
            raise TraceError(
                "a layout of out_layouts or constrain is on another mesh than the arguments.",
                arguments=mesh,
                layout=other,
                hint=_HINT,
            )
        mesh = common
    return mesh


@overload
def on_mesh(mesh: Mesh, type: TensorType) -> TensorType: ...


@overload
def on_mesh(mesh: Mesh, type: FreeType) -> FreeType: ...


def on_mesh(mesh: Mesh, type: TensorType | FreeType) -> TensorType | FreeType:
    """A type as it is seen on a mesh; raises `TraceError` where no layout there has its blocks."""
    if not isinstance(type, TensorType):
        return type
    seen = seen_on(type, mesh)
    if seen is None:
        raise TraceError(
            f"{type} is cut unevenly, and no layout on the mesh of the program has such blocks.",
            layout=type.layout,
            own=type.mesh,
            program=mesh,
            hint="Pad the dim until the ranks divide it, or write a layout on the other mesh.",
        )
    return seen


def graph_on(mesh: Mesh, graph: Graph) -> Graph:
    """A graph whose calls pin layouts as they are seen on a mesh."""
    calls = tuple([_call_on(mesh, graph, call) for call in graph.calls])
    same = all(a is b for a, b in zip(calls, graph.calls, strict=True))
    return graph if same else attrs.evolve(graph, calls=calls)


def wants_on(mesh: Mesh, graph: Graph, wants: Sequence[Wanted]) -> list[Wanted]:
    """The layouts that are asked of the results of a graph, as they are seen on a mesh."""
    fulls = [graph.types[v.index] for v in graph.outs]
    pairs = zip(fulls, wants, strict=True)
    return [_layout_on(mesh, full, w) if isinstance(w, Layout) else w for full, w in pairs]


def seen_by_caller(program: Program, types: Iterable[object], wants: Sequence[Wanted]) -> Program:
    """The program of a caller who gave arguments of these types and asked for these layouts.

    Results come in the layout that was asked for, else on the mesh of the first argument, where the
    same blocks have a layout there.
    """
    first = next((t.mesh for t in types if isinstance(t, TensorType)), program.mesh)
    pairs = zip(program.out_types, wants, strict=True)
    seen = tuple(
        [
            type.with_layout(want) if isinstance(want, Layout) else seen_on(type, first) or type
            for type, want in pairs
        ]
    )
    if seen == program.out_types:
        return program
    return attrs.evolve(program, origin=attrs.evolve(program.origin, seen=seen))


def _call_on(mesh: Mesh, graph: Graph, call: Call) -> Call:
    pin = pinned(call)
    if pin is None:
        return call
    layout = _layout_on(mesh, graph.types[call.ins[0].index], pin)
    if layout is pin:
        return call
    return attrs.evolve(call, args=(call.args[0], repr(layout), *call.args[2:]))


def _layout_on(mesh: Mesh, full: Full, layout: Layout) -> Layout:
    return on_mesh(mesh, TensorType(full.shape, full.dtype, layout)).layout
