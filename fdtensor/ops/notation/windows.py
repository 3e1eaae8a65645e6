"""Windows: the part of a dim that a block is made from, and blocks narrowed or padded to it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import attrs
import numpy as np
import torch

from fdtensor.layouts.blocks import Intervals
from fdtensor.layouts.remembered import remembered
from fdtensor.ops.notation.core import Block
from fdtensor.ops.notation.local_index import subset

__all__ = ["Taps", "Windows", "adaptive", "cut_dims", "per_dim", "fitted", "slides", "taps"]


@attrs.frozen(eq=False)
class Windows:
    """`count` windows of a dim of `size`: window `i` has positions `at(i)`, some beyond the dim."""

    size: int
    count: int
    at: Callable[[int], range]

    def over(self, start: int, stop: int) -> tuple[int, int]:
        """The positions of windows `start` to `stop`."""
        return (self.at(start)[0], self.at(stop - 1)[-1] + 1) if start < stop else (0, 0)

    def meeting(self, start: int, stop: int) -> tuple[int, int]:
        """The windows that have one of the positions `start` to `stop`."""
        low = bisect_left(range(self.count), start, key=lambda i: self.at(i)[-1])
        high = bisect_left(range(self.count), stop, key=lambda i: self.at(i)[0])
        return (low, high) if start < stop and low < high else (0, 0)


def slides(
    sizes: Sequence[int], kernel: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1,
    ceil: bool = False,
) -> list[Windows]:  # fmt: skip
    """The windows of a kernel in each dim; with `ceil`, the last may end beyond the padding."""

    def along(n: int, k: int, s: int, p: int, d: int) -> Windows:
        count = (n + 2 * p - d * (k - 1) - 1 + (s - 1) * ceil) // s + 1
        late = ceil and (count - 1) * s >= n + p
        return Windows(n, count - late, lambda i: range(i * s - p, i * s - p + d * (k - 1) + 1, d))

    values = [per_dim(v, len(sizes)) for v in (kernel, stride or kernel, padding, dilation)]
    return list(map(along, sizes, *values))


def adaptive(sizes: Sequence[int], counts: Sequence[int]) -> list[Windows]:
    """In each dim, windows of about the same width that cover it."""

    def along(n: int, m: int) -> Windows:
        return Windows(n, m, lambda i: range(i * n // m, -(-(i + 1) * n // m)))

    return list(map(along, sizes, counts))


def per_dim(values: Any, count: int) -> list[Any]:
    """A value for each of `count` dims, from one for each or one for all."""
    listed = list(values) if isinstance(values, (list, tuple)) else [values]
    return listed * count if len(listed) == 1 else listed


def cut_dims(n: int, *blocks: Block) -> list[int]:
    """The dims, of the last `n`, that some block cuts; blocks of unread outputs have no dims."""
    known = [b for b in blocks if b.full]
    dims = range(len(known[0].full) - n, len(known[0].full))
    return [d for d in dims if any(b.shape[d] != b.full[d] for b in known)]


def fitted(x: torch.Tensor, dim: int, held: Intervals, wanted: tuple[int, int]) -> torch.Tensor:
    """The range `wanted` of `dim` from a block that holds `held` of it, with zeros elsewhere."""
    start, stop = wanted
    low, high = (max(start, held[0][0]), min(stop, held[-1][1])) if held else (0, 0)
    if low >= high:
        return x.new_zeros([*x.shape[:dim], stop - start, *x.shape[dim + 1 :]])
    x = subset(x, dim, held, ((low, high),))
    pads = [0, 0] * (x.ndim - 1 - dim) + [low - start, stop - high]
    return torch.ops.aten.constant_pad_nd.default(x, pads) if any(pads) else x


@attrs.frozen(eq=False)
class Taps:
    """A linear op along a dim: `out[outs[k]] += weights[k] * x[places[k]]` for each `k`.

    The dim has `size` elements before and `count` after.
    """

    size: int
    count: int
    outs: np.ndarray
    places: np.ndarray
    weights: np.ndarray

    def transposed(self) -> Taps:
        """The taps of the op's gradient."""
        return Taps(self.count, self.size, self.places, self.outs, self.weights)

    def over(self, start: int, stop: int) -> tuple[int, int]:
        """The places that outputs `start` to `stop` are made from."""
        places = self.places[(self.outs >= start) & (self.outs < stop)]
        return (int(places.min()), int(places.max()) + 1) if len(places) else (0, 0)

    def __call__(
        self, x: torch.Tensor, dim: int, held: Intervals, wanted: tuple[int, int]
    ) -> torch.Tensor:
        """Outputs `wanted`, or the terms of them from the places that a block holds."""
        have = np.array([i for a, b in held for i in range(a, b)], np.int64)
        start, stop = wanted
        order = np.argsort(self.outs, kind="stable")
        chosen = (self.outs >= start) & (self.outs < stop) & np.isin(self.places, have)
        order = order[chosen[order]]
        outs, weights = self.outs[order] - start, self.weights[order]
        places = np.searchsorted(have, self.places[order])

        def tensor(values: np.ndarray, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.tensor(values.tolist(), dtype=dtype, device=x.device)

        if not np.array_equal(places, np.arange(x.shape[dim])):
            x = x.index_select(dim, tensor(places))
        if (weights != 1).any():
            x = x * tensor(weights, x.dtype).reshape(-1, *[1] * (x.ndim - 1 - dim))
        if np.array_equal(outs, np.arange(stop - start)):
            return x
        zeros = x.new_zeros([*x.shape[:dim], stop - start, *x.shape[dim + 1 :]])
        return zeros.index_add(dim, tensor(outs), x)


@remembered(4096)
def taps(op: Any, size: int, ndim: int, d: int, args: Any, dtype: torch.dtype) -> Taps | None:
    """The taps of `op(x, *args)` along dim `d` of the `ndim` it acts on; None if that is too long.

    The op itself is run, on combs of ones, so far apart that an output sees at most one. The other
    dims have size 2, since kernels that antialias are wrong for images that are one pixel wide.
    """

    def line(x: torch.Tensor) -> torch.Tensor:
        image = x.to(dtype).reshape(-1, 1, *[size if i == d else 1 for i in range(ndim)])
        out = op(image.expand(-1, 1, *[size if i == d else 2 for i in range(ndim)]), *args)
        return out.movedim(2 + d, 1).flatten(2)[..., 0]

    with ThreadPoolExecutor(1) as plain:  # no mode and no transform is active in a new thread
        return plain.submit(_probed, line, size).result()


def _probed(line: Callable[[torch.Tensor], torch.Tensor], size: int) -> Taps | None:
    """The taps of a linear function of vectors, from its values for combs; None if too long."""
    if size >= 2**25:
        return None
    places = torch.arange(size)
    uneven = (places * 0.618).frac()
    mean, total, expected = line(torch.stack([places, torch.ones(size), uneven]))
    width = 2
    while width * size < 2**26:
        width = min(2 * width, size)
        combs = line(places % width == torch.arange(width)[:, None])
        sources, outs = combs.nonzero().T
        weights = combs[sources, outs]
        if width < size:  # which tooth of the comb: the one next to the mean place
            sources = sources + width * (((mean / total)[outs] - sources) / width).round().long()
        terms = weights * uneven[sources.clamp(0, size - 1)]
        out = torch.zeros_like(expected).index_add(0, outs, terms)
        if width == size or torch.allclose(out, expected, 1e-4, 1e-4):
            return Taps(size, len(expected), outs.numpy(), sources.numpy(), weights.numpy())
    return None
