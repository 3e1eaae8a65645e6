"""Scaled dot product attention: batches and heads are independent, and so are queries.

`out[n, h, q] = sum_k softmax_k(scale * query[n, h, q] . key[n, h, k] + mask[n, h, q, k]) * value`

A cut of the keys leaves the normalization pending, so that only the backward kernels have such a
row: they are given the normalization. Kernels number queries from 0 for a causal mask: it allows
no cut of the queries or keys. None has a row where dropout draws random numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import torch

from fdtensor.rules.core import P, R, S, U, rule
from fdtensor.rules.empty import unless_empty

aten = torch.ops.aten

Cuts = dict[str, Any]
"""The placements of the named tensors of a kernel; the others are `R`."""


def independent(query, key, value, mask) -> Iterator[Cuts]:
    """Cuts of batches and heads.

    With fewer heads of keys than of queries, each goes with a run of heads of queries.
    """
    yield _cut(query=S(0), key=S(0), value=S(0), scores=(mask, S(0)))
    run = query.shape[1] // max(1, key.shape[1])
    if key.shape[1] == value.shape[1] and run == 1:
        yield _cut(query=S(1), key=S(1), value=S(1), scores=(mask, S(1)))
    elif key.shape[1] == value.shape[1] and run > 1:
        yield _cut(query=U(1, run), key=U(1, 1), value=U(1, 1), scores=(mask, U(1, run)))


def _cut(scores: tuple[Any, Any] = (None, R), **cuts: Any) -> Cuts:
    """The cuts with that of a mask which is broadcast to the scores [n, h, q, k]."""
    mask, cut = scores
    if mask is None:
        return cuts
    i = cut.dim - (4 - mask.ndim)
    return {**cuts, "mask": attrs.evolve(cut, dim=i) if i >= 0 and mask.shape[i] != 1 else R}


def _row(tensors: Mapping[str, Any], cuts: Cuts) -> tuple[Any, ...]:
    return tuple(cuts.get(name, R) for name, t in tensors.items() if t is not None)


def forward(tensors: Mapping[str, Any], seeds: int, dropout: float, whole: bool):
    """Rows of a kernel that gives the attention, the normalization and `seeds` other tensors.

    With `whole` the queries are not cut.
    """
    query, key, value, mask = (tensors.get(n) for n in ("query", "key", "value", "mask"))
    if dropout:
        return
    for cuts in independent(query, key, value, mask):
        yield _row(tensors, cuts), (cuts["query"], cuts["query"], *[R] * seeds)
    if not whole:
        cuts = _cut(query=S(2), scores=(mask, S(2)))
        yield _row(tensors, cuts), (S(2), S(2), *[R] * seeds)
    yield _row(tensors, {"value": P}), (P, R, *[R] * seeds)


def backward(tensors: Mapping[str, Any], dropout: float, whole: bool, biased: bool = False):
    """Rows of a kernel that gives the gradients of query, key, value and, if `biased`, mask.

    With `whole` neither queries nor keys are cut.
    """
    query, key, value, mask = (tensors.get(n) for n in ("query", "key", "value", "mask"))
    if dropout:
        return

    def row(cuts: Cuts):
        like = cuts.get("query", R)
        given = {"grad": like, "out": like, "logsumexp": like, **cuts}
        made = [P if cuts.get(n, R) == R else cuts[n] for n in ("query", "key", "value", "mask")]
        return _row(tensors, given), tuple(made[: 4 if biased else 3])

    for cuts in independent(query, key, value, mask):
        yield row(cuts)
    if not whole:
        yield row(_cut(query=S(2), scores=(mask, S(2))))
        yield row(_cut(key=S(2), value=S(2), scores=(mask, S(3))))
    yield _row(tensors, {"grad": P}), tuple([P] * (4 if biased else 3))


def _on(op: Any) -> Any:
    """The kernel, which may crash on empty blocks, or zeros."""
    seed = torch.uint64 if op is aten._scaled_dot_product_flash_attention.default else torch.int64

    def local(at, query, *args, **kwargs):
        if "backward" in op._schema.name:
            return unless_empty(op)(at, query, *args, **kwargs)
        wide = torch.float64 if query.dtype is torch.float64 else torch.float32
        return unless_empty(op, wide, seed, seed)(at, query, *args, **kwargs)

    return local


@rule(
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    local=_on(aten._scaled_dot_product_flash_attention_for_cpu.default),
)
def for_cpu(query, key, value, dropout_p, is_causal, *, attn_mask=None, scale=None):
    """`out[n, h, q] = sum_k softmax_k(query[n, h, q] . key[n, h, k]) * value[n, h, k]`, on a CPU"""
    tensors = {"query": query, "key": key, "value": value, "mask": attn_mask}
    yield from forward(tensors, 0, dropout_p, is_causal)


@rule(
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    local=_on(aten._scaled_dot_product_flash_attention_for_cpu_backward.default),
)
def for_cpu_backward(
    grad, query, key, value, out, logsumexp, dropout_p, is_causal, *, attn_mask=None, scale=None
):
    """`grad_value[n, h, k] = sum_q p[n, h, q, k] * grad[n, h, q]`, and the others like it"""
    tensors = {"grad": grad, "query": query, "key": key, "value": value, "out": out}
    tensors = {**tensors, "logsumexp": logsumexp, "mask": attn_mask}
    yield from backward(tensors, dropout_p, is_causal)


@rule(
    aten._scaled_dot_product_flash_attention.default,
    local=_on(aten._scaled_dot_product_flash_attention.default),
)
def flash(query, key, value, dropout_p, is_causal, return_debug_mask, *, scale=None):
    """`out[n, h, q] = sum_k softmax_k(query[n, h, q] . key[n, h, k]) * value[n, h, k]`

    The last three tensors are two seeds and a mask for debugging.
    """
    tensors = {"query": query, "key": key, "value": value}
    if not return_debug_mask:
        yield from forward(tensors, 3, dropout_p, is_causal)


@rule(
    aten._scaled_dot_product_flash_attention_backward.default,
    local=_on(aten._scaled_dot_product_flash_attention_backward.default),
)
def flash_backward(
    grad, query, key, value, out, logsumexp, cum_q, cum_k, max_q, max_k, dropout_p, is_causal,
    seed, offset, *, scale=None,
):  # fmt: skip
    """`grad_value[n, h, k] = sum_q p[n, h, q, k] * grad[n, h, q]`, and the others like it

    A cut of queries or keys would have to change `max_q` or `max_k`.
    """
    tensors = {"grad": grad, "query": query, "key": key, "value": value, "out": out}
    tensors = {**tensors, "logsumexp": logsumexp, "seed": seed, "offset": offset}
    if cum_q is None and cum_k is None:
        yield from backward(tensors, dropout_p, whole=True)


@rule(
    aten._scaled_dot_product_efficient_attention.default,
    local=_on(aten._scaled_dot_product_efficient_attention.default),
)
def efficient(
    query, key, value, attn_bias, compute_log_sumexp, dropout_p, is_causal, *, scale=None
):
    """`out[n, h, q] = sum_k softmax_k(query[n, h, q] . key[n, h, k]) * value[n, h, k]`

    The normalization is padded, so that queries are not cut.
    """
    tensors = {"query": query, "key": key, "value": value, "mask": attn_bias}
    yield from forward(tensors, 2, dropout_p, whole=True)


@rule(
    aten._scaled_dot_product_efficient_attention_backward.default,
    local=_on(aten._scaled_dot_product_efficient_attention_backward.default),
)
def efficient_backward(
    grad, query, key, value, attn_bias, out, logsumexp, seed, offset, dropout_p, grad_input_mask,
    is_causal, *, scale=None,
):  # fmt: skip
    """`grad_value[n, h, k] = sum_q p[n, h, q, k] * grad[n, h, q]`, and the others like it"""
    tensors = {"grad": grad, "query": query, "key": key, "value": value, "mask": attn_bias}
    tensors = {**tensors, "out": out, "logsumexp": logsumexp, "seed": seed, "offset": offset}
    biased = attn_bias is not None and grad_input_mask[3]
    yield from backward(tensors, dropout_p, whole=True, biased=biased)


@rule(
    aten._scaled_dot_product_cudnn_attention.default,
    local=_on(aten._scaled_dot_product_cudnn_attention.default),
)
def cudnn(
    query, key, value, attn_bias, compute_log_sumexp, dropout_p, is_causal, return_debug_mask, *,
    scale=None,
):  # fmt: skip
    """`out[n, h, q] = sum_k softmax_k(query[n, h, q] . key[n, h, k]) * value[n, h, k]`"""
    tensors = {"query": query, "key": key, "value": value, "mask": attn_bias}
    if not return_debug_mask:
        yield from forward(tensors, 2, dropout_p, whole=True)


@rule(
    aten._scaled_dot_product_cudnn_attention_backward.default,
    local=_on(aten._scaled_dot_product_cudnn_attention_backward.default),
)
def cudnn_backward(
    grad, query, key, value, out, logsumexp, seed, offset, attn_bias, cum_q, cum_k, max_q, max_k,
    dropout_p, is_causal, *, scale=None,
):  # fmt: skip
    """`grad_value[n, h, k] = sum_q p[n, h, q, k] * grad[n, h, q]`, and the others like it"""
    tensors = {"grad": grad, "query": query, "key": key, "value": value, "out": out}
    tensors = {**tensors, "logsumexp": logsumexp, "seed": seed, "offset": offset}
    if cum_q is None and cum_k is None:
        yield from backward({**tensors, "mask": attn_bias}, dropout_p, whole=True)


@rule(
    aten._scaled_dot_product_fused_attention_overrideable.default,
    local=_on(aten._scaled_dot_product_fused_attention_overrideable.default),
)
def overrideable(
    query, key, value, attn_bias, dropout_p, is_causal, return_debug_mask, *, scale=None
):
    """`out[n, h, q] = sum_k softmax_k(query[n, h, q] . key[n, h, k]) * value[n, h, k]`"""
    tensors = {"query": query, "key": key, "value": value, "mask": attn_bias}
    if not return_debug_mask and query.ndim == 4:
        yield from forward(tensors, 2, dropout_p, whole=True)
