"""The functions of the choice bench, at their real sizes: types alone, nothing is computed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
import torch.nn.functional as F

from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.tensor_type import TensorType

__all__ = [
    "CASES",
    "GROUPS",
    "HEAD",
    "HEADS",
    "HIDDEN",
    "LAYERED",
    "WIDTH",
    "Case",
    "case_of",
    "llama",
    "turned",
]

Tensors = Mapping[str, torch.Tensor]


@attrs.frozen
class Case:
    """A function, and the types of its arguments on a mesh whose axes have known names."""

    name: str
    f: Callable[..., Any]
    types: Callable[[Mesh], tuple[Any, ...]]
    meshes: tuple[Mesh, ...]


def _type(shape: tuple[int, ...], layout: Layout, dtype: torch.dtype) -> TensorType:
    return TensorType(shape, dtype, layout)


def _laid(mesh: Mesh, dims: Mapping[str, int | None]) -> Layout:
    """The layout that cuts a dim by each axis that the mesh has: axes of one dim in its order."""
    cuts: dict[int, list[str]] = {}
    for axis in mesh.axes:
        dim = dims.get(axis)
        if dim is not None:
            cuts.setdefault(dim, []).append(axis)
    return mesh.layout(*[tuple(cuts.get(d, ())) or None for d in range(max(cuts, default=-1) + 1)])


# --- an MLP --------------------------------------------------------------------------------------


def _mlp(p: Tensors, x: torch.Tensor) -> torch.Tensor:
    return (F.gelu(x @ p["up"]) @ p["down"]).square().mean()


def _mlp_types(mesh: Mesh) -> tuple[Any, ...]:
    up = _laid(mesh, {"fsdp": 0, "tp": 1})
    down = _laid(mesh, {"fsdp": 1, "tp": 0})
    rows = _laid(mesh, {"pod": 0, "dp": 0, "fsdp": 0})
    f32 = torch.float32
    params = {"up": _type((1024, 4096), up, f32), "down": _type((4096, 1024), down, f32)}
    return params, _type((8192, 1024), rows, f32)


# --- a layer of Llama-3-8B -----------------------------------------------------------------------

WIDTH, HEADS, GROUPS, HEAD, HIDDEN = 4096, 32, 8, 128, 14336


def _normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def _layer(p: Tensors, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    def heads(name: str, count: int) -> torch.Tensor:
        return (h @ p[name]).unflatten(-1, (count, HEAD)).transpose(1, 2)

    h = _normed(x, p["norm1"])
    q, k, v = heads("q", HEADS), heads("k", GROUPS), heads("v", GROUPS)
    q, k = turned(q, cos, sin), turned(k, cos, sin)
    seen = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    x = x + seen.transpose(1, 2).flatten(2) @ p["out"]
    h = _normed(x, p["norm2"])
    return x + (F.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]


def llama(layers: int) -> Callable[..., torch.Tensor]:
    """The loss of so many layers: the mean square of what comes out."""

    def loss(params: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        for i in range(layers):
            x = _layer(params[i], x, cos, sin)
        return x.square().mean()

    return loss


def _llama_types(mesh: Mesh, layers: int = 1, batch: int = 8, length: int = 4096) -> Any:
    out, back = {"fs": 0, "tp": 1}, {"fs": 1, "tp": 0}
    shapes: dict[str, tuple[tuple[int, ...], Mapping[str, int]]] = {
        "q": ((WIDTH, HEADS * HEAD), out),
        "k": ((WIDTH, GROUPS * HEAD), out),
        "v": ((WIDTH, GROUPS * HEAD), out),
        "out": ((HEADS * HEAD, WIDTH), back),
        "gate": ((WIDTH, HIDDEN), out),
        "up": ((WIDTH, HIDDEN), out),
        "down": ((HIDDEN, WIDTH), back),
        "norm1": ((WIDTH,), {"fs": 0}),
        "norm2": ((WIDTH,), {"fs": 0}),
    }
    bf16 = torch.bfloat16
    params = {n: _type(shape, _laid(mesh, cuts), bf16) for n, (shape, cuts) in shapes.items()}
    x = _type((batch, length, WIDTH), _laid(mesh, {"dp": 0, "fs": 0}), bf16)
    waves = _type((length, HEAD), mesh.layout(), bf16)
    return [params] * layers, x, waves, waves


CASES = (
    Case(
        "MLP, gradient",
        torch.func.grad(_mlp),
        _mlp_types,
        (Mesh(dp=8), Mesh(dp=2, tp=4), Mesh(tp=4, dp=2), Mesh(pod=16, dp=16, tp=64)),
    ),
    Case(
        "a layer of Llama-3-8B, gradient",
        torch.func.grad(llama(1)),
        _llama_types,
        (Mesh(fs=8), Mesh(fs=4, tp=2), Mesh(tp=2, fs=4), Mesh(dp=2, fs=2, tp=2)),
    ),
)

LAYERED = (
    *(
        Case(
            f"{layers} layers of Llama-3-8B, gradient",
            torch.func.grad(llama(layers)),
            functools.partial(_llama_types, layers=layers),
            (Mesh(fs=8), Mesh(fs=4, tp=2)),
        )
        for layers in (2, 8, 32)
    ),
    Case(
        "a layer of Llama-3-8B, batch 128, gradient",
        torch.func.grad(llama(1)),
        functools.partial(_llama_types, batch=128),
        (Mesh(dp=8, fs=16, tp=8),),
    ),
)
"""Many layers, and many ranks."""


def case_of(name: str, number: int) -> tuple[Case, Mesh]:
    """The case of a name, and one of its meshes."""
    (case,) = (case for case in (*CASES, *LAYERED) if case.name == name)
    return case, case.meshes[number]
