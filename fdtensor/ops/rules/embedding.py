"""Look-ups in a table: a rank that holds some rows of it looks up those, and a sum is pending."""

from __future__ import annotations

import torch

from fdtensor.ops.graph import Full
from fdtensor.ops.notation.core import P, R, S
from fdtensor.ops.notation.each import each
from fdtensor.ops.notation.local_index import inside, local_index, with_scratch, without_scratch
from fdtensor.ops.notation.ops import on, overloads
from fdtensor.ops.rules.index import index, taken

aten = torch.ops.aten


def _look_up(at, weight, indices, *_):
    cut = weight.shape[0] != at.ins[0].full[0]
    return taken(at, weight, [indices]) if cut else aten.embedding.default(weight, indices)


@on("embedding", local=_look_up)
def embedding(weight, indices, *_):
    """`out[i, f] = weight[indices[i], f]`"""
    yield from index(weight, [indices])


def _counted(at, grad, indices, num_weights, padding_idx, scale_grad_by_freq):
    op, rows = aten.embedding_dense_backward.default, at.outs[0].shape[0]
    if rows == num_weights:
        return op(grad, indices, num_weights, padding_idx, scale_grad_by_freq)
    is_held, place = inside(indices, at.outs[0].box[0])
    place = torch.where(is_held & (indices != padding_idx), place, rows)  # one row that none reads
    return op(grad, place, rows + 1, rows, scale_grad_by_freq).narrow(0, 0, rows)


@on("embedding_dense_backward", local=_counted)
def embedding_dense_backward(grad, indices, num_weights, padding_idx, scale_grad_by_freq):
    """`out[v, f] = sum_i grad[i, f] * (indices[i] == v)`, divided by the count of v if scaled"""
    yield (R, R), S(0)  # a rank counts only its rows
    yield (S(indices.ndim), R), S(1)
    if not scale_grad_by_freq:
        for d in range(indices.ndim):
            yield (S(d), S(d)), P
    yield (P, R), P


def _renormed(at, weight, indices, *norm):
    if weight.shape[0] == at.ins[0].full[0]:
        return aten.embedding_renorm.default(weight, indices, *norm)
    place = local_index(indices, at.ins[0].box[0])
    return without_scratch(aten.embedding_renorm.default(with_scratch(weight, 0), place, *norm), 0)


@on("embedding_renorm", local=_renormed)
def embedding_renorm(weight, indices, max_norm, norm_type):
    """`out[v] = weight[v]`, of at most this norm if v is looked up"""
    yield (S(0), R), S(0)


_SUM, _MEAN, _MAX = 0, 1, 2


def _bags(op):
    """Sums of the rows that a rank holds; a mean is such a sum over the size of its bag."""

    def local(at, weight, indices, offsets, scale, mode, sparse, psw, last=False, padding=-1):
        rest = offsets, scale, mode, sparse, psw, last, padding
        if not weight.shape[1]:  # the kernels need a feature
            results = op(weight.new_zeros(at.ins[0].full[0], 1), indices, *rest)
            return [t.narrow(1, 0, 0) if t.ndim == 2 else t for t in results]
        if weight.shape[0] == at.ins[0].full[0]:
            return op(weight, indices, *rest)
        is_held, place = inside(indices, at.ins[0].box[0])
        counts = (is_held & (indices != padding)).to(weight.dtype)
        weights = counts if psw is None else psw * counts
        _, *others = op(weight.new_zeros(at.ins[0].full[0], 1), indices, *rest)
        table = weight if weight.shape[0] else weight.new_zeros(1, weight.shape[1])
        out = op(table, place, offsets, scale, _SUM, sparse, weights, last, -1)[0]
        if mode == _MEAN:
            out = out / others[1].clamp(min=1).unsqueeze(1)
        return out, *others

    return local


@on("_embedding_bag _embedding_bag_forward_only", _bags)
def embedding_bag(weight, indices, offsets, scale=False, mode=_SUM, sparse=False, psw=None, *_):
    """`out[b, f] = sum_(i in bag b) psw[i] * weight[indices[i], f]`, or its mean or maximum"""
    rest = (R,) * (2 if psw is None else 3)
    yield (S(1), *rest), (S(1), R, R, S(1) if mode == _MAX else R)
    if mode != _MAX:
        yield (S(0), *rest), (P, R, R, R)
        yield (P, *rest), (P, R, R, R)
        if psw is not None:
            yield (R, R, R, P), (P, R, R, R)


@each(*overloads("_embedding_bag_dense_backward _embedding_bag_backward"))
def embedding_bag_backward(op, named):
    """`out[v, f] = sum_i psw[i] * grad[bag of i, f] * (indices[i] == v)`"""
    names = [name for name, value in named.items() if isinstance(value, Full)]
    if not named.get("sparse"):
        yield tuple(P if name == "grad" else R for name in names), P
        cut = ("grad", "maximum_indices") if named["mode"] == _MAX else ("grad",)
        yield tuple(S(1) if name in cut else R for name in names), S(1)
        one = ("indices", "offset2bag", "per_sample_weights")  # each index adds a term
        same = named["indices"].shape == named["offset2bag"].shape
        if same and named["mode"] != _MAX and not named["scale_grad_by_freq"]:
            yield tuple(S(0) if name in one else R for name in names), P
