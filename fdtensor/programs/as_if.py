"""`Repeated`: what a program repeats of one that was chosen at other sizes, mostly the real ones.

By a cost model small tensors are gathered, and computed on every rank: a test takes another program
than the run that it stands for. What repeats the choices has the layouts and collectives of the
other, on tensors of its own sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import optree

from fdtensor.layouts.errors import FdtensorError, TraceError
from fdtensor.layouts.free_type import FreeType
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.placement import Cut, Shard
from fdtensor.layouts.remembered import remembered
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.layouts.tree import flatten, unflatten
from fdtensor.ops.graph import Graph, Var
from fdtensor.ops.random_bits.keys import INTEGERS
from fdtensor.plans.cost import CostModel
from fdtensor.programs.sized import LISTED, fits, kind

if TYPE_CHECKING:
    from fdtensor.programs.program import Program

__all__ = [
    "Repeated",
    "Scale",
    "as_in",
    "at_scale",
    "dearer",
    "evenly",
    "refuse_other_sizes",
]

Scale = Callable[[tuple[int, ...]], Sequence[int]]
"""A function from the shape of an argument to the one that it stands for."""


@attrs.frozen(eq=False)
class Repeated:
    """A graph, and the program at other sizes whose choices it repeats.

    Raises `TraceError` where that program has other calls, or arguments in other layouts.
    """

    program: Program
    graph: Graph
    in_layouts: tuple[Layout, ...]

    def __attrs_post_init__(self) -> None:
        _refuse_untraced(self.program)
        _refuse_other_arguments(self.program, self.in_layouts)
        _refuse_other_calls(self.program, self.graph)

    def ratio(self, v: Var | None) -> float:
        """How many times more bytes a value has in the other program."""
        if v is None:
            return 1.0
        own = self.graph.types[v.index].nbytes
        return self.program.origin.graph.types[v.index].nbytes / own if own else 1.0


def as_in(
    theirs: Sequence[TensorType], types: Sequence[TensorType | FreeType | None]
) -> list[TensorType | None]:
    """The types, free ones in the layouts of a program whose inputs have these.

    Raises `TraceError` where that program has arguments of other dims or on another mesh.
    """
    others = iter(theirs)
    pairs = [(t, None if t is None else next(others, None)) for t in types]
    _refuse_others([(t, o) for t, o in pairs if t is not None and o is not None])
    return [_as(t, o) if isinstance(t, FreeType) else t for t, o in pairs]


def _refuse_others(pairs: Sequence[tuple[TensorType | FreeType, TensorType]]) -> None:
    for i, (own, other) in enumerate(pairs):
        if own.ndim != other.ndim:
            what, facts = "has other dims", {"argument": own, "program": other}
        elif isinstance(own, TensorType) and own.layout.mesh is not other.layout.mesh:
            what = "is on another mesh"
            facts = {"argument": own.layout.mesh, "program": other.layout.mesh}
        else:
            continue
        raise TraceError(
            f"argument {i} {what} than in the program to repeat.",
            **facts,
            hint="Repeat a program of the same function on the same mesh; sizes may differ.",
        )


def _as(type: FreeType, other: TensorType | None) -> TensorType:
    if other is None:
        raise TraceError(
            f"the program to repeat has no argument in the place of {type}.",
            hint="Repeat a program of the same function.",
        )
    return TensorType(type.shape, type.dtype, other.layout)


def at_scale(
    types: Sequence[TensorType | FreeType | None], spec: optree.PyTreeSpec, scale: Scale
) -> list[TensorType | FreeType | None]:
    """The types with the shapes that they stand for; a random key is of one size.

    `spec` is the structure of the arguments. Raises `TraceError` where `scale` gives no shape of as
    many dims.
    """
    pairs = zip(types, spec.paths(), strict=True)
    return [
        type if type is None or (path == KEY and _is_words(type)) else _scaled(type, scale)
        for type, path in pairs
    ]


KEY = (1, "key")
"""Where random ops have their key among `args, kwargs`."""


def _is_words(type: TensorType | FreeType) -> bool:
    return type.shape == (2,) and type.dtype in INTEGERS


def _scaled(type: TensorType | FreeType, scale: Scale) -> TensorType | FreeType:
    shape: Any = scale(type.shape)
    try:
        sizes = tuple(shape)
        if len(sizes) != type.ndim:
            raise TypeError
        _refuse_other_blocks(type, sizes)
        return attrs.evolve(type, shape=sizes)
    except TraceError:
        raise
    except (TypeError, FdtensorError) as error:
        raise TraceError(
            f"as_if gives {shape!r} for the shape {type.shape} of an argument.",
            argument=type,
            hint="It maps a shape to the one of the same number of dims to choose for.",
        ) from error


def _refuse_other_blocks(type: TensorType | FreeType, sizes: Sequence[int]) -> None:
    """Raises `TraceError` for another size of a dim whose blocks are listed one by one."""
    placements = type.layout.placements if isinstance(type, TensorType) else ()
    for p in placements:
        if isinstance(p, LISTED) and sizes[p.dim] != type.shape[p.dim]:
            raise TraceError(
                f"as_if gives {sizes} for {type}, and ragged blocks are not scaled.",
                placement=p,
                hint=f"Keep the size of dim {p.dim}, or give an argument in even shards.",
            )


@remembered(1024)
def dearer(cost: CostModel, ratio: float) -> CostModel:
    """A cost model by which a byte costs as much as `ratio` bytes do."""
    axes = tuple((axis, latency, bandwidth / ratio) for axis, latency, bandwidth in cost.axes)
    bandwidth, copy = cost.bandwidth / ratio, cost.copy / ratio
    flops = tuple((dtype, rate / ratio) for dtype, rate in cost.flops)
    return attrs.evolve(cost, bandwidth=bandwidth, copy=copy, flops=flops, axes=axes)


def _refuse_untraced(program: Program) -> None:
    if program.origin is None:
        raise TraceError(
            f"{program.name}, whose choices are to be repeated, does not have them.",
            hint="A program that was loaded has its lines alone: trace it, and pass it on.",
        )


def _refuse_other_arguments(program: Program, layouts: Sequence[Layout]) -> None:
    theirs = [type.layout for type in program.in_types]
    if len(theirs) != len(layouts):
        raise TraceError(
            f"the program to repeat takes {len(theirs)} tensors, the arguments are {len(layouts)}.",
            program=program.name,
            hint="Repeat a program of the same function.",
        )
    for i, (own, other) in enumerate(zip(layouts, theirs, strict=True)):
        if not _alike(own, other):
            raise TraceError(
                f"argument {i} has another layout than in the program to repeat.",
                argument=own,
                program=other,
                hint="Give both the same layouts, on one mesh; sizes may differ.",
            )


def _alike(own: Layout, other: Layout) -> bool:
    """Whether a layout stands for another one, as blocks that are listed do for such blocks."""
    pairs = [*zip(own.placements, other.placements, strict=True)]
    listed = any(isinstance(p, LISTED) for pair in pairs for p in pair)
    same = all(kind(p) == kind(q) for p, q in pairs) and own.order == other.order
    return own is other or (listed and same and own.mesh is other.mesh)


def evenly(out_layouts: object) -> object:
    """A tree of layouts, even ones in place of those whose blocks are listed one by one."""
    leaves, spec = flatten(out_layouts)
    return unflatten(spec, [_even(x) if isinstance(x, Layout) else x for x in leaves])


def _even(layout: Layout) -> Layout:
    cuts = [Shard(p.dim) if isinstance(p, LISTED) else p for p in layout.placements]
    return attrs.evolve(layout, placements=cuts)


def refuse_other_sizes(wants: Sequence[object], graph: Graph) -> None:
    """Raises `TraceError` where blocks were asked of a result that it has at other sizes alone."""
    for k, (v, want) in enumerate(zip(graph.outs, wants, strict=True)):
        full = graph.types[v.index]
        for p in want.placements if isinstance(want, Layout) else ():
            if isinstance(p, Cut) and not fits(p, full):
                raise TraceError(
                    f"as_if= (or like=) repeats a program of which result {k} was asked as {p}, "
                    f"and its shape is {full.shape}.",
                    asked=want,
                    hint="Give out_layouts= beside it, for the sizes at hand.",
                )


def _refuse_other_calls(program: Program, graph: Graph) -> None:
    other: Graph = program.origin.graph
    own, theirs = ([(c.op, c.ins, c.outs) for c in g.calls] for g in (graph, other))
    if own == theirs and graph.outs == other.outs:
        return
    pairs = zip(own, theirs, strict=False)
    i = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(own), len(theirs)))
    told = [str(calls[i][0]) if i < len(calls) else "none" for calls in (own, theirs)]
    raise TraceError(
        f"the program to repeat takes other calls from call {i} on.",
        call=told[0],
        program=told[1],
        line=next((c.mark for g in (graph, other) for c in g.calls[i : i + 1]), "not known"),
        hint="Repeat a program of the same function, whose steps do not depend on sizes: a write "
        "to a slice is one to the whole where it covers a small dim.",
    )
