"""`Role`: what a parameter is to the op that reads it."""

from __future__ import annotations

from typing import Any

import attrs
import torch

from fdtensor.layouts.torch_private import ConvNd, ConvTransposeNd

__all__ = ["BIAS", "Role", "roles_in"]


@attrs.frozen
class Role:
    """The role of a parameter in the op that reads it: the dim of its outputs and of its inputs."""

    kind: str
    made: int | None
    read: int | None

    @property
    def is_weight(self) -> bool:
        """Whether it is more than a bias."""
        return self.read is not None


BIAS = Role("bias", 0, None)


def roles_in(module: torch.nn.Module) -> dict[str, Role | None]:
    """The roles of the parameters that a module itself has, by what kind of module it is."""
    names = dict(module.named_parameters(recurse=False))
    kinds: list[tuple[Any, Role]] = [
        (torch.nn.Embedding, Role("embedding", 1, 0)),
        (torch.nn.EmbeddingBag, Role("embedding", 1, 0)),
        (ConvTransposeNd, Role("convolution", 1, 0)),
        (ConvNd, Role("convolution", 0, 1)),
        (torch.nn.Bilinear, Role("linear", 0, 1)),
    ]
    weight = next((role for kind, role in kinds if isinstance(module, kind)), None)
    shaped = hasattr(module, "in_features") and hasattr(module, "out_features")
    if weight is None and (isinstance(module, torch.nn.Linear) or shaped):
        weight = Role("linear", 0, 1)
    if weight is None:
        return dict.fromkeys(names)
    roles: dict[str, Role | None] = dict.fromkeys(names)
    roles |= {n: r for n, r in (("weight", weight), ("bias", BIAS)) if n in names}
    return roles
