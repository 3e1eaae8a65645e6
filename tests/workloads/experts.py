"""Mixtures of experts: capacity by einsums, dropless, expert and tensor parallel, shared ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from fdtensor import Mesh
from fdtensor.collectives import (
    all_gather,
    all_to_all,
    axis_index,
    axis_size,
    psum,
    reduce_scatter,
)
from fdtensor.ops.decompositions.grouped import GROUPED_MM, grouped_mm
from tests.workloads.language import halves
from tests.workloads.workload import Function, Laid, Workload, at, single

__all__ = ["EXPERTS"]

Tensor = torch.Tensor
Tensors = Mapping[str, Tensor]

LINE, SQUARE = Mesh(ep=8), Mesh(dp=2, ep=4)
SPREAD = Mesh(ep=4, tp=2)


def gates(x: Tensor, router: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """Which tokens each slot of an expert has, and their weights: the two best experts of each.

    Lepikhin et al., "GShard" (2020): groups of tokens are apart, and the tokens of a group beyond
    the capacity of an expert are left out.
    """
    scores = single(x @ router).softmax(-1)
    weights, chosen = scores.topk(2, -1)
    weights = weights / weights.sum(-1, keepdim=True)
    wanted = F.one_hot(chosen, scores.shape[-1]).to(scores.dtype)  # group, token, choice, expert
    flat = wanted.transpose(1, 2).flatten(1, 2)  # first choices come first
    place = ((flat.cumsum(1) - 1) * flat).unflatten(1, (2, -1)).transpose(1, 2)
    kept = wanted * (place < capacity)
    slot = F.one_hot((place * kept).sum(-1).long(), capacity).to(scores.dtype)
    dispatch = torch.einsum("gtke,gtkc->gtec", kept, slot)
    combine = torch.einsum("gtke,gtkc,gtk->gtec", kept, slot, weights)
    return dispatch.to(x.dtype), combine.to(x.dtype)


def experts(p: Tensors, h: Tensor) -> Tensor:
    """Each expert on the tokens in its slots: `h[expert, slot, width]`."""
    return torch.relu(torch.bmm(h, p["up"])) @ p["down"]


def mixture(p: Tensors, x: Tensor) -> Tensor:
    p = halves(p)
    dispatch, combine = gates(x, p["router"], 2 * x.shape[1] // p["router"].shape[1])
    held = torch.einsum("gtec,gtm->egcm", dispatch, x)
    out = experts(p, held.flatten(1, 2)).unflatten(1, held.shape[1:3])
    return torch.einsum("gtec,egcm->gtm", combine, out)


def mixture_by_hand(p: Tensors, x: Tensor) -> Tensor:
    p = halves(p)
    dispatch, combine = gates(x, p["router"], 2 * x.shape[1] // p["router"].shape[1])
    held = torch.einsum("gtec,gtm->egcm", dispatch, x)
    held = all_to_all(held, "ep", 0, 1)
    out = experts(p, held.flatten(1, 2)).unflatten(1, held.shape[1:3])
    return torch.einsum("gtec,egcm->gtm", combine, all_to_all(out, "ep", 1, 0))


def loss(p: Tensors, x: Tensor) -> Tensor:
    return single(mixture(p, x)).square().mean()


def mean_of_squares(out: Tensor, axes: str | tuple[str, ...]) -> Tensor:
    """Over the blocks of the ranks along these axes."""
    return psum(single(out).square().sum(), axes) / (out.numel() * axis_size(axes))


def loss_by_hand(p: Tensors, x: Tensor) -> Tensor:
    return mean_of_squares(mixture_by_hand(p, x), "ep")


def spread_loss_by_hand(p: Tensors, x: Tensor) -> Tensor:
    """Experts over dp and ep: each group of ep has all of them, for its own tokens."""
    return mean_of_squares(mixture_by_hand(p, x), ("dp", "ep"))


def tensors_by_hand(p: Tensors, x: Tensor) -> Tensor:
    """Megatron within each expert: tp has parts of its hidden entries, and sums what leaves."""
    p = halves(p)
    dispatch, combine = gates(x, p["router"], 2 * x.shape[1] // p["router"].shape[1])
    held = all_to_all(torch.einsum("gtec,gtm->egcm", dispatch, x), "ep", 0, 1)
    out = psum(experts(p, held.flatten(1, 2)), "tp").unflatten(1, held.shape[1:3])
    out = torch.einsum("gtec,egcm->gtm", combine, all_to_all(out, "ep", 1, 0))
    return mean_of_squares(out, "ep")


def shared(p: Tensors, x: Tensor) -> Tensor:
    own = halves(p)
    every = torch.relu(x @ own["shared_up"]) @ own["shared_down"]
    return single(mixture(p, x) + every).square().mean()


def shared_by_hand(p: Tensors, x: Tensor) -> Tensor:
    own = halves(p)
    every = torch.relu(x @ own["shared_up"]) @ own["shared_down"]
    return mean_of_squares(mixture_by_hand(p, x) + every, "ep")


def sorted_by_expert(chosen: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The choices in the order of their experts, and where those of each expert end."""
    flat = chosen.flatten()
    ends = F.one_hot(flat, count).sum(0).cumsum(0)
    return flat.argsort(stable=True), ends.to(torch.int32)


