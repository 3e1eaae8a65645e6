"""`Choice`: what is chosen on one axis, and the `Constraints` that it keeps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import attrs
import torch

from fdtensor.layouts.layout import Layout
from fdtensor.layouts.placement import Partial, Placement
from fdtensor.ops.graph import Full, Graph, Var
from fdtensor.ops.precision import HALVES
from fdtensor.plans.cost import CostModel
from fdtensor.programs.nodes import Option

if TYPE_CHECKING:
    from fdtensor.programs.following import Tolls
    from fdtensor.programs.problem import ProblemBuilder

__all__ = ["UNCONSTRAINED", "Body", "Choice", "Choices", "Constraints", "Inside", "Nesting"]

PENDING = Partial("sum")
"""What a result may be left as where nothing is asked of it."""


@attrs.frozen(eq=False)
class Body:
    """A decomposition of a call, as a graph with the call's tensors as inputs and outputs."""

    graph: Graph
    depth: int
    """The number of decompositions that its calls are inside of."""
    blocks: int = 0
    """The number of blocks of a dim that it is for; 0 for one of whole tensors."""


@attrs.frozen(eq=False)
class Choice:
    """The options taken on one axis: for the inputs, the calls and the outputs of a graph."""

    ins: tuple[Placement, ...]
    calls: tuple[Option, ...]
    """`note` is a `Body` where the call runs as its decomposition."""
    outs: tuple[Placement, ...]
    seconds: float
    placements: Mapping[Var, Placement]
    """The placement in which each value is computed."""
    problem: ProblemBuilder | None = None
    """What it was chosen from; None for the graph of a `Body`."""


@attrs.frozen(eq=False)
class Nesting:
    """In which order axes cut one dim, as it was chosen with the placements."""

    ins: tuple[tuple[Any, ...], ...]
    """The places of each input, with their order."""
    calls: tuple[tuple[str, ...], ...]
    """The order of axes of each call."""
    outs: tuple[tuple[Any, ...], ...]


@attrs.frozen(eq=False)
class Choices(Mapping[str, Choice]):
    """The choice on each axis of a mesh."""

    along: Mapping[str, Choice]
    nested: Nesting | None = None
    """None where the order follows from the operands."""

    def __getitem__(self, axis: str) -> Choice:
        return self.along[axis]

    def __iter__(self) -> Iterator[str]:
        return iter(self.along)

    def __len__(self) -> int:
        return len(self.along)


@attrs.frozen(eq=False)
class Constraints:
    """Constraints on the choice for a whole graph, besides its boundary."""

    fixed: frozenset[Var] = frozenset()
    """Values that do not move while there is another way."""
    uncut: Mapping[Var, frozenset[int]] = attrs.field(factory=lambda: dict[Var, frozenset[int]]())
    """Dims of values that no axis may cut."""
    like: Choices | None = None
    """The choice for a graph of the same calls on other sizes, which is repeated."""
    cost: CostModel | None = None
    """Prices for the choice alone."""
    reduce_dtype: torch.dtype | None = torch.float32
    """The dtype in which pending sums of half precision are held; None for their own."""
    deterministic: bool = False
    """Whether calls whose bits depend on how operands are cut run on whole ones."""
    ties: Mapping[int, int] = attrs.field(factory=lambda: dict[int, int]())
    """The outputs, by number, that are to have the layout of an input which is open, and that."""
    parameters: frozenset[int] = frozenset()
    """The numbers of the inputs that are parameters."""
    follow: bool = False
    """Whether the layouts that were given decide."""
    pending: bool = False
    """Whether results may be pending sums where nothing is asked of them."""
    terms: int | None = None
    """How many such results are added up before they are reduced."""
    tolls: Tolls | None = None
    """What undoing a given layout costs then."""
    holding: float = 0.0
    """The seconds that a byte of an open input costs for being held, on the busiest rank."""
    ins: tuple[Layout | None, ...] = ()
    """The layouts of the inputs that have one."""
    outs: tuple[Layout | None, ...] = ()
    """The layouts that are asked of outputs."""

    def given(self, side: Literal["ins", "outs"], k: int) -> Layout | None:
        """The layout that was given of an input or an output, by its number."""
        layouts: Sequence[Layout | None] = getattr(self, side)
        return layouts[k] if layouts else None

    def may_end(self, full: Full, placement: Placement) -> bool:
        """Whether a result of which nothing is asked may have a placement.

        One element is never pending, so that a rank may look at a loss alone; halves are not, since
        they are summed in a wider dtype. Where `terms` are added up first, both may be pending.
        """
        if not isinstance(placement, Partial):
            return True
        held = self.reduce_dtype is not None and full.dtype in HALVES
        one = self.terms is None and (full.numel <= 1 or held)
        return self.pending and placement == PENDING and not one

    @property
    def inside(self) -> Inside:
        """Those that hold inside of decompositions."""
        return Inside(self.reduce_dtype, self.tolls and self.tolls.inside)


@attrs.frozen
class Inside:
    """Constraints on the choices for a decomposition; equal ones give equal choices."""

    reduce_dtype: torch.dtype | None
    tolls: Tolls | None

    @property
    def constraints(self) -> Constraints:
        """The same as constraints of a graph."""
        return Constraints(reduce_dtype=self.reduce_dtype, tolls=self.tolls)


UNCONSTRAINED = Constraints()
