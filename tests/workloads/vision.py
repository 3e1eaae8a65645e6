"""Vision and audio: patches, convolutions with space and batch cut, normalization, recurrences."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from fdtensor import Mesh
from fdtensor.collectives import axis_size, ppermute, psum
from tests.workloads.workload import Workload, at

__all__ = ["VISION"]

Tensor = torch.Tensor
Tensors = Mapping[str, Tensor]

LINE, SQUARE = Mesh(x=8), Mesh(dp=2, x=4)
WHOLE, BATCH, SPACE = at(), at("x"), at(None, None, "x")


# --- convolutions --------------------------------------------------------------------------------


def halos(x: Tensor) -> Tensor:
    """A block of rows with one of each neighbour, or zeros where there is none."""
    count = axis_size("x")
    after, before = [(i, i + 1) for i in range(count - 1)], [(i + 1, i) for i in range(count - 1)]
    return torch.cat([ppermute(x[:, :, -1:], "x", after), x, ppermute(x[:, :, :1], "x", before)], 2)


def smooth(p: Tensors, x: Tensor) -> Tensor:
    for name in ("first", "second"):
        x = F.relu(F.conv2d(x, p[name], padding=1))
    return x


def smooth_by_hand(p: Tensors, x: Tensor) -> Tensor:
    for name in ("first", "second"):
        x = F.relu(F.conv2d(halos(x), p[name], padding=(0, 1)))
    return x


def kernels(n: Mapping[str, int]) -> dict[str, Tensor]:
    c = n["channels"]
    return {name: torch.randn(c, c, 3, 3) / (3 * c**0.5) for name in ("first", "second")}


def images(n: Mapping[str, int]) -> Tensor:
    return torch.randn(n["batch"], n["channels"], n["size"], n["size"])


CONVOLUTIONS = Workload(
    "two convolutions of 2048^2, height cut",
    LINE,
    smooth,
    smooth_by_hand,
    lambda n: (kernels(n), images(n)),
    (WHOLE, SPACE),
    SPACE,
    {"batch": 4, "channels": 64, "size": 2048},
    {"batch": 1, "channels": 2, "size": 16},
)


def level(p: Tensors, x: Tensor) -> Tensor:
    """One level of a U-Net: down, a convolution, up, and joined with what came in."""
    low = F.relu(F.conv2d(F.avg_pool2d(x, 2), p["first"], padding=1))
    both = torch.cat([x, F.interpolate(low, scale_factor=2, mode="nearest")], 1)
    return F.relu(F.conv2d(both, torch.cat([p["second"]] * 2, 1), padding=1))


def level_by_hand(p: Tensors, x: Tensor) -> Tensor:
    low = F.relu(F.conv2d(halos(F.avg_pool2d(x, 2)), p["first"], padding=(0, 1)))
    both = torch.cat([x, F.interpolate(low, scale_factor=2, mode="nearest")], 1)
    return F.relu(F.conv2d(halos(both), torch.cat([p["second"]] * 2, 1), padding=(0, 1)))


UNET = Workload(
    "a level of a U-Net, batch and height cut",
    SQUARE,
    level,
    level_by_hand,
    lambda n: (kernels(n), images(n)),
    (at(), at("dp", None, "x")),
    at("dp", None, "x"),
    {"batch": 8, "channels": 64, "size": 1024},
    {"batch": 2, "channels": 2, "size": 16},
)


# --- normalization over the batch ----------------------------------------------------------------


def normed(p: Tensors, x: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, p["weight"], p["bias"], training=True).square().mean()


def normed_by_hand(p: Tensors, x: Tensor) -> Tensor:
    dims, count = (0, 2, 3), axis_size("x") * x.numel() // x.shape[1]
    sums = psum(torch.stack([x.sum(dims), x.square().sum(dims)]), "x") / count
    mean, variance = sums[0], sums[1] - sums[0].square()
    scale = p["weight"] * torch.rsqrt(variance + 1e-5)
    y = (x - mean[:, None, None]) * scale[:, None, None] + p["bias"][:, None, None]
    return psum(y.square().sum(), "x") / (axis_size("x") * x.numel())


NORM = Workload(
    "synchronized batch norm, gradient",
    LINE,
    normed,
    normed_by_hand,
    lambda n: ({k: torch.randn(n["channels"]) for k in ("weight", "bias")}, images(n)),
    (WHOLE, BATCH),
    (WHOLE, BATCH),
    {"batch": 256, "channels": 64, "size": 112},
    {"batch": 16, "channels": 2, "size": 4},
    grad=(0, 1),
)


# --- patches -------------------------------------------------------------------------------------


def patches(p: Tensors, x: Tensor) -> Tensor:
    """A vision transformer of one layer on patches of 16 x 16, and its loss."""
    h = F.conv2d(x, p["patch"], stride=16).flatten(2).transpose(1, 2)
    q, k, v = (F.layer_norm(h, h.shape[-1:]) @ p["qkv"]).chunk(3, -1)
    split = (t.unflatten(-1, (-1, 64)).transpose(1, 2) for t in (q, k, v))
    h = h + F.scaled_dot_product_attention(*split).transpose(1, 2).flatten(2) @ p["out"]
    return h + F.gelu(F.layer_norm(h, h.shape[-1:]) @ p["up"]) @ p["down"]


def patches_loss(p: Tensors, x: Tensor) -> Tensor:
    return patches(p, x).square().mean()


def patches_by_hand(p: Tensors, x: Tensor) -> Tensor:
    h = patches(p, x)
    return psum(h.square().sum(), "x") / (axis_size("x") * h.numel())


def transformer(n: Mapping[str, int]) -> dict[str, Tensor]:
    m = n["width"]
    shapes = {"qkv": (m, 3 * m), "out": (m, m), "up": (m, 4 * m), "down": (4 * m, m)}
    matrices = {a: torch.randn(s) / s[0] ** 0.5 for a, s in shapes.items()}
    return {"patch": torch.randn(m, 3, 16, 16) / 28, **matrices}


VIT = Workload(
    "a layer of ViT-L, data parallel",
    LINE,
    patches_loss,
    patches_by_hand,
    lambda n: (transformer(n), torch.randn(n["batch"], 3, n["size"], n["size"])),
    (WHOLE, BATCH),
    WHOLE,
    {"batch": 256, "width": 1024, "size": 224},
    {"batch": 8, "width": 64, "size": 32},
    grad=0,
)


# --- recurrences ---------------------------------------------------------------------------------


def lstm(p: Tensors, x: Tensor) -> Tensor:
    h = c = x.new_zeros(x.shape[1], x.shape[2])
    for entry in x:
        i, f, g, o = (entry @ p["input"] + h @ p["recurrent"]).chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
    return h.square().mean()


def lstm_by_hand(p: Tensors, x: Tensor) -> Tensor:
    return psum(lstm(p, x), "x") / axis_size("x")


LSTM = Workload(
    "LSTM of 16 steps, data parallel",
    LINE,
    lstm,
    lstm_by_hand,
    lambda n: (
        {
            "input": torch.randn(n["width"], 4 * n["width"]) / n["width"] ** 0.5,
            "recurrent": torch.randn(n["width"], 4 * n["width"]) / n["width"] ** 0.5,
        },
        torch.randn(n["steps"], n["batch"], n["width"]),
    ),
    (WHOLE, at(None, "x")),
    WHOLE,
    {"steps": 16, "batch": 2048, "width": 1024},
    {"steps": 16, "batch": 16, "width": 4},
    grad=0,
)


def gru(p: Tensors, x: Tensor) -> Tensor:
    h = x.new_zeros(x.shape[1], x.shape[2])
    for entry in x:
        r, z, n = (entry @ p["input"]).chunk(3, -1)
        of_r, of_z, of_n = (h @ p["recurrent"]).chunk(3, -1)
        z = (z + of_z).sigmoid()
        h = (1 - z) * (n + (r + of_r).sigmoid() * of_n).tanh() + z * h
    return h.square().mean()


def gru_by_hand(p: Tensors, x: Tensor) -> Tensor:
    return psum(gru(p, x), "x") / axis_size("x")


GRU = Workload(
    "GRU of 16 steps, data parallel",
    LINE,
    gru,
    gru_by_hand,
    lambda n: (
        {
            "input": torch.randn(n["width"], 3 * n["width"]) / n["width"] ** 0.5,
            "recurrent": torch.randn(n["width"], 3 * n["width"]) / n["width"] ** 0.5,
        },
        torch.randn(n["steps"], n["batch"], n["width"]),
    ),
    (WHOLE, at(None, "x")),
    WHOLE,
    {"steps": 16, "batch": 2048, "width": 1024},
    {"steps": 16, "batch": 16, "width": 4},
    grad=0,
)

VISION = (CONVOLUTIONS, UNET, NORM, VIT, LSTM, GRU)