def routed(x: Tensor, router: Tensor) -> tuple[Tensor, Tensor]:
    weights, chosen = single(x @ router).softmax(-1).topk(2, -1)
    return (weights / weights.sum(-1, keepdim=True)).to(x.dtype), chosen


def dropless(p: Tensors, x: Tensor) -> Tensor:
    """Gale et al., "MegaBlocks" (2022): every expert takes all of its tokens, however many."""
    p = halves(p)
    weights, chosen = routed(x, p["router"])
    order, ends = sorted_by_expert(chosen, len(p["up"]))
    hidden = torch.relu(grouped_mm(x[order // 2], p["up"], ends))
    out = grouped_mm(hidden, p["down"], ends) * weights.flatten()[order, None]
    return torch.zeros_like(x).index_add(0, order // 2, out)


def dropless_by_hand(p: Tensors, x: Tensor) -> Tensor:
    """Each rank takes all tokens through its experts, as counts that differ have no fixed size."""
    p = halves(p)
    weights, chosen = (all_gather(t, "ep") for t in routed(x, p["router"]))
    count, tokens = len(p["up"]), all_gather(x, "ep")
    order, ends = sorted_by_expert(chosen, count * axis_size("ep"))
    first = axis_index("ep") * count
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    starts, ends = (t[first + torch.arange(count)] for t in (starts, ends))
    hidden = torch.relu(GROUPED_MM(tokens[order // 2], p["up"], starts, ends))
    out = GROUPED_MM(hidden, p["down"], starts, ends) * weights.flatten()[order, None]
    return reduce_scatter(torch.zeros_like(tokens).index_add(0, order // 2, out), "ep")


def parameters(n: Mapping[str, int]) -> dict[str, Tensor]:
    e, m, h = n["experts"], n["width"], n["hidden"]
    return {
        "router": torch.randn(m, e) / m**0.5,
        "up": torch.randn(e, m, h) / m**0.5,
        "down": torch.randn(e, h, m) / h**0.5,
    }


def arguments(n: Mapping[str, int]) -> tuple[dict[str, Tensor], Tensor]:
    x = torch.randn(n["groups"], n["tokens"], n["width"], dtype=torch.bfloat16)
    return parameters(n), x


def with_shared(n: Mapping[str, int]) -> tuple[dict[str, Tensor], Tensor]:
    p, x = arguments(n)
    m, h = n["width"], n["hidden"]
    more = {
        "shared_up": torch.randn(m, h) / m**0.5,
        "shared_down": torch.randn(h, m) / h**0.5,
    }
    return {**p, **more}, x


def tokens_of(n: Mapping[str, int]) -> tuple[dict[str, Tensor], Tensor]:
    p, x = arguments(n)
    return p, x.flatten(0, 1)


REAL = {"groups": 8, "tokens": 2048, "width": 1024, "hidden": 4096, "experts": 64}
SMALL = {"groups": 8, "tokens": 16, "width": 8, "hidden": 16, "experts": 8}


def layouts(mesh: Mesh) -> dict[str, Laid]:
    tp = "tp" if "tp" in mesh.axes else None
    cut = {"up": at("ep", None, tp), "down": at("ep", tp)}
    return {"router": at(), **cut}


def gradient(name: str, mesh: Mesh, by_hand: Function, rows: Any = "ep", **more: Any) -> Workload:
    """The gradients of a mixture on a mesh, of which these axes cut the groups of tokens."""
    cuts = {**layouts(mesh), **more.pop("also", {})}
    given = {"f": loss, "args": arguments, **more}
    sizes = {"real": REAL, "small": SMALL}
    return Workload(
        name, mesh, by_hand=by_hand, layouts=(cuts, at(rows)), outs=cuts, grad=0, **sizes, **given
    )


EXPERTS = (
    Workload(
        "top-2 of 64 experts, forward",
        LINE,
        mixture,
        mixture_by_hand,
        arguments,
        (layouts(LINE), at("ep")),
        at("ep"),
        REAL,
        SMALL,
    ),
    gradient("top-2 of 64 experts, gradient", LINE, loss_by_hand),
    gradient("top-2 of 64 experts, dp and ep", SQUARE, spread_loss_by_hand, ("dp", "ep")),
    gradient(
        "top-2 of 64 experts, ep and tp",
        SPREAD,
        tensors_by_hand,
        at_most=1.2,
        why="gates are cut by tp too, in an order of the axes in which tokens move once more",
    ),
    gradient(
        "top-2 of 64 experts and a shared one",
        LINE,
        shared_by_hand,
        f=shared,
        args=with_shared,
        also={"shared_up": at(), "shared_down": at()},
    ),
    Workload(
        "top-2 of 64 experts, dropless, forward",
        LINE,
        dropless,
        dropless_by_hand,
        tokens_of,
        (layouts(LINE), at("ep")),
        at("ep"),
        REAL,
        SMALL,
        at_most=2.4,
        slower=2.8,
        why="relu waits for the sum of all experts: hidden entries are cut instead, weights move",
    ),
)
