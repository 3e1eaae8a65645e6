"""`nested`: `shard_map` in a function of `shard_map`, over axes along which tensors are whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fdtensor.layouts.errors import LayoutError
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import Cut, Shard
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.layouts.tree import flatten, paths, unflatten
from fdtensor.tensors.dtensor import is_dtensor
from fdtensor.tensors.shard_map.arguments import OPEN, no_tensor_result, prefixed
from fdtensor.tensors.shard_map.collectives import all_gather, psum
from fdtensor.tensors.shard_map.places import Place, current

__all__ = ["in_another", "nested"]


def in_another(args: Any) -> bool:
    """Whether a function of `shard_map` calls this one, with tensors of its rank."""
    return current() is not None and not any(map(is_dtensor, flatten(args, is_leaf=is_dtensor)[0]))


def nested(f: Callable[..., Any], mesh: Mesh, ins: Any, outs: Any, args: Any) -> Any:
    """The result of a function of parts of this rank's tensors, whole again.

    What it is given is the same on the ranks along the axes that cut it further, and so is what it
    gives, once its parts are gathered.
    """
    place = current()
    assert place is not None, "in_another says so"
    _refuse_other_mesh(mesh, place.mesh)
    leaves, spec = flatten(args)
    wanted = prefixed(ins, spec, len(leaves), "in_layouts", "the arguments")
    for i, (layout, name) in enumerate(zip(wanted, paths(spec, "args"), strict=True)):
        if isinstance(leaves[i], torch.Tensor) and layout is not OPEN:
            leaves[i] = _part(leaves[i], layout, place, name)
    results, tree = flatten(f(*unflatten(spec, leaves)))
    layouts = prefixed(outs, tree, len(results), "out_layouts", "the result")
    for i, (layout, name) in enumerate(zip(layouts, paths(tree, "result"), strict=True)):
        if not isinstance(results[i], torch.Tensor):
            raise no_tensor_result(name, results[i])
        if layout is not OPEN:
            results[i] = _whole(results[i], layout, name)
    return unflatten(tree, results)


def _refuse_other_mesh(mesh: Mesh, around: Mesh) -> None:
    sizes = dict(zip(around.axes, around.sizes, strict=True))
    if any(sizes.get(axis) != n for axis, n in zip(mesh.axes, mesh.sizes, strict=True)):
        raise LayoutError(
            "shard_map in a function of shard_map is over axes that the ranks around do not have.",
            mesh=mesh,
            around=around,
            hint="Give it the mesh around it, and layouts that cut along its other axes.",
        )


def _part(t: torch.Tensor, layout: Layout, place: Place, name: str) -> torch.Tensor:
    """The block of a tensor that this rank has in a layout."""
    if layout.partial:
        raise LayoutError(
            f"{name} of shard_map is pending in its layout, and a tensor of this rank is whole.",
            layout=layout,
            hint="Give a layout without pending sums.",
        )
    coord = tuple([int(place.index((axis,))) for axis in layout.mesh.axes])
    box = TensorType(tuple(t.shape), t.dtype, layout).box(coord)
    for d, held in enumerate(box):
        if held != ((0, t.shape[d]),):
            parts = [t.narrow(d, low, high - low) for low, high in held or ((0, 0),)]
            t = parts[0] if len(parts) == 1 else torch.cat(parts, d)
    return t


def _whole(t: torch.Tensor, layout: Layout, name: str) -> torch.Tensor:
    """The tensor of which each rank has a block in a layout."""
    others = [p for p in layout.placements if isinstance(p, Cut) and not isinstance(p, Shard)]
    if others or set(layout.partial.values()) - {"sum"}:
        raise LayoutError(
            f"{name} of shard_map is not whole by gathering blocks and adding terms.",
            layout=layout,
            hint="In a function of shard_map, results are cut by Shard or pending as sums.",
        )
    for axis in layout.partial:
        t = psum(t, axis)
    for d in range(t.ndim):
        if layout.cuts(d):
            t = all_gather(t, layout.cuts(d), dim=d)
    return t
