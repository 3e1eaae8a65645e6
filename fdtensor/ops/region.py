"""`region`: pins the layout of all values that a part of a traced function computes."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from contextvars import ContextVar

import torch

from fdtensor.layouts.errors import TraceError
from fdtensor.layouts.expected import no_layout
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.placement import Cut
from fdtensor.layouts.torch_private import maps_around
from fdtensor.ops.transparent import recording

__all__ = ["no_region", "pin_of_region", "region"]


_LAYOUT: ContextVar[Layout | None] = ContextVar("region", default=None)
"""The layout of the innermost region around the code that runs."""


@contextlib.contextmanager
def region(layout: Layout) -> Generator[None]:
    """A context in which every value of a traced function is pinned to a layout.

    So are the values inside of ops of torch that consist of others. Left out are values of fewer
    dims than the layout cuts, such as scalars. The innermost region counts, and `constrain` of one
    value before it. What a backward computes is pinned where the backward runs in
    the region alone. Elsewhere than in a traced function nothing happens, as with `constrain`: not
    around a call of one either.
    Raises `TraceError` inside of a `torch.func.vmap`, where values have one more dim.

    >>> mesh = Mesh(x=2)
    >>> x = TensorType((4, 6), torch.float32, mesh.layout("x"))
    >>> def f(x):
    ...     with region(mesh.layout(None, "x")):
    ...         y = (x * 2).exp()
    ...     return y.sum()
    >>> print(trace(f, x))
    f on Mesh(x=2)
      in   a:f32[4@x,6]
      b:f32[4,6@x]   = all_to_all[axis=x dim=0->1] a  24 B
      c:f32[4,6@x]   = mul.Tensor b 2
      d:f32[4,6@x]   = exp c
      e:f32[]{sum:x} = sum d
      f:f32[]        = exchange[axis=x reduce_op=sum way=peer_to_peer] e  4 B
      out  f
    2 collectives, 28 B received per rank
    """
    if not isinstance(layout, Layout):
        raise no_layout(layout)
    if recording() and maps_around():
        raise TraceError(
            "a region is inside of a vmap, where values have one more dim than the function sees.",
            layout=layout,
            hint="Pin single values there: constrain(x, layout).",
        )
    with _pinning(layout):
        yield


def no_region() -> contextlib.AbstractContextManager[None]:
    """A context of what is recorded: a region around that is none of its own."""
    return _pinning(None)


@contextlib.contextmanager
def _pinning(layout: Layout | None) -> Generator[None]:
    token = _LAYOUT.set(layout)
    try:
        yield
    finally:
        _LAYOUT.reset(token)


def pin_of_region(tensor: torch.Tensor) -> Layout | None:
    """The layout to which the region around pins a tensor that was computed, or None."""
    layout = _LAYOUT.get()
    if layout is None:
        return None
    dims = 1 + max((p.dim for p in layout.placements if isinstance(p, Cut)), default=-1)
    return layout if tensor.ndim >= dims else None
