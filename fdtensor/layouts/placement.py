"""The placements: what one mesh axis does to a tensor.

`Replicate`       R            every rank along the axis holds the whole
`Shard`           S(0)         each holds one contiguous block of a dim, as `torch.chunk` cuts
`StridedShard`    S(0, f=2)    the dim is cut into `f` blocks and each holds its part of every block
`Ragged`          S(0, [3,5])  each holds one contiguous block, of a size given for each
`Spans`           S(0, 0:3 2:5)  what an op of a program reads: ranges that may overlap
`Partial`         P(sum)       each holds a term of the same shape; the tensor is their reduction
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, get_args

import attrs

from fdtensor.layouts.errors import LayoutError
from fdtensor.layouts.record import Record, integer, natural

__all__ = [
    "Cut",
    "Partial",
    "Placement",
    "Ragged",
    "ReduceOp",
    "Replicate",
    "Shard",
    "Spans",
    "StridedShard",
    "parse_placement",
]

ReduceOp = Literal["sum", "avg", "product", "max", "min", "band", "bor", "bxor"]
"""The reductions that a `Partial` may have pending."""

REDUCE_OPS: tuple[ReduceOp, ...] = get_args(ReduceOp)


def _dim(value: int) -> int:
    dim = natural(value)
    if dim is None:
        raise LayoutError(
            f"{value!r} is not a tensor dim.",
            hint="A dim is an int counted from the front: 0, 1, ...",
        )
    return dim


def _count(value: int) -> int:
    try:
        count = integer(value)
    except (TypeError, AttributeError):
        count = 0
    if count < 1:
        raise LayoutError(
            f"{value!r} is not a split factor.", hint="A split factor is an int, 1 or more."
        )
    return count


def _sizes(value: Sequence[int]) -> tuple[int, ...]:
    try:
        sizes = tuple(integer(size) for size in value)
    except (TypeError, AttributeError):
        sizes = (-1,)
    if any(size < 0 for size in sizes):
        raise LayoutError(
            f"{value!r} are not the sizes of blocks.",
            hint="Give one int, 0 or more, for each index along the axis.",
        )
    return sizes


def _reduce_op(value: ReduceOp) -> ReduceOp:
    for name in REDUCE_OPS:
        if value == name:
            return name
    raise LayoutError(
        f"{value!r} is not a reduce op.", hint=f"The reduce ops are {', '.join(REDUCE_OPS)}."
    )


@attrs.frozen(eq=False, repr=False)
class Replicate(Record):
    """Each rank along the axis holds the whole.

    >>> print(TensorType((4, 6), torch.float32, Layout(Mesh(x=2), [Replicate()])))
    f32[4,6]
    """

    def __repr__(self) -> str:
        return "Replicate()"

    def __str__(self) -> str:
        return "R"


@attrs.frozen(eq=False, repr=False)
class Shard(Record):
    """Each rank along the axis holds one contiguous block of tensor dim `dim`.

    Blocks have `ceil(size / n)` elements, the last ones fewer or none, as in `torch.chunk`.

    >>> mesh = Mesh(x=2)
    >>> shards(torch.arange(5), Layout(mesh, [Shard(0)]))
    (tensor([0, 1, 2]), tensor([3, 4]))
    """

    dim: int = attrs.field(converter=_dim)

    def __repr__(self) -> str:
        return f"Shard({self.dim})"

    def __str__(self) -> str:
        return f"S({self.dim})"


@attrs.frozen(eq=False, repr=False)
class StridedShard(Record):
    """Dim `dim` is cut into `split_factor` blocks, and each rank holds its part of every block.

    Both cuts are as in `Shard`; index i along the axis holds the i-th part of each block, in order.

    >>> mesh = Mesh(x=2)
    >>> shards(torch.arange(8), Layout(mesh, [StridedShard(0, split_factor=2)]))
    (tensor([0, 1, 4, 5]), tensor([2, 3, 6, 7]))
    """

    dim: int = attrs.field(converter=_dim)
    split_factor: int = attrs.field(converter=_count)

    def __repr__(self) -> str:
        return f"StridedShard({self.dim}, {self.split_factor})"

    def __str__(self) -> str:
        return f"S({self.dim}, f={self.split_factor})"


@attrs.frozen(eq=False, repr=False)
class Ragged(Record):
    """Index i along the axis holds a contiguous block of `sizes[i]` elements of dim `dim`.

    >>> mesh = Mesh(x=2)
    >>> shards(torch.arange(5), Layout(mesh, [Ragged(0, (1, 4))]))
    (tensor([0]), tensor([1, 2, 3, 4]))
    """

    dim: int = attrs.field(converter=_dim)
    sizes: tuple[int, ...] = attrs.field(converter=_sizes)

    def __repr__(self) -> str:
        return f"Ragged({self.dim}, {self.sizes!r})"

    def __str__(self) -> str:
        return f"S({self.dim}, [{','.join(map(str, self.sizes))}])"


def _spans(value: Sequence[Sequence[tuple[int, int]]]) -> tuple[tuple[tuple[int, int], ...], ...]:
    try:
        spans = tuple([tuple([(int(a), int(b)) for a, b in ranges]) for ranges in value])
    except (TypeError, ValueError):
        spans = (((0, 0),),)
    for ranges in spans:
        ends = [end for ends in ranges for end in ends]
        if any(a >= b for a, b in pairwise([-1, *ends])):
            raise LayoutError(
                f"{value!r} are not the ranges that each index along an axis holds.",
                hint="Give ascending ranges (start, stop) that are apart for each index.",
            )
    return spans


@attrs.frozen(eq=False, repr=False)
class Spans(Record):
    """Index i along the axis holds the ranges `spans[i]` of dim `dim`, ascending and apart.

    Those of different indices may overlap or leave holes: it says what the lines of a program
    read of an operand (a block and the halo around it), and nothing can be moved away from it.
    """

    dim: int = attrs.field(converter=_dim)
    spans: tuple[tuple[tuple[int, int], ...], ...] = attrs.field(converter=_spans)

    def __repr__(self) -> str:
        return f"Spans({self.dim}, {self.spans!r})"

    def __str__(self) -> str:
        held = ["+".join(f"{a}:{b}" for a, b in ranges) or "-" for ranges in self.spans]
        return f"S({self.dim}, {' '.join(held)})"


@attrs.frozen(eq=False, repr=False)
class Partial(Record):
    """Each rank along the axis holds a term; the tensor is their reduction by `reduce_op`.

    >>> mesh = Mesh(x=2)
    >>> terms = TensorType((2,), torch.int64, Layout(mesh, [Partial("sum")]))
    >>> x = from_local((torch.tensor([1, 2]), torch.tensor([10, 20])), terms, SimulatedComm(mesh))
    >>> x.full()
    tensor([11, 22])
    """

    reduce_op: ReduceOp = attrs.field(default="sum", converter=_reduce_op)

    def __repr__(self) -> str:
        return f"Partial({self.reduce_op!r})"

    def __str__(self) -> str:
        return f"P({self.reduce_op})"


Cut = Shard | StridedShard | Ragged | Spans
"""A placement that gives each rank a part of one dim."""

Placement = Replicate | Cut | Partial
"""The placement of a tensor on one mesh axis."""


_NOTATION = re.compile(
    r"""\s*(?:
        (?P<R> R | Replicate\(\s*\) )
      | (?:S|Shard)\(\s*(?P<dim>-?\d+)\s*\)
      | (?:S|StridedShard)\(\s*(?P<strided>\d+)\s*,\s*(?:f=|split_factor=)?\s*(?P<f>\d+)\s*\)
      | (?:S|Ragged)\(\s*(?P<ragged>\d+)\s*,\s*[\[(](?P<sizes>[\d\s,]*)[\])]\s*\)
      | S\(\s*(?P<spans>\d+)\s*,(?P<ranges>[\d:+\-\s]+)\)
      | (?:P|Partial)(?:\(\s*['"]?(?P<op>\w*)['"]?\s*\))?(?P<P>)
    )\s*""",
    re.VERBOSE | re.ASCII,
)


def parse_placement(text: str) -> Placement:
    """The placement written `R`, `S(0)`, `S(0, f=2)`, `S(0, [3,5])` or `P(sum)`, or as its repr.

    Also `S(0, 0:3 2:5)`, what a line of a program reads: for each index its ranges, joined by `+`,
    or `-` for none.
    """
    match = _NOTATION.fullmatch(text)
    if match is None or re.search(r"\d{20}", text):
        shown = text if len(text) <= 60 else f"{text[:60]}..."
        raise LayoutError(
            f"{shown!r} is not a placement.",
            hint="Write R, S(0), S(0, f=2), S(0, [3,5]) or P(sum).",
        )
    if match["R"]:
        return Replicate()
    if match["dim"]:
        return Shard(int(match["dim"]))
    if match["strided"]:
        return StridedShard(int(match["strided"]), int(match["f"]))
    if match["ragged"]:
        sizes = [int(n) for n in match["sizes"].replace(",", " ").split()]
        return Ragged(int(match["ragged"]), sizes)
    if match["spans"]:
        parts = [part.replace("-", "").split("+") for part in match["ranges"].split()]
        spans = [[ends.split(":") for ends in ranges if ends] for ranges in parts]
        return Spans(int(match["spans"]), spans)  # type: ignore[arg-type]
    return Partial(match["op"] or "sum")  # type: ignore[arg-type]
