"""`RankPrograms`: what a rank runs of an exported program, at each point of unknown sizes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import attrs
import torch

from fdtensor.layouts.errors import TraceError
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import Cut, Replicate
from fdtensor.ops.graph import Graph, Var, is_view
from fdtensor.ops.pins import pinned
from fdtensor.ops.rewrite import rewritten
from fdtensor.parallel.exported import Exported, Pins
from fdtensor.parallel.sizes import Sizes, symbols_of
from fdtensor.plans.cost import NCCL
from fdtensor.plans.cost_parts import in_order
from fdtensor.programs.assembly import assembled
from fdtensor.programs.choices import Constraints
from fdtensor.programs.program import Program
from fdtensor.runtime.lines import LocalProgram
from fdtensor.runtime.local_program import Spelling, local_program

__all__ = ["RankPrograms", "device_of", "rank_programs"]

NAMED = attrs.evolve(
    NCCL, name="named", launch=(("", 10e-6), ("exchange", 1e-4), ("peer_to_peer", 1e-4))
)
"""Prices of programs that people read: exchanges only where they move less."""


def device_of(exported: Exported) -> str:
    """The kind of device that the inputs of an exported program are on."""
    return next((n.meta["val"].device.type for n in exported.tensors), "cpu")


@attrs.frozen(eq=False)
class RankPrograms:
    """The program of a rank, at each point of the sizes that are not known yet."""

    sizes: Sizes
    programs: tuple[Program, ...]
    lines: tuple[LocalProgram, ...]
    numbers: tuple[Sequence[int], ...]
    """The results that are no tensors."""


def rank_programs(
    exported: Exported,
    mesh: Mesh,
    rank: int,
    layouts: Mapping[str, Layout],
    pins: Pins,
    wants: Sequence[Layout],
    backend: str,
) -> RankPrograms:
    """The program of the rank, for each value of the sizes that are not known yet."""
    sizes = Sizes(symbols_of(exported.program))
    device = device_of(exported)
    recordings = [exported.recorded(point, pins, device) for point in sizes.points]
    graphs = [rewritten(graph) for graph, _ in recordings]
    uncut = _uncut(graphs)
    for call in graphs[0].calls:
        if call.ins:
            _settled(f"node {str(call.mark)!r}", pinned(call), uncut.get(call.ins[0], ()))
    for v, want in zip(graphs[0].outs, wants, strict=True):
        _settled("a result", want, uncut.get(v, ()))
    constraints = Constraints(
        fixed=_fixed(exported, graphs[0], layouts),
        uncut=uncut,
        cost=in_order(NAMED),
    )
    programs: list[Program] = []
    for graph in graphs:
        types = exported.typed([graph.types[v.index] for v in graph.inputs], layouts, mesh)
        like = programs[0].origin.choices if programs else None
        own = attrs.evolve(constraints, like=like)
        program = assembled(graph, mesh, types, wants, NAMED, name="exported", constraints=own)
        programs.append(program)
    spelling = Spelling(backend, str(device), exchanges=True)
    lines = [local_program(program, rank, spelling) for program in programs]
    return RankPrograms(
        sizes, tuple(programs), tuple(lines), tuple(numbers for _, numbers in recordings)
    )


def _fixed(exported: Exported, graph: Graph, layouts: Mapping[str, Layout]) -> frozenset[Var]:
    """The parameters that are cut, and what is just seen or cast of them."""
    fixed = set()
    for node, v in zip(exported.tensors, graph.inputs, strict=True):
        layout = layouts.get(exported.targets.get(node.name, ""))
        if layout is not None and not all(isinstance(p, Replicate) for p in layout.placements):
            fixed.add(v)
    for call in graph.calls:
        alone = len(call.ins) == 1 and len(call.outs) == 1
        if (
            alone
            and call.ins[0] in fixed
            and (is_view(call) or torch.Tag.pointwise in call.op.tags)
        ):
            fixed.update(v for v in call.outs if v is not None)
    return frozenset(fixed)


def _uncut(graphs: Sequence[Graph]) -> dict[Var, frozenset[int]]:
    """The dims of values that differ between graphs."""
    first, *others = graphs
    for other in others:
        if [c.op for c in other.calls] != [c.op for c in first.calls]:
            raise TraceError(
                "the exported program takes other steps for other values of its dynamic sizes.",
                hint="Export it with these sizes fixed.",
            )
    varying = {}
    for i, full in enumerate(first.types):
        shapes = zip(full.shape, *(other.types[i].shape for other in others), strict=True)
        dims = frozenset(d for d, sizes in enumerate(shapes) if len(set(sizes)) > 1)
        if dims:
            varying[Var(i)] = dims
    return varying


def _settled(what: str, layout: Layout | None, unknown: Collection[int]) -> None:
    """Refuses to cut dims of sizes that are not known yet."""
    for p in () if layout is None else layout.placements:
        if isinstance(p, Cut) and p.dim in unknown:
            raise TraceError(
                f"dim {p.dim} of {what} is to be cut, and its size is not known yet.",
                layout=layout,
                hint="Export the program with that size fixed, or cut another dim.",
            )
