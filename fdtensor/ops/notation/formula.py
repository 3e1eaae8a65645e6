"""`formula`: the rows of an op from its index formula.

    formula("n i k, n k j -> n i j", a, b)      a batched product: a cut of k leaves a sum
    formula("i j + i k, k j -> i j", c, a, b)   with another term that is added
    formula("* N N, * N k -> * N k", a, b, linear=[1])   a solver: N is never cut

A letter is a dim, and a cut of it cuts all tensors with the letter; an output without it is a
pending sum. Capitals and digits are never cut. `*` stands for any number of leading dims, and
operands may be broadcast: those of size 1, or that lack the first letters, stay whole.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from fdtensor.layouts.placement import Placement
from fdtensor.ops.graph import Full
from fdtensor.ops.notation.core import P, R, S

__all__ = ["formula"]


def formula(
    text: str, *tensors: Full | None, linear: Sequence[int] | None = None
) -> Iterator[tuple[tuple[Placement, ...], tuple[Placement, ...]]]:
    """The rows of a formula for these operands; those that are None are left out.

    A sum may stay pending where the formula is linear: in one operand of every term at once, or
    with `linear` in the operands of these numbers, each by itself.
    """
    terms, outs = _parsed(text)
    counter = itertools.count()
    places = [[next(counter) for _ in term] for term in terms]
    present = [i for i, t in enumerate(tensors) if t is not None]
    flat = [letters for term in terms for letters in term]
    leads = [tensors[i].ndim - len(flat[i]) + 1 for i in present if "*" in flat[i]]  # type: ignore[union-attr]
    lead = max(leads, default=0)
    named = {i: _named(flat[i], tensors[i], lead) for i in present}
    results = [_expanded(out, lead) for out in outs]

    def row(cuts: dict[int, Placement], after: Sequence[Placement]) -> Any:
        return tuple(cuts.get(i, R) for i in present), tuple(after)

    for letter in dict.fromkeys(x for i in present for x in named[i] if x and not _whole(x)):
        sizes = {i: tensors[i].shape[named[i].index(letter)] for i in present if letter in named[i]}  # type: ignore[union-attr]
        size = max(sizes.values())
        cuts: dict[int, Placement] = {
            i: S(named[i].index(letter)) for i, n in sizes.items() if n == size
        }
        after = [S(out.index(letter)) if letter in out else P for out in results]
        if P in after:
            for members in places:  # a term without it is added once: it must be pending too
                operands = [i for i in members if i in named]
                if operands and not any(i in cuts for i in operands):
                    cuts[operands[0]] = P
        yield row(cuts, after)
    pending = [P] * len(results)
    if linear is None:
        for chosen in itertools.product(*([i for i in m if i in named] or [None] for m in places)):
            yield row({i: P for i in chosen if i is not None}, pending)
    for i in linear or ():
        if i in named:
            yield row({i: P}, pending)


@functools.cache
def _parsed(text: str) -> tuple[list[list[list[str]]], list[list[str]]]:
    """The letters of each operand of each term, and those of each output."""
    left, _, right = text.partition("->")
    terms = [[operand.split() for operand in term.split(",")] for term in left.split("+")]
    return terms, [out.split() for out in right.split(",")]


def _whole(letter: str) -> bool:
    return letter[0].isupper() or letter[0].isdigit()


def _expanded(letters: Sequence[str], lead: int) -> list[str]:
    """The letters with leading dims in place of the star, counted from the last of them."""
    star = [f"*{lead - i}" for i in range(lead)]
    return [x for letter in letters for x in (star if letter == "*" else [letter])]


def _named(letters: Sequence[str], tensor: Full | None, lead: int) -> list[str]:
    """A letter for each dim of an operand, which may lack the first ones."""
    assert tensor is not None
    return _expanded(letters, lead)[-tensor.ndim :] if tensor.ndim else []
