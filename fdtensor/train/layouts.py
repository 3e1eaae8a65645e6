"""How a model is laid out on a mesh: what each axis does is told by its name.

    dp    the batch is sharded, parameters are replicated
    fsdp  the batch is sharded, and so is every parameter (ZeRO-3)
    tp    attention heads, the inner dim of the MLP and the vocabulary are sharded
    sp    as tp, and between attention and MLP the sequence is sharded
    pp    each rank has a run of layers, on a mesh of the other axes (a pipeline)

Shoeybi et al., "Megatron-LM" (2019), arXiv:1909.08053. Korthikanti et al., "Reducing Activation
Recomputation in Large Transformer Models" (2022), arXiv:2205.05198. Rajbhandari et al., "ZeRO"
(2019), arXiv:1910.02054.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase

from fdtensor.layouts.errors import MeshError
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import Placement, Replicate, Shard

__all__ = [
    "STYLES",
    "activation_layout",
    "megatron",
    "part_meshes",
    "tokens_layout",
    "weight_layouts",
]

COLWISE, ROWWISE = Shard(0), Shard(1)  # nn.Linear keeps the transpose, (out, in)

MEGATRON: Mapping[str, Placement] = {
    "token.weight": Shard(0),  # the vocabulary, of the tied head too
    "*.attention.out.weight": ROWWISE,
    "*.attention.out.bias": Replicate(),  # added once the terms are reduced
    "*.attention.*": COLWISE,
    "*.mlp.up.*": COLWISE,
    "*.mlp.down.weight": ROWWISE,
    "*": Replicate(),
}
"""Names of parameters to their placement; the first pattern that fits counts."""

ACTIVATIONS: Mapping[tuple[str, str], Placement] = {
    ("tp", "heads"): Shard(1),
    ("tp", "hidden"): Shard(2),
    ("sp", "heads"): Shard(1),
    ("sp", "hidden"): Shard(2),
    ("sp", "residual"): Shard(1),  # the sequence
}
"""The placements of an activation on tp and sp; the batch is its first dim."""

STYLES = ("dp", "fsdp", "tp", "sp", "pp")
"""The names that a mesh axis may have."""

_BATCH = ("dp", "fsdp")


def megatron(name: str) -> Placement:
    """The placement of a parameter of the GPT on tp and sp."""
    return next(p for glob, p in MEGATRON.items() if fnmatchcase(name, glob))


def weight_layouts(
    mesh: Mesh,
    shapes: Mapping[str, tuple[int, ...]],
    placement: Callable[[str], Placement] = megatron,
) -> dict[str, Layout]:
    """The layout of each parameter, for their full shapes by name.

    `placement` says how a parameter lies on tp and sp. Raises `MeshError` for an axis whose name is
    not one of `STYLES`.
    """
    _known(mesh)
    return {name: _weight(mesh, name, tuple(shape), placement) for name, shape in shapes.items()}


def _weight(
    mesh: Mesh, name: str, shape: tuple[int, ...], placement: Callable[[str], Placement]
) -> Layout:
    layout = Layout(mesh, [Replicate()] * mesh.ndim)
    for axis in mesh.axes:
        if axis in ("tp", "sp"):
            layout = layout.placed(axis, placement(name))
    if "fsdp" in mesh.axes:  # the innermost cut: gathering it gives what the other axes left
        layout = layout.split("fsdp", _zero_dim(layout, shape))
    return layout


def _zero_dim(layout: Layout, shape: tuple[int, ...]) -> int:
    """The first dim if the ranks of "fsdp" divide it, else the largest they do, else the first."""
    count = layout.mesh.axis_size("fsdp")
    held = list(shape)
    for d in range(len(shape)):
        for axis in layout.cuts(d):
            held[d] //= layout.mesh.axis_size(axis)
    even = [d for d, size in enumerate(held) if size and size % count == 0]
    return 0 if not even or 0 in even else max(even, key=lambda d: held[d])


def part_meshes(mesh: Mesh) -> tuple[Mesh, ...]:
    """The meshes on which the parts of a model lie: one for each rank of "pp", of the other axes.

    Without an axis of that name it is the mesh itself.
    """
    if "pp" not in mesh.axes:
        return (mesh,)
    rest = [axis for axis in mesh.axes if axis != "pp"]
    firsts = [[i if axis == "pp" else 0 for axis in mesh.axes] for i in range(mesh.axis_size("pp"))]
    return tuple([mesh.part(rest, tuple(first)) for first in firsts])


def tokens_layout(mesh: Mesh) -> Layout:
    """The layout of tokens, of shape (batch, length + 1)."""
    _known(mesh)
    return mesh.layout(tuple(axis for axis in mesh.axes if axis in _BATCH))


def activation_layout(mesh: Mesh, name: str) -> Layout:
    """The layout to pin on an activation, by the name that `Pin` gives it.

    Without it the cheapest program of a small model may compute the same on every rank.
    """
    layout = tokens_layout(mesh)
    for axis in mesh.axes:
        if (axis, name) in ACTIVATIONS:
            layout = layout.placed(axis, ACTIVATIONS[axis, name])
    return layout


def _known(mesh: Mesh) -> None:
    for axis in mesh.axes:
        if axis == "pp":
            raise MeshError(
                "the layers lie on the meshes of a pipeline, not on the mesh that has its axis.",
                mesh=mesh,
                hint="part_meshes(mesh) has them.",
            )
        if axis not in STYLES:
            raise MeshError(
                f"mesh axis {axis!r} says nothing about how to train.",
                mesh=mesh,
                hint=f"Name the axes after what they do: {', '.join(STYLES)}.",
            )
