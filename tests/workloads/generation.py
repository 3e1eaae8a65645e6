"""Around a language model: generation with a cache, adapters, distillation, cut vocabularies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from fdtensor import Mesh
from fdtensor.collectives import all_gather, axis_index, axis_size, pmax, psum
from tests.workloads.language import (
    BACK,
    LLAMA_8B,
    SMALL_LAYER,
    Tensor,
    Tensors,
    cut_parameters,
    gated,
    halves,
    layer,
    normed,
    parameters,
    turned,
    waves,
)
from tests.workloads.workload import Workload, at, half, single

__all__ = ["GENERATION"]

TP, DP, FS = Mesh(tp=8), Mesh(dp=8), Mesh(fs=8)
BATCH = at("dp")


# --- a step of generation ------------------------------------------------------------------------


def stepped(
    p: Tensors, x: Tensor, place: Tensor, keys: Tensor, values: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The next token of each sequence through a layer, whose cache has room for `length`."""
    p = halves(p)
    x, keys, values = _attended(p, x, place, keys, values, cos, sin, p["out"])
    return x + gated(p, normed(x, p["norm2"])) @ p["down"], keys, values


def _attended(
    p: Tensors,
    x: Tensor,
    place: Tensor,
    keys: Tensor,
    values: Tensor,
    cos: Tensor,
    sin: Tensor,
    out: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    head, h = cos.shape[-1], normed(x, p["norm1"])
    q, k, v = ((h @ p[n]).unflatten(-1, (-1, head)).transpose(1, 2) for n in "qkv")
    q, k = (turned(t, cos[place], sin[place]) for t in (q, k))
    keys, values = keys.index_copy(2, place, k), values.index_copy(2, place, v)
    seen = torch.arange(keys.shape[2]) <= place
    y = F.scaled_dot_product_attention(q, keys, values, seen[None, None, None], enable_gqa=True)
    return y.transpose(1, 2).flatten(2) @ out, keys, values


def stepped_by_hand(
    p: Tensors, x: Tensor, place: Tensor, keys: Tensor, values: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Megatron: two sums of one token a sequence."""
    p = halves(p)
    x, keys, values = _attended(p, x, place, keys, values, cos, sin, p["out"])
    x = psum(x, "tp")
    return x + psum(gated(p, normed(x, p["norm2"])) @ p["down"], "tp"), keys, values


def step_of(n: Mapping[str, int]) -> tuple[Any, ...]:
    cache = (n["batch"], n["groups"], n["length"], n["head"])
    return (
        parameters(n, torch.float32),
        torch.randn(n["batch"], 1, n["width"], dtype=torch.bfloat16),
        torch.full((1,), n["length"] // 2),
        torch.randn(cache, dtype=torch.bfloat16),
        torch.randn(cache, dtype=torch.bfloat16),
        *waves(n["length"], n["head"], torch.bfloat16),
    )


HEADS = at(None, "tp")
STEP = Workload(
    "a token through a layer with a cache of 8k",
    TP,
    stepped,
    stepped_by_hand,
    step_of,
    (cut_parameters(TP), at(), at(), HEADS, HEADS, at(), at()),
    (at(), HEADS, HEADS),
    {**LLAMA_8B, "batch": 64, "length": 8192},
    {**SMALL_LAYER, "batch": 4, "length": 8},
)


# --- adapters ------------------------------------------------------------------------------------


def adapted(adapters: Tensors, p: Tensors, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Hu et al., "LoRA" (2021): a product of two thin matrices beside that of the queries."""
    p = halves(p)
    p = {**p, "q": p["q"] + half(adapters["down"]) @ half(adapters["up"])}
    return single(layer(p, x, cos, sin)).square().mean()


def adapted_by_hand(adapters: Tensors, p: Tensors, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return psum(adapted(adapters, p, x, cos, sin), "dp") / axis_size("dp")


def adapters_of(n: Mapping[str, int]) -> tuple[Any, ...]:
    width, queries = n["width"], n["heads"] * n["head"]
    adapters = {
        "down": torch.randn(width, n["rank"]) / width**0.5,
        "up": torch.randn(n["rank"], queries) / n["rank"] ** 0.5,
    }
    x = torch.randn(n["batch"], n["length"], width, dtype=torch.bfloat16)
    fixed = parameters(n, torch.bfloat16)
    return adapters, fixed, x, *waves(n["length"], n["head"], torch.bfloat16)


LORA = Workload(
    "LoRA of rank 16, data parallel",
    DP,
    adapted,
    adapted_by_hand,
    adapters_of,
    (at(), at(), BATCH, at(), at()),
    at(),
    {**LLAMA_8B, "batch": 8, "length": 4096, "rank": 16},
    {**SMALL_LAYER, "batch": 8, "length": 8, "rank": 2},
    grad=0,
)


# --- distillation --------------------------------------------------------------------------------


def distilled(student: Tensors, teacher: Tensors, x: Tensor, *both: Tensor) -> Tensor:
    """What a layer of a student lacks of what a layer of the teacher gives."""
    wanted = single(layer(halves(teacher), x, *both))
    return (single(layer(halves(student), x, *both)) - wanted).square().mean()


def distilled_by_hand(student: Tensors, teacher: Tensors, x: Tensor, *both: Tensor) -> Tensor:
    """The teacher is cut and gathered, the student is whole."""
    cut = halves(teacher)
    whole = {n: all_gather(t, "fs", 1 if n in BACK else 0) for n, t in cut.items()}
    return psum(distilled(student, whole, x, *both), "fs") / axis_size("fs")


def models_of(n: Mapping[str, int]) -> tuple[Any, ...]:
    x = torch.randn(n["batch"], n["length"], n["width"], dtype=torch.bfloat16)
    student = parameters({**n, "hidden": n["hidden"] // 4}, torch.float32)
    both = waves(n["length"], n["head"], torch.bfloat16)
    return student, parameters(n, torch.bfloat16), x, *both


DISTILLED = Workload(
    "distillation from a layer that is cut",
    FS,
    distilled,
    distilled_by_hand,
    models_of,
    (at(), cut_parameters(FS), at("fs"), at(), at()),
    at(),
    {**LLAMA_8B, "batch": 8, "length": 4096},
    {**SMALL_LAYER, "batch": 8, "length": 8},
    grad=0,
)


# --- vocabularies --------------------------------------------------------------------------------


def predicted(p: Tensors, ids: Tensor, labels: Tensor) -> Tensor:
    """The loss of the next token by what a table has of the last, through a matrix."""
    h = F.embedding(ids, half(p["table"]))
    logits = single(h @ half(p["head"]))
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def predicted_by_hand(p: Tensors, ids: Tensor, labels: Tensor) -> Tensor:
    """Shoeybi et al., "Megatron-LM" (2019): each rank has a part of the vocabulary."""
    table, head = half(p["table"]), half(p["head"])
    start = axis_index("tp") * len(table)

    def own(t: Tensor) -> tuple[Tensor, Tensor]:
        is_held = (t >= start) & (t < start + len(table))
        return is_held, torch.where(is_held, t - start, 0)

    is_held, place = own(ids)
    h = psum(F.embedding(place, table) * is_held[..., None], "tp")
    logits = single(h @ head)
    highest = pmax(logits.detach().amax(-1), "tp")
    total = psum((logits - highest[..., None]).exp().sum(-1), "tp").log() + highest
    is_held, place = own(labels)
    chosen = psum(logits.gather(-1, place[..., None])[..., 0] * is_held, "tp")
    return (total - chosen).mean()


def tokens_of(n: Mapping[str, int]) -> tuple[Any, ...]:
    shape = (n["batch"], n["length"])
    p = {
        "table": torch.randn(n["words"], n["width"]),
        "head": torch.randn(n["width"], n["words"]) / n["width"] ** 0.5,
    }
    return p, torch.randint(n["words"], shape), torch.randint(n["words"], shape)


WORDS = {"table": at("tp"), "head": at(None, "tp")}
VOCABULARY = Workload(
    "embedding and loss of 128k words, cut",
    TP,
    predicted,
    predicted_by_hand,
    tokens_of,
    (WORDS, at(), at()),
    WORDS,
    {"words": 131072, "width": 4096, "batch": 2, "length": 4096},
    {"words": 32, "width": 8, "batch": 2, "length": 8},
    grad=0,
)


# --- a long cache --------------------------------------------------------------------------------


def recalled(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attention of one new place to a cache."""
    return F.scaled_dot_product_attention(q, keys, values)


def recalled_by_hand(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Dao et al., "Flash-Decoding" (2023): sums over each part of the cache are put together."""
    scores = single(q @ keys.mT) / q.shape[-1] ** 0.5
    weights = (scores - pmax(scores.amax(-1, keepdim=True), "tp")).exp()
    total, out = weights.sum(-1, keepdim=True), single(half(weights) @ values)
    total, out = psum(total, "tp"), psum(out, "tp")
    return half(out / total)


def cache_of(n: Mapping[str, int]) -> tuple[Tensor, ...]:
    shape = n["batch"], n["heads"], n["length"], n["head"]
    q = torch.randn(*shape[:2], 1, n["head"], dtype=torch.bfloat16)
    return q, *(torch.randn(shape, dtype=torch.bfloat16) for _ in range(2))


CACHE = Workload(
    "a token over a cache of 512k, cut by its length",
    TP,
    recalled,
    recalled_by_hand,
    cache_of,
    (at(), at(None, None, "tp"), at(None, None, "tp")),
    at(),
    {"batch": 4, "heads": 4, "length": 1 << 19, "head": 128},
    {"batch": 2, "heads": 4, "length": 32, "head": 4},
)

GENERATION = (STEP, CACHE, LORA, DISTILLED, VOCABULARY)
