"""Histograms and segments in simpler ops: the range or the ends first, then counts and writes."""

from __future__ import annotations

import torch

from fdtensor.ops.decompositions.core import decomposition
from fdtensor.ops.decompositions.index import START

aten = torch.ops.aten


@decomposition(aten.histc.default)
def histc(x, bins=100, min=0, max=0):
    """`out[b] = sum_i (x[i] in bin b)`, from the least element to the greatest"""
    if min != max or not x.numel():
        raise NotImplementedError
    low, high = x.amin(), x.amax()
    same = low == high
    low, high = torch.where(same, low - 1, low), torch.where(same, high + 1, high)
    place = ((x - low) * bins / (high - low)).to(torch.int64).clamp(max=bins - 1)
    return x.new_zeros(bins).index_put([place], torch.ones_like(x), True)


def _ends(x: torch.Tensor, dims: list[int], known: bool) -> torch.Tensor:
    """The least and the greatest element, which have the range of all; any two where it is known"""
    kept = [n for d, n in enumerate(x.shape) if d not in dims]
    if known:
        return x.new_zeros(2, *kept)
    if not x.numel():
        raise NotImplementedError
    return torch.stack([x.amin(dims), x.amax(dims)])


def _density(hist: torch.Tensor, edges: list[torch.Tensor]) -> torch.Tensor:
    """`out[b, c] = count[b, c] / (count * width[b] * width[c])`"""
    hist = hist / hist.sum()
    for d, along in enumerate(edges):
        hist = hist / along.diff().reshape([-1 if e == d else 1 for e in range(hist.ndim)])
    return hist


@decomposition(aten.histogram.bin_ct)
def histogram_bins(x, bins=100, *, range=None, weight=None, density=False):
    """`out[b] = sum_i weight[i] * (x[i] in bin b)`, and the edges of bins"""
    ends = _ends(x, [d for d, _ in enumerate(x.shape)], range is not None)
    edges = aten.histogram.bin_ct(ends, bins, range=range)[1]
    hist = aten.histogram.bins_tensor(x, edges, weight=weight)[0]
    return _density(hist, [edges]) if density else hist, edges


@decomposition(aten.histogram.bins_tensor)
def histogram(x, bins, *, weight=None, density=False):
    """`out[b] = count[b] / (count * width[b])`, and the edges"""
    if not density:
        raise NotImplementedError
    return _density(aten.histogram.bins_tensor(x, bins, weight=weight)[0], [bins]), bins


@decomposition(aten._histogramdd_bin_edges.default)
def bin_edges(x, bins, *, range=None, weight=None, density=False):
    """The edges of the bins between the least element and the greatest"""
    ends = _ends(x, [d for d, _ in enumerate(x.shape[:-1])], range is not None)
    return tuple(aten._histogramdd_bin_edges(ends, bins, range=range))


@decomposition(aten._histogramdd_from_bin_cts.default)
def histogramdd_bins(x, bins, *, range=None, weight=None, density=False):
    """`out[b, c] = sum_i weight[i] * (x[i, 0] in bin b) * (x[i, 1] in bin c)`"""
    edges = aten._histogramdd_bin_edges(x, bins, range=range)
    hist = aten._histogramdd_from_bin_tensors(x, edges, weight=weight)
    return _density(hist, edges) if density else hist


@decomposition(aten._histogramdd_from_bin_tensors.default)
def histogramdd(x, bins, *, weight=None, density=False):
    """`out[b, c] = count[b, c] / (count * width[b] * width[c])`"""
    if not density:
        raise NotImplementedError
    return _density(aten._histogramdd_from_bin_tensors(x, bins, weight=weight), bins)


def _segment(x, lengths, offsets, axis: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The segment of each element, whether it is in one, and how many elements each has."""
    if lengths is None:
        ends, lengths = offsets.narrow(axis, 1, offsets.shape[axis] - 1), offsets.diff(dim=axis)
    else:
        ends = lengths.cumsum(axis)
    places = torch.arange(x.shape[axis], device=x.device, dtype=ends.dtype)
    places = places.expand(*x.shape[:axis], -1).contiguous()
    segments = torch.searchsorted(ends.contiguous(), places, right=True)
    count = lengths.shape[axis]
    segment = _on(segments.clamp(max=count - 1), x).expand(x.shape)
    return segment, _on(segments < count, x), _on(lengths, x)


def _on(t: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return t.reshape((*t.shape, *[1] * (x.ndim - t.ndim)))


@decomposition(aten.segment_reduce.default)
def segment_reduce(
    x, reduce, *, lengths=None, indices=None, offsets=None, axis=0, unsafe=False, initial=None
):
    """`out[s, j] = reduce(x[i, j] for i with segment[i] == s)`"""
    if reduce == "mean" and initial is not None:
        raise NotImplementedError
    kind = {"max": "amax", "min": "amin", "mean": "sum"}.get(reduce, reduce)
    segment, within, count = _segment(x, lengths, offsets, axis)
    x = torch.where(within, x, START[kind])
    shape = [n if d != axis else count.shape[axis] for d, n in enumerate(x.shape)]
    start = x.new_full(shape, START[kind] if initial is None else initial)
    if kind != "sum":
        return start.scatter_reduce(axis, segment, x, kind)
    total = start.scatter_add(axis, segment, x)
    return total / count if reduce == "mean" else total


@decomposition(aten._segment_reduce_backward.default)
def segment_reduce_backward(
    grad, out, x, reduce, *, lengths=None, offsets=None, axis=0, initial=None
):
    """`dx[i, j] = grad[segment[i], j]`, or a share of it"""
    if reduce not in ("sum", "mean"):
        raise NotImplementedError  # kernels differ for zeros and for equal elements
    segment, within, count = _segment(x, lengths, offsets, axis)
    taken = (grad / count if reduce == "mean" else grad).gather(axis, segment)
    return torch.where(within, taken, 0.0)
