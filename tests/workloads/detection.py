"""Detection: anchors meet ragged boxes, and a loss that all positive anchors of the batch share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from fdtensor import Mesh
from fdtensor.collectives import psum
from tests.workloads.workload import Workload, at, half, single

__all__ = ["DETECTION"]

Tensor = torch.Tensor
Tensors = Mapping[str, Tensor]

LINE = Mesh(dp=8)
BATCH = at("dp")


def overlaps(anchors: Tensor, boxes: Tensor) -> Tensor:
    """The intersection over the union of all anchors with all boxes: `out[image, anchor, box]`."""
    low = torch.maximum(anchors[:, None, :2], boxes[:, None, :, :2])
    high = torch.minimum(anchors[:, None, 2:], boxes[:, None, :, 2:])
    both = (high - low).clamp(min=0).prod(-1)
    of_anchors = (anchors[:, 2:] - anchors[:, :2]).prod(-1)
    of_boxes = (boxes[..., 2:] - boxes[..., :2]).prod(-1)
    return both / (of_anchors[:, None] + of_boxes[:, None] - both + 1e-9)


def terms(
    p: Tensors, features: Tensor, anchors: Tensor, boxes: Tensor, labels: Tensor, counts: Tensor
) -> tuple[Tensor, Tensor]:
    """The sum of all losses, and how many anchors are positive; Lin et al., "RetinaNet" (2017).

    An image has the first `counts` of its boxes; the others only fill the tensor.
    """
    scores = single(features @ half(p["classes"]))
    moves = single(features @ half(p["boxes"]))
    is_real = torch.arange(boxes.shape[1]) < counts[:, None]
    best, which = torch.where(is_real[:, None], overlaps(anchors, boxes), -1.0).max(-1)
    positive, negative = best >= 0.5, best < 0.4
    word = labels.gather(1, which)
    wanted = F.one_hot(word, scores.shape[-1]) * positive[..., None]
    wanted = wanted.to(scores.dtype)
    plain = F.binary_cross_entropy_with_logits(scores, wanted, reduction="none")
    right = torch.where(wanted > 0, scores.sigmoid(), 1 - scores.sigmoid())
    focal = plain * (1 - right).square() * (positive | negative)[..., None]
    target = boxes.gather(1, which[..., None].expand(-1, -1, 4)) - anchors
    off = F.smooth_l1_loss(moves, target, reduction="none").sum(-1) * positive
    return focal.sum() + off.sum(), positive.sum()


def loss(p: Tensors, features: Tensor, anchors: Tensor, *boxes: Tensor) -> Tensor:
    total, positive = terms(p, features, anchors, *boxes)
    return total / positive.clamp(min=1)


def loss_by_hand(p: Tensors, features: Tensor, anchors: Tensor, *boxes: Tensor) -> Tensor:
    total, positive = terms(p, features, anchors, *boxes)
    return psum(total, "dp") / psum(positive, "dp").clamp(min=1)


def images(n: Mapping[str, int]) -> tuple[Any, ...]:
    b, w = n["batch"], n["width"]

    def some_boxes(*shape: int) -> Tensor:
        low = torch.rand(*shape, 2)
        return torch.cat([low, low + 0.2 + 0.3 * torch.rand(*shape, 2)], -1)

    p = {"classes": torch.randn(w, n["kinds"]) / w**0.5, "boxes": torch.randn(w, 4) / w**0.5}
    return (
        p,
        torch.randn(b, n["anchors"], w, dtype=torch.bfloat16),
        some_boxes(n["anchors"]),
        some_boxes(b, n["boxes"]),
        torch.randint(n["kinds"], (b, n["boxes"])),
        torch.randint(1, n["boxes"] + 1, (b,)),
    )


DETECTION = (
    Workload(
        "anchors and ragged boxes of 64 images, gradient",
        LINE,
        loss,
        loss_by_hand,
        images,
        (at(), BATCH, at(), BATCH, BATCH, BATCH),
        at(),
        {"batch": 64, "anchors": 49104, "width": 256, "kinds": 80, "boxes": 64},
        {"batch": 8, "anchors": 12, "width": 8, "kinds": 4, "boxes": 4},
        grad=0,
    ),
)
