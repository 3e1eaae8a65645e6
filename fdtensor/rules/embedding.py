"""Look-ups in a table: a rank that holds some rows of it looks up those, and a sum is pending."""

from __future__ import annotations

import torch

from fdtensor.rules.core import P, R, S, rule
from fdtensor.rules.held import inside

aten = torch.ops.aten


def _look_up(at, weight, indices, *_):
    if weight.shape[0] == at.ins[0].full[0]:
        return aten.embedding.default(weight, indices)
    if weight.shape[0] == 0:
        return weight.new_zeros(at.outs[0].shape)
    found, place = inside(indices, at.ins[0].box[0])
    return aten.embedding.default(weight, place).masked_fill(~found.unsqueeze(-1), 0)


@rule(aten.embedding.default, local=_look_up)
def embedding(weight, indices, *_):
    """`out[i, f] = weight[indices[i], f]`"""
    yield (S(0), R), P  # each row is on one rank, others give zeros
    yield (S(1), R), S(indices.ndim)
    for d in range(indices.ndim):
        yield (R, S(d)), S(d)
    yield (P, R), P


def _counted(at, grad, indices, num_weights, padding_idx, scale_grad_by_freq):
    held = at.outs[0].box[0]
    rows = at.outs[0].shape[0]
    if rows == at.outs[0].full[0]:
        return aten.embedding_dense_backward.default(
            grad, indices, num_weights, padding_idx, scale_grad_by_freq
        )
    found, place = inside(indices, held)
    place = torch.where(found & (indices != padding_idx), place, rows)  # one row that none reads
    made = aten.embedding_dense_backward.default(grad, place, rows + 1, rows, scale_grad_by_freq)
    return made.narrow(0, 0, rows)


@rule(aten.embedding_dense_backward.default, local=_counted)
def embedding_dense_backward(grad, indices, num_weights, padding_idx, scale_grad_by_freq):
    """`out[v, f] = sum_i grad[i, f] * (indices[i] == v)`, divided by the count of v if scaled"""
    yield (R, R), S(0)  # a rank counts only its rows
    yield (S(indices.ndim), R), S(1)
    if not scale_grad_by_freq:
        for d in range(indices.ndim):
            yield (S(d), S(d)), P
    yield (P, R), P


_SUM, _MEAN, _MAX = 0, 1, 2


def _bags(op):
    """The kernels need a feature: a rank without one makes one up and drops it."""

    def local(at, weight, *args):
        if weight.shape[1]:
            return op(weight, *args)
        made = op(weight.new_zeros(weight.shape[0], 1), *args)
        return [t.narrow(1, 0, 0) if t.ndim == 2 else t for t in made]

    return local


@rule(aten._embedding_bag.default, local=_bags(aten._embedding_bag.default))
def embedding_bag(weight, indices, offsets, scale=False, mode=_SUM, sparse=False, psw=None, *_):
    """`out[b, f] = sum_(i in bag b) psw[i] * weight[indices[i], f]`, or its mean or maximum"""
    rest = (R,) * (2 if psw is None else 3)
    yield (S(1), *rest), (S(1), R, R, S(1) if mode == _MAX else R)
    if mode != _MAX:
        yield (P, *rest), (P, R, R, R)
        if psw is not None:
            yield (R, R, R, P), (P, R, R, R)


@rule(
    aten._embedding_bag_forward_only.default,
    local=_bags(aten._embedding_bag_forward_only.default),
)
def embedding_bag_forward(*args):
    """`out[b, f] = sum_(i in bag b) psw[i] * weight[indices[i], f]`, or its mean or maximum"""
    yield from embedding_bag(*args)


@rule(aten._embedding_bag_dense_backward.default)
def embedding_bag_dense_backward(
    grad, indices, offset2bag, bag_size, largest, num_weights, scale, mode, psw, padding_idx=-1
):
    """`out[v, f] = sum_i psw[i] * grad[bag of i, f] * (indices[i] == v)`"""
    after = () if psw is None else (R,)
    yield (P, R, R, R, R, *after), P
    yield (S(1), R, R, R, S(1) if mode == _MAX else R, *after), S(1)


@rule(aten._embedding_bag_backward.default)
def embedding_bag_backward(
    grad, indices, offsets, bags, sizes, largest, rows, scale, mode, sparse, psw, padding_idx=-1
):
    """`out[v, f] = sum_i psw[i] * grad[bag of i, f] * (indices[i] == v)`"""
    if not sparse:
        for (cut, *ins), out in embedding_bag_dense_backward(
            grad, indices, bags, sizes, largest, rows, scale, mode, psw
        ):
            yield (cut, R, *ins), out
