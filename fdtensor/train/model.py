"""`Model`: what a job asks of the model that it trains; the GPT and published models answer it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import attrs
import torch
from torch import nn

from fdtensor.layouts.errors import FdtensorError
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.placement import Placement
from fdtensor.runtime.comm import Comm

__all__ = ["Model", "Params", "Part", "Pin", "layer_runs"]

Params = dict[str, torch.Tensor]

Pin = Callable[[torch.Tensor, str], torch.Tensor]
"""A function of an activation and its name that gives it back; a caller may pin its layout.

    residual  (batch, length, width)
    heads     (batch, heads, length, width / heads): query, key and value
    hidden    (batch, length, columns), that of a matrix which leads from the width
"""


@attrs.frozen
class Part:
    """One of the parts of a model that follow one another: a run of its layers.

    The first takes tokens, the last gives logits; between them goes the residual stream.
    """

    names: tuple[str, ...]
    """The parameters that it reads, by their names in the whole model."""
    run: Callable[[Params, torch.Tensor], torch.Tensor]


class Model(Protocol):
    """A decoder of tokens: the same on every mesh, and known on every rank."""

    @property
    def length(self) -> int:
        """How many tokens it sees at once."""
        ...

    @property
    def dropout(self) -> float:
        """The part of activations that is dropped in training."""
        ...

    @property
    def title(self) -> str:
        """What it is, as in `a GPT`."""
        ...

    def module(self, pin: Pin | None = None) -> nn.Module:
        """The module without numbers, which calls `pin` on the activations that `Pin` names."""
        ...

    def logits(self, module: nn.Module, params: Params, tokens: torch.Tensor) -> torch.Tensor:
        """The logits of tokens of shape (batch, length), for the parameters of the module."""
        ...

    def part_names(self, count: int) -> list[tuple[str, ...]]:
        """The parameters that each of as many parts reads. Raises as `parts` does."""
        ...

    def parts(self, pins: Sequence[Pin | None]) -> list[Part]:
        """As many parts as there are pins, of about as many layers each.

        Raises `FdtensorError` where there are fewer layers.
        """
        ...

    def placement(self, name: str) -> Placement:
        """The placement of a parameter along an axis of tensor parallelism."""
        ...

    def initial(self, seed: int, layouts: Mapping[str, Layout], comm: Comm[Any]) -> dict[str, Any]:
        """The parameters to start from as DTensors; those that are drawn follow from the seed."""
        ...

    def text(self) -> torch.Tensor:
        """The tokens of the text to learn from, 1-d."""
        ...


def layer_runs(layers: int, count: int) -> list[range]:
    """The layers of each of `count` parts: the first ones have one more where they do not divide.

    Raises `FdtensorError` where there are fewer layers than parts.
    """
    if layers < count:
        raise FdtensorError(
            f"a model of {layers} layers cannot be cut into {count} parts.",
            hint="Give fewer ranks to the axis pp.",
        )
    each, more = divmod(layers, count)
    ends = [i * each + min(i, more) for i in range(count + 1)]
    return [range(start, end) for start, end in itertools.pairwise(ends)]
