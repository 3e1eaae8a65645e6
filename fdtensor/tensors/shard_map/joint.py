"""`joint`: a function of one rank's tensors, run on all simulated ranks and differentiated as one.

Each rank has a graph of its own, in which the backward of a collective is a collective, as on a
real mesh. To the caller they are one function of the tensors of all ranks. Its first derivative
reads the graphs; others, and the transforms of `torch.func`, run the function again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from fdtensor.layouts.torch_private import forward_level, transforms_active
from fdtensor.runtime.autograd import spread, tracked
from fdtensor.runtime.copies import cosets, is_smooth
from fdtensor.tensors.shard_map.program import Program, Tensors, grouped

__all__ = ["joint"]


def joint(program: Program, values: Sequence[Tensors]) -> list[Tensors]:
    """The results of a program, each a tuple of all ranks' tensors. Differentiable."""
    leaves = [leaf for value in values for leaf in value]
    if not tracked(leaves):
        return grouped(program.run(leaves), program.mesh.size)
    if not transforms_active() and forward_level() < 0:
        program.flags = [
            any(leaf.requires_grad for leaf in value) and torch.is_grad_enabled()
            for value in values
        ]
    return grouped(_Joint.apply(program, *leaves), program.mesh.size)  # type: ignore[arg-type]


class _Joint(torch.autograd.Function):
    """A program on the tensors of all ranks, one input after the other."""

    @staticmethod
    def forward(program: Program, *leaves: torch.Tensor) -> Tensors:
        return program.run(leaves)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.program, *leaves = inputs
        ctx.save_for_backward(*leaves)
        ctx.save_for_forward(*leaves)
        ctx.set_materialize_grads(False)
        ctx.likes = [(out.shape, out.dtype, out.device) for out in output]
        if ctx.program.kept:
            outs = list(zip(*(outs for _, outs in ctx.program.kept), strict=True))
            flat = [out for result in outs for out in result]
            ends = [out for out, kept in zip(output, flat, strict=True) if not kept.requires_grad]
            ctx.mark_non_differentiable(*ends)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # type: ignore[override]
        program, leaves = ctx.program, ctx.saved_tensors
        known = _known(program, grads, ctx.likes)
        if program.kept and not torch.is_grad_enabled():
            return None, *program.pulled(known)
        by, ends, cotangents = _ways(ctx, leaves, known)
        gradients = _Joint.apply(program.transposed(by, ends), *leaves, *cotangents)
        return None, *_spaced(gradients, by, leaves, program.mesh.size)

    @staticmethod
    def jvp(ctx: Any, _program: None, *tangents: Any) -> Any:  # type: ignore[override]
        program, leaves, size = ctx.program, ctx.saved_tensors, ctx.program.mesh.size
        if not transforms_active():
            leaves = [forward_ad.unpack_dual(leaf).primal for leaf in leaves]
        zeros = [torch.zeros(s, dtype=dtype, device=d) for s, dtype, d in ctx.likes]
        by, ends, _ = _ways(ctx, leaves, zeros)
        moving = [t for i in by for t in _filled(tangents, leaves, i, size)]
        tangents_out: Any = _Joint.apply(program.pushed(by, ends), *leaves, *moving)
        return tuple(_spaced(tangents_out, ends, zeros, size))

    @staticmethod
    def vmap(info: Any, in_dims: Any, program: Program, *leaves: Any) -> Any:  # type: ignore[override]
        size, dims, stacked = program.mesh.size, [], []
        for value, own_dims in zip(grouped(leaves, size), grouped(in_dims[1:], size), strict=True):
            batched = any(dim is not None for dim in own_dims)
            dims.append(0 if batched else None)
            for leaf, dim in zip(value, own_dims, strict=True):
                wide = leaf if dim is None else leaf.movedim(dim, 0)
                stacked.append(wide.expand(info.batch_size, *leaf.shape) if batched and dim is None
                               else wide)  # fmt: skip
        out = _Joint.apply(program.mapped(dims, info.randomness), *stacked)
        return out, (0,) * len(out)  # type: ignore[arg-type]


def _ways(ctx: Any, leaves: Sequence[Any], known: Sequence[Any]) -> tuple[Any, Any, list[Any]]:
    """The inputs and the results that have derivatives, and the cotangents of these."""
    size = ctx.program.mesh.size
    by = [i // size for i in range(0, len(leaves), size) if is_smooth(leaves[i].dtype)]
    ends = [i // size for i in range(0, len(known), size) if is_smooth(known[i].dtype)]
    return by, ends, [t for i in ends for t in known[i * size : (i + 1) * size]]


def _spaced(tensors: Any, at: Sequence[int], like: Sequence[Any], size: int) -> list[Any]:
    """The tensors found for values `at`, and None for the others."""
    out: list[Any] = [None] * len(like)
    for i, value in zip(at, grouped(tensors, size), strict=True):
        out[i * size : (i + 1) * size] = value
    return out


def _filled(tangents: Sequence[Any], leaves: Sequence[Any], i: int, size: int) -> list[Any]:
    pairs = zip(tangents[i * size : (i + 1) * size], leaves[i * size : (i + 1) * size], strict=True)
    return [torch.zeros_like(leaf) if t is None else t for t, leaf in pairs]


def _known(program: Program, grads: Sequence[Any], likes: Sequence[Any]) -> list[Any]:
    """The cotangents, where a copy that nobody used has that of one that somebody used."""
    out, size = list(grads), program.mesh.size
    for n, kind in enumerate(program.outs):
        for places in cosets(program.mesh, kind.cotangent().copies):
            used = [n * size + i for i in places if out[n * size + i] is not None]
            missing = [n * size + i for i in places if out[n * size + i] is None]
            if used and missing:
                copies = spread(out[used[0]], 1 + len(missing))
                for i, copy in zip([used[0], *missing], copies, strict=True):
                    out[i] = copy
    return [
        torch.zeros(shape, dtype=dtype, device=device) if grad is None else grad
        for grad, (shape, dtype, device) in zip(out, likes, strict=True)
    ]
