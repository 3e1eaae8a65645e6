"""`Sizes`: the sizes of an exported program that are not known yet, and the numbers made of them.

A program is made for several values of the symbols. A number that differs between them is a sum of
products of symbols, which the values determine; one more point checks it.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import attrs
import torch

from fdtensor.layouts.errors import TraceError

__all__ = ["Point", "Sizes", "emitted", "input_at", "symbols_of", "value_at"]

Point = Mapping[str, int]
"""A value for each symbol, by its name."""

Terms = dict[tuple[str, ...], int]
"""The factor of each product of symbols."""


LARGEST = 1 << 40
"""Where sizes end that have no bound."""


@attrs.frozen
class Symbol:
    """A size that is not known yet, the range that it is in, and a usual value."""

    name: str
    low: int
    high: int
    usual: int


def symbols_of(program: torch.export.ExportedProgram) -> tuple[Symbol, ...]:
    """The symbols that the inputs of an exported program have sizes in."""
    symbols: dict[str, Symbol] = {}
    for node in program.graph.nodes:
        value = node.meta.get("val") if node.op == "placeholder" else None
        for size in value.shape if isinstance(value, torch.Tensor) else (value,):
            if isinstance(size, torch.SymInt):
                for symbol in sorted(size.node.expr.free_symbols, key=str):
                    if str(symbol) not in symbols or size.node.expr == symbol:
                        read = _symbol(symbol, size, program.range_constraints.get(symbol))
                        symbols[str(symbol)] = read
    return tuple(symbols.values())


def _symbol(symbol: Any, size: torch.SymInt, known: Any) -> Symbol:
    low, high = 2, LARGEST
    if known is not None:
        low = int(known.lower) if known.lower >= 2 else 2
        high = max(low, int(known.upper)) if known.upper <= LARGEST else LARGEST
    usual = size.node.hint if size.node.expr == symbol and size.node.has_hint() else 8
    return Symbol(str(symbol), low, high, min(max(low, int(usual)), high))


def value_at(size: Any, point: Point) -> int:
    """The value of a size at a point."""
    if isinstance(size, torch.SymInt):
        expr = size.node.expr
        return int(expr.subs({s: point[str(s)] for s in expr.free_symbols}))
    return int(size)


def input_at(value: Any, point: Point) -> Any:
    """The value at a point of an input that is no tensor: a size, or a Python value."""
    return value_at(value, point) if isinstance(value, torch.SymInt) else value


@attrs.frozen(eq=False)
class Sizes:
    """The points that a program is made for, and how numbers that differ between them are made."""

    symbols: tuple[Symbol, ...]
    points: tuple[Point, ...] = attrs.field(init=False)
    """The usual values, then the corners around them, then one that checks."""

    def __attrs_post_init__(self) -> None:
        corners = [*itertools.product((0, 1), repeat=len(self.symbols)), (2,) * len(self.symbols)]
        points = [
            {s.name: _moved(s, steps) for s, steps in zip(self.symbols, corner, strict=True)}
            for corner in corners
        ]
        unique = [p for i, p in enumerate(points) if p not in points[:i]]
        object.__setattr__(self, "points", tuple(unique))

    def terms(self, numbers: Sequence[int], what: str) -> Terms:
        """The sum of products that has these values at the points.

        Raises `TraceError` where there is none.
        """
        base = self.points[0]
        around: Terms = {}
        for point, number in zip(self.points, numbers, strict=True):
            gone = {name: point[name] - base[name] for name in base}
            if all(abs(n) < 2 for n in gone.values()):
                moved = tuple(name for name in base if gone[name])
                rest = number - _value(around, gone)
                around[moved] = rest // prod(gone[name] for name in moved)
        terms = _expanded(around, base)
        if [_value(terms, point) for point in self.points] != list(numbers):
            raise TraceError(
                f"{what} is no sum of products of sizes that are not known yet.",
                sizes=", ".join(f"{s.name} in {s.low}..{s.high}" for s in self.symbols),
                points=", ".join(str(tuple(p.values())) for p in self.points),
                values=", ".join(map(str, numbers)),
                hint="Export the program with these sizes fixed, or cut other dims.",
            )
        return terms


def _moved(symbol: Symbol, steps: int) -> int:
    """The value some steps from the usual one, within the range."""
    value = symbol.usual + steps
    return value if value <= symbol.high else max(symbol.low, symbol.usual - steps)


def _value(terms: Terms, at: Point) -> int:
    return sum(factor * prod(at[name] for name in product) for product, factor in terms.items())


def _expanded(around: Terms, base: Point) -> Terms:
    """Products of differences from the base as products of symbols."""
    terms: Terms = {}
    for product, factor in around.items():
        for k in range(len(product) + 1):
            for kept in itertools.combinations(product, k):
                rest = prod(-base[name] for name in product if name not in kept)
                terms[kept] = terms.get(kept, 0) + factor * rest
    return {product: factor for product, factor in terms.items() if factor}


def emitted(terms: Terms, symbol: Callable[[str], Any], call: Callable[..., Any]) -> Any:
    """The number that terms stand for: `call(op, a, b)` of what `symbol(name)` gives."""
    total: Any = None
    for product, factor in sorted(terms.items(), key=lambda item: -len(item[0])):
        value: Any = factor
        for name in product:
            value = symbol(name) if value == 1 else call(operator.mul, symbol(name), value)
        total = value if total is None else call(operator.add, total, value)
    return 0 if total is None else total
