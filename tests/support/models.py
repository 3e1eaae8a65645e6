"""Unchanged torch modules, small enough to run on any layout."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["MODELS"]


class Residual(nn.Module):
    """A residual convolution net with batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.first = nn.Conv2d(4, 4, 3, padding=1)
        self.second = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(torch.relu(self.norm(self.stem(x))), 2)
        x = x + torch.relu(self.second(self.first(x)))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


class Mixture(nn.Module):
    """A layer of experts, two of which see each token."""

    def __init__(self, experts: int, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.up = nn.Parameter(torch.randn(experts, width, hidden))
        self.down = nn.Parameter(torch.randn(experts, hidden, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores, chosen = self.gate(x).softmax(-1).topk(2)
        hot = F.one_hot(chosen, self.up.shape[0]).to(x.dtype)
        weights = torch.einsum("tk,tke->te", scores, hot)
        hidden = torch.relu(torch.einsum("td,edh->eth", x, self.up))
        return torch.einsum("te,eth,ehd->td", weights, hidden, self.down)


class SelfAttention(nn.Module):
    """`nn.MultiheadAttention` of a sequence with itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x, x, x)


class Recurrent(nn.Module):
    """`nn.LSTM` of two layers, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LSTM(3, 4, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> Any:
        out, (h, c) = self.inner(x)
        return out, h, c


class Bags(nn.Module):
    """`nn.EmbeddingBag` of rows of indices."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.inner = nn.EmbeddingBag(7, 4, mode=mode)

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return self.inner(index)


class Decoder(nn.Module):
    """`nn.TransformerDecoderLayer` over a memory made of the same tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.TransformerDecoderLayer(4, 2, 6, 0.0, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
        return self.inner(x, x.flip(1), tgt_mask=mask)


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


MODELS = {
    "residual net": (Residual, lambda b: numbers(b, 2, 4, 4)),
    "encoder layer": (
        lambda: nn.TransformerEncoderLayer(4, 2, 6, 0.0, batch_first=True),
        lambda b: numbers(b, 3, 4),
    ),
    "encoder layer, norm first": (
        lambda: nn.TransformerEncoderLayer(4, 2, 6, 0.0, "gelu", batch_first=True, norm_first=True),
        lambda b: numbers(b, 3, 4),
    ),
    "decoder layer": (Decoder, lambda b: numbers(b, 3, 4)),
    "attention": (SelfAttention, lambda b: numbers(b, 5, 4)),
    "LSTM": (Recurrent, lambda b: numbers(b, 3, 3)),
    "sums of bags": (lambda: Bags("sum"), lambda b: torch.randint(7, (b, 3))),
    "means of bags": (lambda: Bags("mean"), lambda b: torch.randint(7, (b, 3))),
    "mixture of experts": (lambda: Mixture(4, 3, 5), lambda b: numbers(b, 3)),
}
"""A module, and a batch of what it takes."""
