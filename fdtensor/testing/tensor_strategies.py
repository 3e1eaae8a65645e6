"""Hypothesis strategies of tensors: in any layouts, lying in memory in any way."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from hypothesis import strategies as st

from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import Placement, ReduceOp
from fdtensor.layouts.tree import flatten, unflatten
from fdtensor.testing.layout_case import LayoutCase
from fdtensor.testing.strategies import MOVEMENT, Shape, meshes, types
from fdtensor.testing.strides import Strides
from fdtensor.testing.values import full_tensor

__all__ = ["memory_formats", "settings_of", "sharded"]


@st.composite
def sharded(
    draw: st.DrawFn,
    args: Any,
    *,
    mesh: Mesh | None = None,
    max_ranks: int = 6,
    partial: bool | Collection[ReduceOp] = True,
    kinds: Sequence[type[Placement]] = MOVEMENT,
    as_types: bool = False,
) -> Any:
    """A pytree with any DTensors of its tensors: any mesh of simulated ranks, any layouts.

    Tensors of the meta device stand for their shape and dtype, and get small integers as values.
    What is pending is split at random, and blocks lie in memory in any way. Python values stay.
    With `as_types` there are TensorTypes in place of DTensors, as `trace` takes them.

        @given(sharded((torch.randn(6, 4), {"w": torch.empty(4, 5, device="meta")})))
        def test_it_gives_rows(args):
            assert spmd(f)(*args).shape == (6, 5)

    >>> from hypothesis import find
    >>> cut = find(fd.testing.sharded(torch.arange(4)), lambda x: Shard(0) in x.layout.placements)
    >>> cut.full()
    tensor([0, 1, 2, 3])
    """
    leaves, tree = flatten(args)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    tensors = [leaves[i] for i in places]
    kinds_of = [(tuple(t.shape), t.dtype) for t in tensors]
    setting = draw(
        settings_of(kinds_of, mesh=mesh, max_ranks=max_ranks, partial=partial, kinds=kinds)
    )
    pairs = zip(tensors, setting.types, strict=True)
    full = [full_tensor(x, i) if t.is_meta else t for i, (t, x) in enumerate(pairs)]
    values = setting.types if as_types else setting.spread(full) if full else ()
    for i, leaf in zip(places, values, strict=True):
        leaves[i] = leaf
    return unflatten(tree, leaves)


@st.composite
def settings_of(
    draw: st.DrawFn,
    tensors: Sequence[tuple[Shape, torch.dtype]],
    *,
    mesh: Mesh | None = None,
    max_ranks: int = 6,
    world: int | None = None,
    partial: bool | Collection[ReduceOp] = True,
    kinds: Sequence[type[Placement]] = MOVEMENT,
) -> LayoutCase:
    """Any mesh, of up to 2 axes where not given, and any layout on it for each of some tensors."""
    if mesh is None:
        mesh = draw(meshes(max_axes=2, max_ranks=max_ranks, world=world).filter(_has_axes))
    types_ = [
        draw(types(mesh, shape, dtype, partial=partial, kinds=kinds)) for shape, dtype in tensors
    ]
    how = [draw(memory_formats(len(shape))) for shape, _ in tensors]
    return LayoutCase(types_, draw(st.integers(0, 99)), how)


def memory_formats(ndim: int) -> st.SearchStrategy[Strides | None]:
    """How a tensor of `ndim` dims lies in memory: contiguous as often as not, in the simplest case.

    Else its dims in any order, such as channels_last, or with elements left out between its own.

    >>> from hypothesis import find
    >>> find(fd.testing.memory_formats(2), lambda strides: strides is not None)
    Strides(order=(0, 1), gap=1)
    """
    orders = st.permutations(range(ndim))
    return st.none() | st.builds(Strides, orders, st.sampled_from((1, 2)))


def _has_axes(mesh: Mesh) -> bool:
    return mesh.ndim > 0
