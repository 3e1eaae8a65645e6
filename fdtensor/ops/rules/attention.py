"""Scaled dot product attention: batches and heads are independent, and so are queries.

    out[n, h, q] = sum_k p[n, h, q, k] * value[n, h, k]
    p[n, h, q] = softmax_k(scale * query[n, h, q] . key[n, h, k] + mask[n, h, q, k])
    grad_value[n, h, k] = sum_q p[n, h, q, k] * grad[n, h, q], and the others like it

A cut of the keys leaves the normalization pending: only the backward kernels, which take it as an
operand, have such a row. Kernels number queries and keys of a causal mask from 0; for blocks they
get a mask, or fewer keys, instead. There is no row where dropout draws random numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import inf
from typing import Any

import attrs
import torch

from fdtensor.ops.graph import Full
from fdtensor.ops.notation.core import At, Block, P, R, S, Units
from fdtensor.ops.notation.each import each
from fdtensor.ops.notation.empty import unless_empty

aten = torch.ops.aten

CPU = aten._scaled_dot_product_flash_attention_for_cpu.default
CPU_BACK = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
FLASH = aten._scaled_dot_product_flash_attention.default
FLASH_BACK = aten._scaled_dot_product_flash_attention_backward.default
EFFICIENT = aten._scaled_dot_product_efficient_attention.default
EFFICIENT_BACK = aten._scaled_dot_product_efficient_attention_backward.default
CUDNN = aten._scaled_dot_product_cudnn_attention.default
CUDNN_BACK = aten._scaled_dot_product_cudnn_attention_backward.default
OTHER = aten._scaled_dot_product_fused_attention_overrideable.default

SEEDS = {CPU: 0, FLASH: 3, EFFICIENT: 2, CUDNN: 2, OTHER: 2}
"""The forward kernels, with the number of results after the normalization."""

BACKWARDS = (CPU_BACK, FLASH_BACK, EFFICIENT_BACK, CUDNN_BACK)

ROLES = {"grad_out": "grad", "grad_out_": "grad", "attn_mask": "mask", "attn_bias": "mask"}

Cuts = dict[str, Any]
"""The placements of the named tensors of a kernel; the others are `R`."""


def _cuts(tensors: Mapping[str, Full]) -> Iterator[Cuts]:
    """Cuts of batches and heads.

    With fewer heads of keys than of queries, each goes with a run of heads of queries.
    """
    query, key, value = (tensors[name] for name in ("query", "key", "value"))
    yield {"query": S(0), "key": S(0), "value": S(0)}
    run = query.shape[1] // max(1, key.shape[1])
    if key.shape[1] == value.shape[1] and run:
        kept = S(1) if run == 1 else Units(1, 1)
        yield {"query": S(1) if run == 1 else Units(1, run), "key": kept, "value": kept}


def _sequence(op: Any, causal: bool, masked: bool) -> tuple[Any, Any]:
    """The placements of cut queries and of cut keys for the kernel; None where it allows none."""
    if op in (CPU, CPU_BACK):
        return S(2), S(2)
    if op in (FLASH, FLASH_BACK):
        return (Units(2, 1), None) if causal else (S(2), S(2))  # blocks of causal ones have one end
    if op in (EFFICIENT, EFFICIENT_BACK) and not causal:
        return Units(2, 32), None if masked else S(2)  # it pads the normalization
    return None, None


def _row(tensors: Mapping[str, Full], cuts: Cuts) -> tuple[tuple[Any, ...], Cuts]:
    """The placements of all tensors, and the cuts with that of a mask [n, h, q, k]."""
    mask = tensors.get("mask")
    scores = cuts.get("query", R)
    if scores is R and cuts.get("key", R) is not R:
        scores = attrs.evolve(cuts["key"], dim=3)
    if mask is not None and scores is not R and scores != P:
        i = scores.dim - (4 - mask.ndim)
        if i >= 0 and mask.shape[i] != 1:
            cuts = {**cuts, "mask": attrs.evolve(scores, dim=i)}
    return tuple(cuts.get(name, R) for name in tensors), cuts


def _by_role(named: Mapping[str, Any]) -> dict[str, Full] | None:
    """The tensors of a kernel by role; None where no row is right."""
    tensors = {ROLES.get(n, n): t for n, t in named.items() if isinstance(t, Full)}
    unfit = named["dropout_p"] or named.get("return_debug_mask") or "cum_seq_q" in tensors
    return None if unfit else tensors


def forward(op, named):
    """The attention and the normalization, each cut like the queries, and seeds."""
    tensors, seeds = _by_role(named), [R] * SEEDS[op]
    if tensors is None:
        return
    queries, _ = _sequence(op, named["is_causal"], "mask" in tensors)
    for cuts in (*_cuts(tensors), *([{"query": queries}] if queries else [])):
        yield _row(tensors, cuts)[0], (cuts["query"], cuts["query"], *seeds)
    yield _row(tensors, {"value": P})[0], (P, R, *seeds)


def backward(op, named):
    """The gradients of query, key, value and of a mask where it is asked for.

    The gradient of an operand that is not cut is a pending sum.
    """
    tensors = _by_role(named)
    if tensors is None:
        return
    of_mask = "mask" in tensors and named.get("grad_input_mask", [False] * 4)[3]
    names = ("query", "key", "value", "mask")[: 3 + of_mask]
    queries, keys = _sequence(op, named["is_causal"], "mask" in tensors)
    sequences = [{"query": queries}] if queries else []
    sequences += [{"key": keys, "value": keys}] if keys else []
    for cuts in (*_cuts(tensors), *sequences):
        like = cuts.get("query", R)
        ins, cuts = _row(tensors, {"grad": like, "out": like, "logsumexp": like, **cuts})
        yield ins, tuple(cuts.get(name, P) for name in names)
    yield _row(tensors, {"grad": P})[0], (P,) * len(names)


def _places(block: Block) -> torch.Tensor:
    return torch.cat([torch.arange(start, stop) for start, stop in block.box[2]])


def _cut(at: At, i: int) -> bool:
    return any(block.shape[2] != block.full[2] for block in at.ins[i : i + 2])


def _masking(op: Any, i: int) -> Any:
    """The kernel for a CPU, with a mask in place of a causal one that is cut; `i` is the query."""
    dtypes = () if i else (torch.float32,)

    def local(at, *args, attn_mask=None, scale=None):
        query = args[i]
        if args[-1] and _cut(at, i) and not any(0 in block.shape for block in at.ins):
            hidden = _places(at.ins[i + 1]) > _places(at.ins[i]).unsqueeze(1)
            mask = torch.zeros(hidden.shape, dtype=query.dtype).masked_fill(hidden, -inf)
            attn_mask = mask.to(query.device) if attn_mask is None else attn_mask + mask
            args = (*args[:-1], False)
        kinds = [torch.float64 if query.dtype == torch.float64 else d for d in dtypes]
        return unless_empty(op, *kinds)(at, *args, attn_mask=attn_mask, scale=scale)

    return local


def _seen(query: Block, key: Block) -> int:
    """The number of keys that the last query of a block sees: the last of all sees every key."""
    return max(0, key.full[2] - query.full[2] + query.stop[2])


def _flash(at, query, key, value, *rest, scale=None):
    end = _seen(*at.ins[:2])
    if rest[1] and _cut(at, 0):
        key, value = key.narrow(2, 0, end), value.narrow(2, 0, end)
    run = unless_empty(FLASH, torch.float32, torch.uint64, torch.uint64)
    return run(at, query, key, value, *rest, scale=scale)


def _flash_back(at, grad, query, key, value, out, logsumexp, *rest, scale=None):
    cum_q, cum_k, _, _, dropout, causal, *seeds = rest
    full, end = key.shape[2], _seen(*at.ins[1:3])
    if causal and _cut(at, 1):
        key, value = key.narrow(2, 0, end), value.narrow(2, 0, end)
    sizes = query.shape[2], key.shape[2]
    args = (query, key, value, out, logsumexp, cum_q, cum_k, *sizes, dropout, causal, *seeds)
    grads = unless_empty(FLASH_BACK)(at, grad, *args, scale=scale)
    if grads[1].shape[2] == full:
        return grads
    missing = [0, 0, 0, full - end]
    return grads[0], *(aten.constant_pad_nd(t, missing) for t in grads[1:])


def _filled(op: Any) -> Any:
    return unless_empty(op, *[torch.float32, torch.int64, torch.int64] if op in SEEDS else [])


LOCAL = {
    **{op: _filled(op) for op in (*SEEDS, EFFICIENT_BACK, CUDNN_BACK)},
    CPU: _masking(CPU, 0),
    CPU_BACK: _masking(CPU_BACK, 1),
    FLASH: _flash,
    FLASH_BACK: _flash_back,
}

for _op, _local in LOCAL.items():
    each(_op, local=_local)(forward if _op in SEEDS else backward)
