"""The two models of the training steps: an MLP and a transformer block, as plain torch functions.

They know nothing of meshes: given the parameters of one rank they compute its part, where `enter`
and `leave` are what Megatron calls f and g, around what is sharded. Shoeybi et al., "Megatron-LM"
(2019), arXiv:1909.08053.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

__all__ = ["BLOCK", "MLP", "MODELS", "Model", "Module"]

Tensors = Mapping[str, torch.Tensor]

Hook = Callable[[torch.Tensor], torch.Tensor]

HEAD = 8
"""The width of an attention head."""


def itself(x: torch.Tensor) -> torch.Tensor:
    return x


@attrs.frozen
class Model:
    """A function of parameters and an input, with the shapes of both and who shards what.

    `forward(params, x, enter, leave)` gives an output of the shape of `x`.
    """

    name: str
    forward: Callable[..., torch.Tensor]
    shapes: dict[str, tuple[int, ...]]
    sharded: dict[str, int]
    """The dim of each parameter that is sharded; the others are replicated."""
    x: tuple[int, ...]

    def loss(self, params: Tensors, x: torch.Tensor, *hooks: Hook) -> torch.Tensor:
        """The mean square of the output."""
        return self.forward(params, x, *hooks).square().mean()

    def local_shape(self, name: str, ranks: int) -> tuple[int, ...]:
        """The shape of what each of so many ranks holds of a parameter."""
        shape = list(self.shapes[name])
        if name in self.sharded:
            shape[self.sharded[name]] //= ranks
        return tuple(shape)


def mlp(p: Tensors, x: Any, enter: Hook = itself, leave: Hook = itself) -> Any:
    """Up, relu, down."""
    h = F.relu(F.linear(enter(x), p["up.weight"], p["up.bias"]))
    return leave(F.linear(h, p["down.weight"])) + p["down.bias"]


def block(p: Tensors, x: Any, enter: Hook = itself, leave: Hook = itself) -> Any:
    """Attention, then an MLP, each after a layer norm and added to its input."""

    def normed(name: str, x: Any) -> Any:
        return F.layer_norm(x, x.shape[-1:], p[f"{name}.weight"], p[f"{name}.bias"])

    def heads(name: str) -> Any:
        made = F.linear(h, p[f"{name}.weight"], p[f"{name}.bias"])
        return made.unflatten(-1, (-1, HEAD)).transpose(1, 2)

    h = enter(normed("norm1", x))
    q, k, v = heads("query"), heads("key"), heads("value")
    seen = (q @ k.transpose(-1, -2) * HEAD**-0.5).softmax(-1) @ v
    x = x + leave(F.linear(seen.transpose(1, 2).flatten(2), p["out.weight"])) + p["out.bias"]
    h = F.gelu(F.linear(enter(normed("norm2", x)), p["up.weight"], p["up.bias"]))
    return x + leave(F.linear(h, p["down.weight"])) + p["down.bias"]


def _linear(name: str, wide: int, narrow: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (wide, narrow), f"{name}.bias": (wide,)}


def _norm(name: str, width: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def _split(*columns: str, rows: tuple[str, ...]) -> dict[str, int]:
    by_column = {f"{name}.{part}": 0 for name in columns for part in ("weight", "bias")}
    return by_column | {f"{name}.weight": 1 for name in rows}


MLP = Model(
    "mlp",
    mlp,
    {**_linear("up", 128, 32), **_linear("down", 32, 128)},
    _split("up", rows=("down",)),
    (16, 32),
)
"""Two layers: d 32, h 128."""

BLOCK = Model(
    "block",
    block,
    {
        **_norm("norm1", 64),
        **_linear("query", 64, 64),
        **_linear("key", 64, 64),
        **_linear("value", 64, 64),
        **_linear("out", 64, 64),
        **_norm("norm2", 64),
        **_linear("up", 256, 64),
        **_linear("down", 64, 256),
    },
    _split("query", "key", "value", "up", rows=("out", "down")),
    (2, 16, 64),
)
"""A transformer block: d 64, 8 heads."""

MODELS = (MLP, BLOCK)


class Module(nn.Module):
    """A model as one of `nn.Linear` and `nn.LayerNorm`, for torch's `parallelize_module`."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        for name, shape in model.shapes.items():
            part = name.removesuffix(".weight")
            if part != name:
                made = nn.Linear(shape[1], shape[0]) if len(shape) == 2 else nn.LayerNorm(shape[0])
                self.add_module(part, made)
        self.kind = model.name

    def forward(self, x: Any) -> Any:
        part = self._modules
        if self.kind == "mlp":
            return part["down"](F.relu(part["up"](x)))  # type: ignore[misc]

        def heads(name: str) -> Any:
            return part[name](h).unflatten(-1, (-1, HEAD)).transpose(1, 2)  # type: ignore[misc]

        h = part["norm1"](x)  # type: ignore[misc]
        q, k, v = heads("query"), heads("key"), heads("value")
        seen = (q @ k.transpose(-1, -2) * HEAD**-0.5).softmax(-1) @ v
        x = x + part["out"](seen.transpose(1, 2).flatten(2))  # type: ignore[misc]
        h = F.gelu(part["up"](part["norm2"](x)))  # type: ignore[misc]
        return x + part["down"](h)  # type: ignore[misc]

    def styles(self) -> dict[str, Any]:
        """What `parallelize_module` shall do to each part."""
        found: dict[str, Any] = {}
        for name in self._modules:
            if name in ("out", "down"):
                found[name] = RowwiseParallel()
            elif not name.startswith("norm"):
                found[name] = ColwiseParallel()
        return found
