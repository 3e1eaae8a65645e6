"""`Family`: the recordings of a function whose calls differ in the sizes of some dims alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs

from fdtensor.layouts.tensor_type import TensorType
from fdtensor.programs.closed_over import given_besides
from fdtensor.programs.dynamic import Dynamic, Recording
from fdtensor.programs.open_dims import Dims, Names, named_dims, open_shapes
from fdtensor.programs.tracer import Traced
from fdtensor.tensors.calls.key import without_sizes
from fdtensor.tensors.dtensor import DTensor, is_dtensor

__all__ = ["Family", "family_of"]


@attrs.define(eq=False)
class Family:
    """What is known of all sizes at which a function may be called, from those that it was."""

    names: Names
    """The names of the sizes that are not known, for each leaf of the arguments."""
    forward: list[Recording] = attrs.field(factory=lambda: list[Recording]())
    both: list[Recording] = attrs.field(factory=lambda: list[Recording]())
    """The recordings of the function, and with its derivative."""
    closed: tuple[int | DTensor[Any], ...] = ()
    """What it closes over, as in an `Entry`: where it is not recorded again, nothing else says."""
    told: set[str] = attrs.field(factory=lambda: set[str]())

    def of_call(self, spec: Any, leaves: Sequence[Any], closed: int) -> Dynamic:
        """What is known of a call with these leaves, the last so many of them closed over."""
        order: Sequence[int] = range(len(self.names))
        if closed:
            # the dict of keywords, which what is closed over joins, has an order of its own
            order, _ = given_besides(order, spec, [-1] * closed, is_dtensor)
        types = _types(leaves)
        names = [
            self.names[i] if i >= 0 else ("",) * (0 if t is None else t.ndim)
            for i, t in zip(order, types, strict=True)
        ]
        return Dynamic(self.forward, open_shapes(tuple(names), types), self.told)

    def of_derivative(self, primal: Traced, through: Sequence[int]) -> Dynamic | None:
        """What is known of the derivative of such a call; None where it is of one size alone."""
        known = primal.recording
        if known is None:
            return None
        cotangents = [known.out_shapes[i] for i in through]
        return Dynamic(self.both, [*known.in_shapes, *cotangents], self.told)


def family_of(
    families: dict[Any, Family],
    key: tuple[Any, ...],
    dims: Dims,
    f: Callable[..., Any],
    spec: Any,
    leaves: Sequence[Any],
) -> Family:
    """The family of a call with this key, of which these `dims` have sizes that are not known."""
    names = named_dims(dims, f, spec, _types(leaves))
    return families.setdefault(without_sizes(key, names), Family(names))


def _types(leaves: Sequence[Any]) -> list[TensorType | None]:
    return [leaf.type if isinstance(leaf, DTensor) else None for leaf in leaves]
