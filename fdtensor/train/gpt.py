"""`GPT`: a decoder-only transformer in plain torch, which knows nothing of meshes.

Radford et al., "Language Models are Unsupervised Multitask Learners" (2019): layer norms come
first, the head is tied to the embedding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import nn

from fdtensor.layouts.errors import FdtensorError
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.placement import Placement
from fdtensor.runtime.comm import Comm
from fdtensor.tensors.distribution import distribute
from fdtensor.train.layouts import megatron
from fdtensor.train.model import Params, Part, Pin, layer_runs
from fdtensor.train.text import VOCABULARY, corpus

__all__ = ["GPT", "Size", "initial"]


@attrs.frozen
class Size:
    """How large a GPT is. The default has about a million parameters."""

    layers: int = 5
    width: int = 128
    heads: int = 4
    length: int = 64
    """How many tokens it sees at once."""
    dropout: float = 0.0
    """The part of embeddings, of attention and of what blocks add that is dropped in training."""

    def __attrs_post_init__(self) -> None:
        for name in ("layers", "width", "heads", "length"):
            if getattr(self, name) < 1:
                raise FdtensorError(
                    f"a GPT cannot have {name} {getattr(self, name)}.",
                    hint="Sizes are ints, 1 or more.",
                )
        if not 0 <= self.dropout < 1:
            raise FdtensorError(
                f"a GPT cannot drop {self.dropout} of its activations.",
                hint="Give a number from 0 up to, but without, 1.",
            )
        if self.width % self.heads:
            raise FdtensorError(
                f"{self.heads} heads cannot share a width of {self.width}.",
                hint="Choose a width that is a multiple of the number of heads.",
            )

    @property
    def title(self) -> str:
        return "a GPT"

    def module(self, pin: Pin | None = None) -> GPT:
        with torch.device("meta"):  # only the shape of the computation: the numbers are passed in
            return GPT(self, pin)

    def logits(self, module: nn.Module, params: Params, tokens: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(module, params, (tokens,))

    def part_names(self, count: int) -> list[tuple[str, ...]]:
        return [self._names(layers) for layers in layer_runs(self.layers, count)]

    def parts(self, pins: Sequence[Pin | None]) -> list[Part]:
        runs = layer_runs(self.layers, len(pins))
        return [
            Part(self._names(layers), partial(_run, self.module(pin), layers))
            for layers, pin in zip(runs, pins, strict=True)
        ]

    def _names(self, layers: range) -> tuple[str, ...]:
        module = self.module()
        names = [f"blocks.{i}.{n}" for i in layers for n, _ in module.blocks[i].named_parameters()]
        if layers.start == 0:
            names = ["token.weight", "position.weight", *names]
        if layers.stop == self.layers:
            names += ["token.weight", *[f"norm.{n}" for n, _ in module.norm.named_parameters()]]
        return tuple(dict.fromkeys(names))

    def placement(self, name: str) -> Placement:
        return megatron(name)

    def initial(self, seed: int, layouts: Mapping[str, Layout], comm: Comm[Any]) -> dict[str, Any]:
        drawn = {name: p.to(comm.device or "cpu") for name, p in initial(self, seed).items()}
        return distribute(drawn, dict(layouts), comm)

    def text(self) -> torch.Tensor:
        return corpus()


class GPT(nn.Module):
    """Tokens of shape (batch, length) to logits of shape (batch, length, 256).

    With `layers` only these run: without the first it takes the residual stream instead of tokens,
    without the last it gives the residual stream instead of logits.
    `pin` is called on the activations that `Pin` names.
    """

    def __init__(self, size: Size, pin: Pin | None = None) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, size.width)
        self.position = nn.Embedding(size.length, size.width)
        self.blocks = nn.ModuleList([Block(size, pin) for _ in range(size.layers)])
        self.norm = nn.LayerNorm(size.width)
        self.dropout = size.dropout
        self.pin = pin or _itself

    def forward(self, x: torch.Tensor, layers: range | None = None) -> torch.Tensor:
        count = len(self.blocks)
        layers = range(count) if layers is None else layers
        if layers.start == 0:
            x = self.token(x) + self.position.weight[: x.shape[1]]
            x = self.pin(F.dropout(x, self.dropout), "residual")
        for i in layers:
            x = self.blocks[i](x)
        return F.linear(self.norm(x), self.token.weight) if layers.stop == count else x


class Block(nn.Module):
    """Causal attention, then an MLP, each added to the residual stream."""

    def __init__(self, size: Size, pin: Pin | None) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(size.width)
        self.attention = Attention(size, pin)
        self.norm2 = nn.LayerNorm(size.width)
        self.mlp = MLP(size, pin)
        self.dropout = size.dropout
        self.pin = pin or _itself

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pin(x + F.dropout(self.attention(self.norm1(x)), self.dropout), "residual")
        return self.pin(x + F.dropout(self.mlp(self.norm2(x)), self.dropout), "residual")


class Attention(nn.Module):
    """Causal attention. Query, key and value have a matrix each, so that heads can be sharded."""

    def __init__(self, size: Size, pin: Pin | None) -> None:
        super().__init__()
        self.heads = size.heads
        self.dropout = size.dropout
        self.pin = pin or _itself
        self.query = nn.Linear(size.width, size.width)
        self.key = nn.Linear(size.width, size.width)
        self.value = nn.Linear(size.width, size.width)
        self.out = nn.Linear(size.width, size.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (self._by_head(linear(x)) for linear in (self.query, self.key, self.value))
        seen = F.scaled_dot_product_attention(q, k, v, None, self.dropout, is_causal=True)
        return self.out(seen.transpose(1, 2).flatten(2))

    def _by_head(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, length, width) to (batch, heads, length, width / heads)."""
        return self.pin(x.unflatten(2, (self.heads, -1)).transpose(1, 2), "heads")


class MLP(nn.Module):
    """Up to four times the width, GELU, and down again."""

    def __init__(self, size: Size, pin: Pin | None) -> None:
        super().__init__()
        self.pin = pin or _itself
        self.up = nn.Linear(size.width, 4 * size.width)
        self.down = nn.Linear(4 * size.width, size.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.pin(self.up(x), "hidden")))


def initial(size: Size, seed: int) -> dict[str, torch.Tensor]:
    """The parameters to start from, by name: the same for the same seed.

    Matrices are normal with deviation 0.02, smaller where they add to the residual stream; biases
    are 0 and the weights of norms 1.
    """
    generator = torch.Generator().manual_seed(seed)
    deep = (2 * size.layers) ** -0.5
    params = {}
    shapes = {name: p.shape for name, p in size.module().named_parameters()}
    for name, shape in shapes.items():
        if len(shape) == 1:
            params[name] = torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
        else:
            scale = 0.02 * (deep if name.endswith(("out.weight", "down.weight")) else 1)
            params[name] = torch.randn(shape, generator=generator) * scale
    return params


def _run(module: GPT, layers: range, params: Params, x: torch.Tensor) -> torch.Tensor:
    return torch.func.functional_call(module, params, (x, layers))


def _itself(x: torch.Tensor, _name: str) -> torch.Tensor:
    return x
