"""Attention to each block of the keys by itself, combined by their normalizations."""

from __future__ import annotations

import torch

from fdtensor.ops.decompositions.core import decomposition
from fdtensor.ops.decompositions.scan import in_blocks
from fdtensor.ops.graph import tensors_of

aten = torch.ops.aten

Tensor = torch.Tensor


def _in_batches(x: Tensor, dim: int, blocks: int, fill: float) -> Tensor:
    """`x[n, ...]` as `[b * n, ...]`, with a block of `dim` in each `b`."""
    return in_blocks(x, dim, blocks, fill).movedim(dim, 0).flatten(0, 1)


def _joined(op, blocks: int, query: Tensor, key: Tensor, value: Tensor, *rest, **kwargs):
    """`out = sum_b out[b] * exp(lse[b] - lse)`, `lse = log sum_b exp(lse[b])`, and the rest"""
    batches = query.expand(blocks, *query.shape).flatten(0, 1)
    keys, values = (_in_batches(t, 2, blocks, 0) for t in (key, value))
    out, lse, *others = tensors_of(op(batches, keys, values, 0.0, False, *rest, **kwargs))
    out = out.reshape(blocks, *query.shape[:-1], value.shape[-1])
    lse = lse.reshape(blocks, *query.shape[:-1])
    most = lse.amax(0)
    weight = (lse - most).exp()
    total = weight.sum(0)
    mean = (out * weight.unsqueeze(-1)).sum(0) / total.unsqueeze(-1)
    return mean.to(query.dtype), most + total.log(), *others


@decomposition(aten._scaled_dot_product_flash_attention_for_cpu.default, blocked=True)
def for_cpu(
    blocks, query, key, value, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None
):
    """A masked key gets the least score by far, not `-inf`: all of a block may be masked."""
    if dropout_p:
        raise NotImplementedError
    least = torch.finfo(query.dtype).min / 4
    (q, k), size = (query.shape[2], key.shape[2]), -(-key.shape[2] // blocks)
    if attn_mask is not None:
        mask = attn_mask.clamp(min=least).expand(*attn_mask.shape[:-2], q, k)
        mask = mask.reshape(*[1] * (4 - mask.ndim), *mask.shape)
        if is_causal:
            raise NotImplementedError
        mask = mask.expand(query.shape[0], *mask.shape[1:])
        mask = _in_batches(mask, 3, blocks, least)
    elif is_causal or blocks * size > k:
        place = torch.arange(blocks * size, device=query.device).reshape(blocks, 1, 1, size)
        last = torch.arange(q, device=query.device).unsqueeze(1) if is_causal else k - 1
        mask = torch.where(place > last, query.new_full((), least), 0.0)
        mask = mask.unsqueeze(1).expand(blocks, query.shape[0], *mask.shape[1:]).flatten(0, 1)
    else:
        mask = None
    op = aten._scaled_dot_product_flash_attention_for_cpu.default
    out, lse = _joined(op, blocks, query, key, value, attn_mask=mask, scale=scale)
    none = lse < least / 2  # the kernel gives zeros to a query that sees no key
    return out.masked_fill(none.unsqueeze(-1), 0), lse.masked_fill(none, 0)


@decomposition(aten._scaled_dot_product_flash_attention.default, blocked=True)
def flash(blocks, query, key, value, dropout_p=0.0, is_causal=False, debug=False, *, scale=None):
    """The kernel takes no mask: blocks must be even, and no key masked."""
    if dropout_p or is_causal or debug or key.shape[2] % blocks:
        raise NotImplementedError
    op = aten._scaled_dot_product_flash_attention.default
    return _joined(op, blocks, query, key, value, scale=scale)
