"""Serving: sequences that share a long prefix, and drafts that one step verifies."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fdtensor import Mesh
from fdtensor.collectives import all_gather, axis_index, pmax, pmin, reduce_scatter
from tests.workloads.workload import Workload, at, half, single

__all__ = ["SERVING"]

Tensor = torch.Tensor

LINE = Mesh(tp=8)
BATCH, WHOLE = at("tp"), at()


# --- a prefix that sequences share ---------------------------------------------------------------


def parts(q: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The sum of values by their weights, that of the weights, and the greatest score."""
    scores = single(q @ keys.mT) / q.shape[-1] ** 0.5
    most = scores.amax(-1, keepdim=True)
    weights = (scores - most).exp()
    return single(half(weights) @ values), weights.sum(-1, keepdim=True), most


def shared(q: Tensor, prefix: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor]) -> Tensor:
    """Juravsky et al., "Hydragen" (2024): the queries of all sequences meet the prefix at once.

    `q[head, sequence, entry]`; keys and values `[head, place, entry]` of the prefix, and
    `[head, sequence, place, entry]` of each sequence.
    """
    first, weight, most = parts(q, *prefix)
    second, more, other = (t.squeeze(-2) for t in parts(q.unsqueeze(-2), *own))
    return joined(first, weight, most, second, more, other)


def joined(
    first: Tensor, weight: Tensor, most: Tensor, second: Tensor, more: Tensor, other: Tensor
) -> Tensor:
    top = torch.maximum(most, other)
    a, b = (most - top).exp(), (other - top).exp()
    return half((first * a + second * b) / (weight * a + more * b))


def shared_by_hand(q: Tensor, prefix: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor]) -> Tensor:
    """Each rank has a part of the prefix, and some of the sequences with what they have alone."""
    first, weight, most = parts(all_gather(q, "tp", 1), *prefix)
    top = pmax(most, "tp")
    first, weight = (reduce_scatter(t * (most - top).exp(), "tp", 1) for t in (first, weight))
    count = q.shape[1]
    (mine,) = top.unflatten(1, (-1, count)).movedim(1, 0)[axis_index("tp")[None]]
    second, more, other = (t.squeeze(-2) for t in parts(q.unsqueeze(-2), *own))
    return joined(first, weight, mine, second, more, other)


def prefixed(n: Mapping[str, int]) -> tuple[object, ...]:
    h, b, d = n["heads"], n["batch"], n["head"]

    def some(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.bfloat16)

    return (
        some(h, b, d),
        (some(h, n["prefix"], d), some(h, n["prefix"], d)),
        (some(h, b, n["own"], d), some(h, b, n["own"], d)),
    )


PREFIX = Workload(
    "128 sequences that share a prefix of 512k",
    LINE,
    shared,
    shared_by_hand,
    prefixed,
    (at(None, "tp"), at(None, "tp"), at(None, "tp")),
    at(None, "tp"),
    {"heads": 8, "batch": 128, "prefix": 1 << 19, "own": 1024, "head": 128},
    {"heads": 2, "batch": 8, "prefix": 32, "own": 4, "head": 4},
)


# --- drafts --------------------------------------------------------------------------------------


def verified(h: Tensor, head: Tensor, drafts: Tensor) -> tuple[Tensor, Tensor]:
    """Leviathan et al., "Fast Inference by Speculative Decoding" (2023), for the likeliest words.

    How many words of each draft are taken, and the word after each place: `h` has a place more.
    """
    words = single(half(h) @ half(head)).argmax(-1)
    taken = (words[:, :-1] == drafts).cumprod(1).sum(1)
    return taken, words


def verified_by_hand(h: Tensor, head: Tensor, drafts: Tensor) -> tuple[Tensor, Tensor]:
    """Each rank has a part of the vocabulary: the first of the likeliest words of all parts."""
    scores = single(half(h) @ half(head))
    best, word = scores.max(-1)
    word = word + axis_index("tp") * head.shape[1]
    words = pmin(torch.where(best == pmax(best, "tp"), word, 1 << 30), "tp")
    return (words[:, :-1] == drafts).cumprod(1).sum(1), words


DRAFTS = Workload(
    "drafts of 7 words, verified over 128k words",
    LINE,
    verified,
    verified_by_hand,
    lambda n: (
        torch.randn(n["batch"], n["places"], n["width"]),
        torch.randn(n["width"], n["words"]),
        torch.randint(n["words"], (n["batch"], n["places"] - 1)),
    ),
    (WHOLE, at(None, "tp"), WHOLE),
    WHOLE,
    {"batch": 64, "places": 8, "width": 4096, "words": 131072},
    {"batch": 4, "places": 4, "width": 8, "words": 32},
    at_most=4.1,
    why="the likeliest words of 8 parts are gathered at once, where the hand reduces twice: 32 kB",
)

SERVING = (PREFIX, DRAFTS)
