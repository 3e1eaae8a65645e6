"""`textbook`: the bytes that a rank receives where a function is cut as the papers say, by formula.

d ranks hold a part of the batch each and all of the weights, f ranks a part of both (FSDP), t ranks
a part of each layer (Megatron). W are the bytes of all matrices, X those of the activations that
enter a layer. An all_reduce of b bytes brings `2b(k-1)/k`, a gather to b bytes or a reduce_scatter
of b bytes half of it.

Zhao et al., "PyTorch FSDP" (2023), arXiv:2304.11277. Korthikanti et al., "Reducing Activation
Recomputation in Large Transformer Models" (2022), arXiv:2205.05198.
"""

from __future__ import annotations

from math import prod

from fdtensor.layouts.mesh import Mesh
from tests.bench.choice_cases import Case

__all__ = ["textbook"]


def textbook(case: Case, mesh: Mesh) -> int:
    """The bytes of data parallel, FSDP and Megatron together, on the axes that the mesh has."""
    params, x, *_ = case.types(mesh)
    if case.name.startswith("MLP"):
        return _mlp(mesh, _weights([params]), x.nbytes)
    return _llama(mesh, len(params), _weights(params[:1]), x.nbytes)


def _mlp(mesh: Mesh, weights: int, x: int) -> int:
    """`2 (d-1)/d W/t`, an all_reduce of gradients, and `2 (t-1)/t X/d`, one of what leaves.

    Nobody asks for the gradient of what enters, so the backward reduces no activations.
    """
    d, t = _size(mesh, "pod", "dp"), _size(mesh, "tp")
    return _all_reduced(weights // t, d) + _all_reduced(x // d, t)


def _llama(mesh: Mesh, layers: int, weights: int, x: int) -> int:
    """For each layer `3 (f-1)/f W/t + 2 (d-1)/d W/(tf) + 4 * 2 (t-1)/t X/(df)`.

    FSDP gathers weights in the forward and again in the backward and scatters the sums of
    gradients, in their own dtype, whose shards replicas reduce. Megatron reduces the activations of
    attention and of the MLP, in the forward and in the backward; with sequence parallelism each of
    these is a gather and a reduce_scatter, of the same bytes.
    """
    d, f, t = _size(mesh, "dp"), _size(mesh, "fs"), _size(mesh, "tp")
    shards = 3 * _half(weights // t, f) + _all_reduced(weights // (t * f), d)
    return layers * (shards + 4 * _all_reduced(x // (d * f), t))


def _weights(params: list[dict[str, object]]) -> int:
    """The bytes of all matrices."""
    return sum(t.nbytes for part in params for t in part.values() if len(t.shape) == 2)  # type: ignore[attr-defined]


def _size(mesh: Mesh, *axes: str) -> int:
    """How many ranks these axes have, of those that the mesh has."""
    return prod(mesh.axis_size(axis) for axis in axes if axis in mesh.axes)


def _half(nbytes: int, count: int) -> int:
    return nbytes * (count - 1) // count


def _all_reduced(nbytes: int, count: int) -> int:
    return 2 * nbytes * (count - 1) // count
