"""`Sizes` and `Template`: a graph for all sizes of some dims, of which only names are known.

A function is recorded on tensors with symbols for these sizes. What it computes of them comes out
as expressions, and what it asks of them as conditions; where these hold, the graph at other sizes
is the one that a recording there would give.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from fdtensor.layouts.torch_private import (
    SYMBOLIC,
    conditions_on_sizes,
    size_environment,
    size_symbol,
    symbolic_size,
)
from fdtensor.ops.graph import Call, Full, Graph

__all__ = ["Computed", "Condition", "Shape", "Sizes", "Template", "new_symbol"]


@attrs.frozen(repr=False)
class Computed:
    """A number that depends on sizes which are not known: an int, a float or a bool."""

    kind: type
    expression: Any
    """Of sympy, over symbols that `new_symbol` gave."""

    def __repr__(self) -> str:
        return str(self.expression)

    @property
    def is_symbol(self) -> bool:
        """Whether it is an unknown size itself."""
        return self.expression.is_Symbol

    def at(self, values: Mapping[Any, Any]) -> int | float | bool:
        """The number at these sizes, by symbols."""
        return self.kind(self.expression.xreplace(values))


Shape = tuple[int | Computed, ...]
"""A shape with sizes that are not known."""

Values = Mapping[Any, Any]
"""The numbers of sympy for the symbols of sizes."""


@attrs.frozen
class Condition:
    """What a recording relies on, and the place that asked for it."""

    expression: Any
    place: str

    def holds(self, values: Values) -> bool:
        """Whether it is so at these sizes; not where it has no value there, as `n % 0`."""
        try:
            return bool(self.expression.xreplace(values))
        except ZeroDivisionError:
            return False

    @property
    def fixes(self) -> str | None:
        """The name of a size of which it allows one number alone, other than 0 and 1."""
        import sympy

        if not isinstance(self.expression, sympy.Eq):
            return None
        size, number = self.expression.args
        free = number.free_symbols or not size.free_symbols
        return None if free or number in (0, 1) else str(size)


def new_symbol(name: str) -> Computed:
    """A size that is not known, of this name."""
    import sympy

    return Computed(int, sympy.Symbol(name, integer=True, nonnegative=True))


class Sizes:
    """The sizes of one recording that are symbols, as the function sees them."""

    def __init__(self, shapes: Sequence[Shape], fulls: Sequence[Full]) -> None:
        self.environment = size_environment()
        self.shapes = tuple(shapes)
        self._own: dict[Any, Any] = {}
        """The symbols of torch by ours."""
        self._values = _values(shapes, fulls)
        for symbol, n in self._values.items():
            self._own[symbol] = size_symbol(self.environment, str(symbol), int(n))
        self._names = {own: name for name, own in self._own.items()}
        self.fulls = tuple(fulls)

    def of_input(self, i: int) -> tuple[Any, ...]:
        """The shape of an input, for a fake tensor."""
        pairs = zip(self.shapes[i], self.fulls[i].shape, strict=True)
        return tuple([self._seen(size, n) for size, n in pairs])

    def _seen(self, size: int | Computed, n: int) -> Any:
        if not isinstance(size, Computed):
            return size
        return symbolic_size(self.environment, size.expression.xreplace(self._own), n)

    def plain(self, number: Any) -> Any:
        """A number of a recording as one of a template."""
        if not isinstance(number, SYMBOLIC):
            return number
        node: Any = number.node
        kind, expression = node.pytype, node.expr.xreplace(self._names)
        return Computed(kind, expression) if expression.free_symbols else kind(expression)

    def template(self, graph: Graph) -> Template:
        """The graph that was recorded, with what it relies on."""
        asked = dict.fromkeys(conditions_on_sizes(self.environment))
        conditions = [Condition(e.xreplace(self._names), place) for e, place in asked]
        conditions += _with_elements(graph, self._values)
        return Template(graph, self.shapes, tuple(conditions))


def _with_elements(graph: Graph, values: Values) -> list[Condition]:
    """The conditions that what has elements at these sizes has some at others, and the reverse.

    Functions of empty tensors are others in many ways: torch refuses some, and does not say so
    where sizes are symbols.
    """
    import sympy

    open_sizes = dict.fromkeys(n for t in graph.types for n in t.shape if isinstance(n, Computed))
    least = [(n.expression, 1 if n.at(values) else 0) for n in open_sizes]
    return [Condition(sympy.Ge(n, 1) if some else sympy.Eq(n, 0), "not known") for n, some in least]


@attrs.frozen(eq=False)
class Template:
    """A graph for all sizes at which its conditions hold: `Computed` where numbers depend on them.

    It is no graph to be read or run: `at` gives one, for sizes that `values` takes.
    """

    graph: Graph
    shapes: tuple[Shape, ...]
    """Those of its inputs."""
    conditions: tuple[Condition, ...]

    def values(self, fulls: Sequence[Full]) -> Values | None:
        """The sizes in inputs of these types; None where it is no graph of theirs."""
        if [len(s) for s in self.shapes] != [t.ndim for t in fulls]:  # cotangents of other results
            return None
        values, pairs = _values(self.shapes, fulls), _pairs(self.shapes, fulls)
        same = all((s.at(values) if isinstance(s, Computed) else s) == n for s, n in pairs)
        return values if same and all(c.holds(values) for c in self.conditions) else None

    def at(self, values: Values) -> Graph:
        """The graph at these sizes."""
        known: dict[Computed, Any] = {}

        def at(tree: Any) -> Any:
            if isinstance(tree, Computed):
                if tree not in known:
                    known[tree] = tree.at(values)
                return known[tree]
            return tuple([at(entry) for entry in tree]) if isinstance(tree, tuple) else tree

        def call_at(call: Call) -> Call:
            if not is_computed((call.args, call.kwargs)):
                return call
            return attrs.evolve(call, args=at(call.args), kwargs=at(call.kwargs))

        graph = self.graph
        calls = tuple([call_at(call) for call in graph.calls])
        types = [Full(at(t.shape), t.dtype) if is_computed(t.shape) else t for t in graph.types]
        return Graph(graph.inputs, graph.constants, calls, graph.outs, tuple(types))


def _pairs(shapes: Sequence[Shape], fulls: Sequence[Full]) -> list[tuple[int | Computed, int]]:
    """Each size of some shapes, with the number that it is in tensors of these types."""
    return [
        pair
        for shape, full in zip(shapes, fulls, strict=True)
        for pair in zip(shape, full.shape, strict=True)
    ]


def _values(shapes: Sequence[Shape], fulls: Sequence[Full]) -> Values:
    """The numbers that symbols are in tensors of these types, the first that each of them is."""
    import sympy

    values: dict[Any, Any] = {}
    for size, n in _pairs(shapes, fulls):
        if isinstance(size, Computed) and size.is_symbol:
            values.setdefault(size.expression, sympy.Integer(n))
    return values


def is_computed(tree: Any) -> bool:
    """Whether arguments have a number that depends on sizes."""
    if isinstance(tree, tuple):
        return any(map(is_computed, tree))
    return isinstance(tree, Computed)
