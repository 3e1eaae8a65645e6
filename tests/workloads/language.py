"""Language models: layers of Llama in training and generation, adapters, vocabularies."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from fdtensor import Mesh
from fdtensor.collectives import all_gather, axis_size, psum, reduce_scatter
from tests.workloads.workload import Laid, Workload, at, half, single

__all__ = ["LANGUAGE"]

Tensor = torch.Tensor
Tensors = Mapping[str, Tensor]

SMALL_LAYER = {"width": 32, "heads": 8, "groups": 8, "head": 4, "hidden": 64}
LLAMA_8B = {"width": 4096, "heads": 32, "groups": 8, "head": 128, "hidden": 14336}
LLAMA_70B = {"width": 8192, "heads": 64, "groups": 8, "head": 128, "hidden": 28672}
OUT, BACK = ("q", "k", "v", "gate", "up"), ("out", "down")
"""Matrices that lead from the width, whose columns tp cuts, and back to it, whose rows it cuts."""


# --- a layer, of full tensors and by hand --------------------------------------------------------


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def attended(p: Tensors, h: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Attention without the last matrix; the heads are those of the matrices."""
    head = cos.shape[-1]
    q, k, v = ((h @ p[n]).unflatten(-1, (-1, head)).transpose(1, 2) for n in "qkv")
    q, k = turned(q, cos, sin), turned(k, cos, sin)
    seen = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return seen.transpose(1, 2).flatten(2)


def gated(p: Tensors, h: Tensor) -> Tensor:
    return F.silu(h @ p["gate"]) * (h @ p["up"])


def halves(p: Tensors) -> Tensors:
    """What is computed with: matrices of which the optimizer holds wider ones."""
    return {name: half(t) for name, t in p.items()}


def layer(p: Tensors, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x = x + attended(p, normed(x, p["norm1"]), cos, sin) @ p["out"]
    return x + gated(p, normed(x, p["norm2"])) @ p["down"]


def loss(layers: list[Tensors], x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    for p in map(halves, layers):
        x = layer(p, x, cos, sin)
    return single(x).square().mean()


def loss_by_hand(
    axes: frozenset[str], sequences: bool, layers: list[Tensors], x: Tensor, *waves: Tensor
) -> Tensor:
    """FSDP over fs, Megatron over tp, with the sequence cut in between where `sequences`."""

    def held(p: Tensors) -> Tensors:
        if "fs" not in axes:
            return p
        return {n: all_gather(t, "fs", 1 if n in BACK else 0) for n, t in p.items()}

    def entered(h: Tensor) -> Tensor:
        return all_gather(h, "tp", 1) if sequences else h

    def left(h: Tensor) -> Tensor:
        if "tp" not in axes:
            return h
        return reduce_scatter(h, "tp", 1) if sequences else psum(h, "tp")

    for p in map(held, map(halves, layers)):
        x = x + left(attended(p, entered(normed(x, p["norm1"])), *waves) @ p["out"])
        x = x + left(gated(p, entered(normed(x, p["norm2"]))) @ p["down"])
    cutting = [a for a in ("dp", "fs", "tp") if a in axes and (a != "tp" or sequences)]
    total = single(x).square().sum()
    count: Any = x.numel()
    if not cutting:
        return total / count
    return psum(total, tuple(cutting)) / (count * math.prod(map(axis_size, cutting)))


# --- its arguments -------------------------------------------------------------------------------


def parameters(n: Mapping[str, int], dtype: torch.dtype) -> dict[str, Tensor]:
    width, hidden = n["width"], n["hidden"]
    q, k = n["heads"] * n["head"], n["groups"] * n["head"]
    shapes = {
        "q": (width, q),
        "k": (width, k),
        "v": (width, k),
        "out": (q, width),
        "gate": (width, hidden),
        "up": (width, hidden),
        "down": (hidden, width),
    }
    matrices = {a: torch.randn(s, dtype=dtype) / s[0] ** 0.5 for a, s in shapes.items()}
    return {**matrices, **{a: torch.ones(width, dtype=dtype) for a in ("norm1", "norm2")}}


def arguments(n: Mapping[str, int]) -> tuple[Any, ...]:
    layers = [parameters(n, torch.float32) for _ in range(n["layers"])]
    x = torch.randn(n["batch"], n["length"], n["width"], dtype=torch.bfloat16)
    return layers, x, *waves(n["length"], n["head"], torch.bfloat16)


def waves(length: int, head: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    angles = torch.arange(length)[:, None] / 10000 ** (torch.arange(head) % (head // 2) / head)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def cut_parameters(mesh: Mesh) -> dict[str, Laid]:
    fs, tp = ("fs" if "fs" in mesh.axes else None), ("tp" if "tp" in mesh.axes else None)
    cuts = {**dict.fromkeys(OUT, (fs, tp)), **dict.fromkeys(BACK, (tp, fs))}
    cuts |= dict.fromkeys(("norm1", "norm2"), (fs,))
    return {name: at(*dims) for name, dims in cuts.items()}


def rows_of(mesh: Mesh, *rest: Any) -> Laid:
    axes = tuple(a for a in ("dp", "fs") if a in mesh.axes)
    return at(axes or None, *rest)


def training(
    name: str, mesh: Mesh, real: Mapping[str, int], sequences: bool = False, **more: Any
) -> Workload:
    """The gradients of layers on these axes."""
    axes = frozenset(mesh.axes)
    layouts = [cut_parameters(mesh)] * real["layers"]
    return Workload(
        name,
        mesh,
        loss,
        functools.partial(loss_by_hand, axes, sequences),
        arguments,
        (layouts, rows_of(mesh, "tp" if sequences else None), at(), at()),
        layouts,
        real,
        {**SMALL_LAYER, "layers": real["layers"], "batch": min(8, real["batch"]), "length": 8},
        grad=0,
        **more,
    )


STEP = {**LLAMA_8B, "layers": 2, "batch": 8, "length": 4096}

TRAINING = (
    training("Llama-3-8B, data parallel", Mesh(dp=8), STEP),
    training("Llama-3-8B, FSDP", Mesh(fs=8), STEP),
    training(
        "Llama-3-8B, FSDP, four layers in 3.4 GB",
        Mesh(fs=8),
        {**STEP, "layers": 4},
        max_bytes=3_400_000_000,
    ),
    training("Llama-3-8B, tensor parallel", Mesh(tp=8), {**STEP, "batch": 1}),
    training("Llama-3-8B, sequence parallel", Mesh(tp=8), {**STEP, "batch": 1}, sequences=True),
    training("Llama-3-8B, dp, FSDP and tp", Mesh(dp=2, fs=2, tp=2), {**STEP, "layers": 1}),
    training(
        "Llama-3-70B, FSDP and sequence parallel",
        Mesh(fs=8, tp=8),
        {**LLAMA_70B, "layers": 1, "batch": 8, "length": 4096},
        sequences=True,
    ),
)

LANGUAGE = TRAINING
