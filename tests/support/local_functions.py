"""Functions of one rank's tensors, for what a rank computes alone: `LOCAL`, each as its text.

They are of `x` and `y`, f64[3, 5], the indices below 3 `i` and `j`, i64[4], and `k`, i64[3, 5], and
the mask `m`, bool[3, 5]. `n` is one index of `i`, `t` a fresh tensor of zeros like `x`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

__all__ = ["LOCAL", "blocks", "local_function"]

LOOK_UPS = """
F.embedding(i, x)
F.embedding(k, x)
F.embedding(i, x, padding_idx=1)
F.embedding_bag(k, x, mode="sum")
F.embedding_bag(k, x, mode="mean")
F.embedding_bag(k, x, mode="max")
F.embedding_bag(k, x, mode="sum", per_sample_weights=y)
x[i]
x[i, j]
x[:, j]
x[i, :2]
x[i, None]
x[i[:, None], j]
x[torch.arange(3), j[:3]]
x[i, 2]
x[i][:, j]
x[..., j]
x[i[0]]
x[i[0], j]
x[-1 - i]
x[[0, 2]]
torch.arange(3.0).double()[i] * x[0, :4]
x.index_select(1, i)
x.gather(0, k)
x.gather(1, k)
x.take(i)
x.take(-1 - k)
x.take_along_dim(k, 1)
x.take_along_dim(y.argsort(1), 1)
x.take_along_dim(i)
x[x[:, 0].argsort()]
x[torch.arange(3), x.argmax(1)]
x[tuple(torch.tril_indices(3, 3))]
torch.func.vmap(lambda a, b: a[b])(x, k)
torch.func.grad(lambda a: (a[i, j] ** 3).sum())(x)
torch.func.grad(lambda a: (F.embedding(i, a) ** 3).sum())(x)
x.gather(1, x.max(1, keepdim=True).indices)
F.one_hot(i, 3).double() @ x
torch.searchsorted(x.sort(1).values, y) * y
torch.bucketize(y, torch.arange(3.0).double()) * y
torch.isin(k, i) * y
torch.isclose(x, y, atol=1.0) * y
torch.nonzero_static(m, size=5).sum(1) * y[0]
F.cross_entropy(x, i[:3])[None]
F.cross_entropy(x, i[:3], reduction="none", label_smoothing=0.1)
F.cross_entropy(x, i[:3], ignore_index=1)[None]
F.multi_margin_loss(x, i[:3])[None]
F.multilabel_margin_loss(x, k)[None]
F.nll_loss(x.log_softmax(1), i[:3])[None]
"""

WRITES = """
x.index_put((i[:1], j[:1]), y[0, :1])
x.index_put((i,), y[0].expand(4, 5), True)
x.index_put((i, j), y[0, :4], True)
t.index_put((i,), y[0].expand(4, 5), True)
x.new_zeros(3, 5).index_put((i, j), y[0, :4], True)
torch.zeros(3, 5).double().index_put((i,), y[0].expand(4, 5), True)
x.index_put((m,), x.sum())
put(x.clone(), (n,), y[:1])
put(x.clone(), (n, j[:1]), y[0, :1])
put(x.clone(), (i, j), 3.0) * y
put(x.clone(), (slice(None), j[:1]), y[:, :1])
put(x.clone(), (slice(1, 3), n), y[:2, :1])
put(x.clone(), (slice(1, 3),), y[:2])
put(x.clone(), (m,), 3.0) * y
put(x.clone(), (0, j), 2.0) * y
put(x.clone(), (..., slice(None, None, 2)), y[:, :3])
put(t, (n,), y[:1])
torch.bincount(i, minlength=3).double()
torch.bincount(i, y.detach()[0, :4].float(), minlength=3).double()
torch.histc(x, 4, -5, 5).detach()
torch.histc(x, 4).detach()
x.scatter(1, torch.arange(5).expand(3, 5), y)
x.scatter(0, k, 3.0) * y
x.scatter_add(0, k, y)
t.scatter_add(0, k, y)
t.scatter_(0, k, 1.0) * y
x.clone().scatter_add_(1, k, y)
x.scatter_reduce(0, k, y, "amax")
x.scatter_reduce(0, k, y, "mean")
x.scatter_reduce(0, k, y, "sum", include_self=False)
x.index_add(0, i[:3], y)
x.index_add(1, i[:3], y[:, :3])
torch.zeros(3, 5).double().index_add(0, i[:3], y)
torch.zeros(3, 5).double().index_add_(0, i[:3], y)
x.index_copy(0, n, y[:1])
x.index_fill(0, i, 2.0) * y
x.clone().index_fill_(1, i, 2.0) * y
x.index_reduce(0, i[:3], y, "amax")
x.put(n, y[0, :1])
x.put(i, y[0, :4], accumulate=True)
x.masked_fill(m, 0.0) + y
x.masked_fill(m, y.sum())
x.clone().masked_fill_(m, y.sum())
x.masked_scatter(m, y)
torch.zeros(3, 5).double().masked_scatter(m, y)
torch.where(m, x, torch.zeros(()))
torch.slice_scatter(x, y[:1], 0, 1, 2)
torch.select_scatter(x, y[0], 0, 1)
torch.diagonal_scatter(x, y[0, :3])
torch.diag_embed(x[0])
torch.func.vmap(lambda a, b, c: a.index_put((b,), c, accumulate=True))(x, k, y)
torch.zeros_like(x).index_add(0, x[:, 0].argsort(), y * x)
filled(torch.zeros(3, 7).double(), x)
filled(torch.arange(21.0).double().view(3, 7) * 2, x)
torch.zeros(3, 5).double().copy_(x).addcmul_(x, y).lerp_(y, 0.3).tril_()
torch.zeros(3, 5).double().add_(x).clamp_(min=0.5).sqrt_()
put(torch.zeros(3, 5).double(), (m,), 3.0) * x
put(torch.empty(1, 3, 5).double(), (0,), x)[0]
added(torch.ones(3, 5).double(), x)
added(x.clone(), y)
x.clone().clamp_(min=0) * y
x.clone().cumsum_(1) * y
torch.subtract(x, 2).square_().negative_() * y
"""

OTHERS = """
x.sort(1).values * y
x.sort(0).values * y
x.topk(2, 1).values
x.kthvalue(2, 1).values
x.median(1).values
x.median()[None]
x.quantile(0.3, 1)
x.nanquantile(0.3, 1)
x.max(1).values
x.argmax() * y
x.cummax(1).values
x.cumprod(1)
x.logcumsumexp(1)
x.softmax(1)
F.layer_norm(x, (5,), y[0], y[1])
F.batch_norm(x, None, None, y[0], y[1], True)
torch.einsum("ij,kj->ik", x, y)
F.linear(x, y, y[:, 0])
F.conv1d(x[None], y[:, :, None].expand(3, 5, 2)[:, :3])[0]
F.max_pool1d(x[None], 2)[0]
F.interpolate(x[None], scale_factor=2)[0]
F.pad(x, (1, 1), mode="reflect")
x.roll(1, 0) * y
torch.cat([x, y, torch.zeros(1, 5).double()])
x.var(0)
torch.cdist(x, y)
x.unfold(1, 2, 1)
torch.linalg.inv(x @ x.mT + 9 * torch.eye(3).double())
torch.fft.fft(x).abs()
torch.cov(x)
F.pdist(x)
x.renorm(2, 0, 1.0)
F.grid_sample(x[None, None], y[:, :4].reshape(1, 3, 2, 2) / 9, align_corners=True)[0, 0]
F.kl_div(x.log_softmax(1), y.softmax(1), reduction="batchmean")[None]
F.triplet_margin_loss(x, y, x * y)[None]
F.cosine_similarity(x, y)
torch.gru_cell(x, y, x.mT.reshape(15, 1).expand(15, 5) / 9, y.mT.reshape(15, 1).expand(15, 5) / 9)
F.scaled_dot_product_attention(x[None], y[None], x[None])[0]
x.repeat_interleave(2, 0)
"""

LOCAL = tuple([line for table in (LOOK_UPS, WRITES, OTHERS) for line in table.splitlines() if line])


def put(x: torch.Tensor, key: Any, value: Any) -> torch.Tensor:
    x[key] = value
    return x


def filled(out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    out[:, 1:6] = x
    out[0, 2] *= 3
    return out


def added(out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    out[1:] -= x[1:]
    out[:, ::2] *= 2
    out[0, 1:3] += x[0, :2]
    return out


def local_function(text: str) -> Callable[..., torch.Tensor]:
    """The function with this text."""
    names = {"torch": torch, "F": F, "put": put, "filled": filled, "added": added}
    plain = eval(f"lambda x, y, i, j, k, m, n, t: {text}", names)

    def f(*tensors: torch.Tensor) -> torch.Tensor:
        x, *_ = tensors
        return plain(*tensors, tensors[2][:1], torch.zeros_like(x)).contiguous()

    return f


def blocks(seed: int, ranks: int) -> list[torch.Tensor]:
    """The tensors of all ranks, one rank after the other along dim 0."""
    chance = torch.Generator().manual_seed(seed)
    values = (torch.randperm(400, generator=chance) - 200).double() / 40
    x, y = values[: ranks * 15].view(-1, 5), values[-ranks * 15 :].view(-1, 5)
    i, j, k = (torch.randint(3, s, generator=chance) for s in ((ranks * 4,), (ranks * 4,), x.shape))
    return [x, y, i, j, k, torch.rand(x.shape, generator=chance) < 0.5]
