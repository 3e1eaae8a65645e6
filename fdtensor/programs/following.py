"""`Tolls`: what a choice that follows the layouts which were given pays for undoing them.

A value that is cut stays cut, one that is whole stays whole, and what is pending is reduced. Where
that cannot be, as where parameters and data are cut over one axis, a parameter is gathered before
data are. A toll is more than all the seconds of the program, so sizes do not matter: they decide
between choices of the same tolls alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, log2

import attrs
import optree

from fdtensor.layouts.free_type import FreeType
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import Cut, Partial
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.ops.flops import work
from fdtensor.ops.graph import Graph, Var
from fdtensor.ops.notation.core import R
from fdtensor.plans.cost import CostModel
from fdtensor.programs.ends import numbered
from fdtensor.programs.nodes import Place, Placements
from fdtensor.programs.rough_moves import about_seconds

__all__ = ["Tolls", "parameters_among", "tolls_of"]

CUTTING = 1
"""The toll for cutting what is whole or pending, in tolls."""

GATHERING = 3
"""The toll for moving a parameter that is cut, in tolls; for data it is that of all of them."""


@attrs.frozen
class Tolls:
    """The seconds added to moves that undo a layout which was given."""

    toll: float
    """More seconds than the whole program takes."""
    parameters: frozenset[int]
    """The values that depend on parameters alone."""
    rank: int
    """How many parameters are gathered before data are: more than there are."""

    @property
    def inside(self) -> Tolls:
        """The tolls in a decomposition, where no value is a parameter."""
        return attrs.evolve(self, parameters=frozenset[int]())

    def apart(self, seconds: float) -> tuple[int, float]:
        """How many tolls are in a price, and the seconds besides."""
        tolls, rest = divmod(seconds, self.toll)
        return int(tolls), rest

    def __call__(self, v: int, src: Placements, dst: Sequence[Place]) -> float:
        """The toll for moving value `v` from some placements to others."""
        moved = GATHERING if v in self.parameters else GATHERING * self.rank
        tolls = 0
        for p, q in zip(src, dst, strict=True):
            if q in (p, "free"):
                continue
            if isinstance(p, Cut):
                tolls += moved
            elif isinstance(q, Cut):
                tolls += CUTTING
        return tolls * self.toll


def tolls_of(graph: Graph, mesh: Mesh, cost: CostModel, parameters: frozenset[int]) -> Tolls:
    """The tolls of a graph of which the inputs with these numbers are parameters."""
    types = graph.types
    pending, whole = (Partial("sum"),) * len(mesh.axes), (R,) * len(mesh.axes)
    moves = sum(about_seconds(full, mesh.sizes, pending, whole, cost) for full in types)
    calls = 0.0
    for call in graph.calls:
        ins = [(types[v.index], R) for v in call.ins]
        outs = [(types[v.index], R) for v in call.outs if v is not None]
        calls += work(call, types, ins, outs, 1, 1.0, cost)
    # rounded up, so that programs of about one size share what is chosen for decompositions
    toll = 2.0 ** ceil(log2(4 * (moves + calls) + 1e-6))
    rank = 2 ** (len(parameters) + 8).bit_length()
    return Tolls(toll, _of_parameters(graph, parameters), rank)


def _of_parameters(graph: Graph, parameters: frozenset[int]) -> frozenset[int]:
    """The values that depend on parameters alone, by their numbers."""
    known: set[Var] = {graph.inputs[k] for k in parameters} | {v for v, _ in graph.constants}
    for call in graph.calls:
        if known.issuperset(call.ins):
            known |= {v for v in call.outs if v is not None}
    return frozenset(v.index for v in known)


def parameters_among(
    spec: optree.PyTreeSpec,
    types: Sequence[TensorType | FreeType | None],
    requires_grad: Sequence[bool],
) -> frozenset[int]:
    """The numbers of the inputs that are parameters: those that require grad.

    Where none does, they are the floating-point leaves of arguments that are pytrees, but for those
    that are batches beside others.
    """
    if any(requires_grad):
        return frozenset(k for k, wants in enumerate(requires_grad) if wants)
    trees, start = list[range](), 0
    for argument in (a for side in spec.children() for a in side.children()):
        leaves = range(start, start + argument.num_leaves)
        if not argument.is_leaf() and any(types[i] is not None for i in leaves):
            trees.append(leaves)
        start = leaves.stop
    others = [leaves for leaves in trees if not _is_batch([types[i] for i in leaves])]
    numbers, chosen = numbered(types), set[int]()
    for i in (i for leaves in others or trees[:1] for i in leaves):
        type, k = types[i], numbers[i]
        if type is not None and k is not None and type.dtype.is_floating_point:
            chosen.add(k)
    return frozenset(chosen)


def _is_batch(types: Sequence[TensorType | FreeType | None]) -> bool:
    """Whether tensors have one first dim, which is cut alike in all of them."""
    known = [type for type in types if type is not None]
    firsts = {
        (type.shape[:1], _cut_first(type) if isinstance(type, TensorType) else None)
        for type in known
    }
    return len(firsts) == 1 and all(type.ndim for type in known)


def _cut_first(type: TensorType) -> tuple[bool, ...]:
    """Along each axis, whether it cuts the first dim."""
    return tuple([isinstance(p, Cut) and p.dim == 0 for p in type.layout.placements])
