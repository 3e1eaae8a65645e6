"""Calls that torch refuses: indices out of range, values and shapes that do not fit."""

from __future__ import annotations

import math

from tests.hunt.draw import Draw, Op, Unfit

__all__ = ["OPS"]

ANY = "ficb"


def _bad(d: Draw, shape: list[int], size: int) -> str:
    """Indices of which the last one is out of range."""
    past = d.one((size, size + 1, 4 * size + 7, -size - 1, -size - 5))
    if not all(shape):
        raise Unfit
    if d.chance(0.4):
        return f"torch.full({shape}, {past})"
    name = d.indices(shape, max(1, size))
    last = f"(torch.arange({math.prod(shape)}) == {math.prod(shape) - 1}).reshape({shape})"
    return f"torch.where({last}, {past}, {name})"


def _looked_up(d: Draw, x: str) -> str:
    dim = d.dim(x)
    n = d.shape(x)[dim]
    shape = list(d.shape(x))
    shape[dim] = 2
    one, many = f"{_bad(d, [3], n)}.long()", f"{_bad(d, shape, n)}.long()"
    src = d.fresh(shape, d[x].dtype)
    lead = ":, " * (dim % len(shape))
    return d.one(
        (
            f"{x}[{lead}{one}]",
            f"{x}[{lead}{one}]",
            f"torch.index_select({x}, {dim}, {one})",
            f"torch.gather({x}, {dim}, {many})",
            f"torch.take_along_dim({x}, {many}, {dim})",
            f"torch.scatter({x}, {dim}, {many}, {src})",
            f"torch.scatter_add({x}, {dim}, {many}, {src})",
            f"torch.scatter_reduce({x}, {dim}, {many}, {src}, 'amax')",
        )
    )


def _put(d: Draw, x: str) -> str:
    dim = d.dim(x)
    n = d.shape(x)[dim]
    shape = list(d.shape(x))
    shape[dim] = 3
    index, src = f"{_bad(d, [3], n)}.long()", d.fresh(shape, d[x].dtype)
    lead = ":, " * (dim % len(shape))
    return d.one(
        (
            f"torch.index_add({x}, {dim}, {index}, {src})",
            f"torch.index_copy({x}, {dim}, {index}, {src})",
            f"torch.index_fill({x}, {dim}, {index}, {d.number(x)})",
            f"torch.index_reduce({x}, {dim}, {index}, {src}, 'amax')",
            f"torch.index_put({x}, ({'None, ' * (dim % len(shape))}{index},), {x}.sum())",
            f"torch.index_put({x}, ({_bad(d, [3], d.shape(x)[0])}.long(),), {x}[:1] * 1)",
            f"{x}[{lead}{d.one((n, n + 3, -n - 1))}]",
        )
    )


def _flat(d: Draw, x: str) -> str:
    n = d[x].numel()
    index = f"{_bad(d, [3], n)}.long()"
    return d.one(
        (
            f"torch.take({x}, {index})",
            f"{x}.put({index}, {d.fresh([3], d[x].dtype)})",
            f"{x}.flatten()[{index}]",
        )
    )


def _rows(d: Draw, x: str) -> str:
    n, c = d.shape(x)
    if not n or not c:
        raise Unfit
    target = f"{_bad(d, [n], c)}.long()"
    return d.one(
        (
            f"F.embedding({_bad(d, [2, 2], n)}.long(), {x})",
            f"F.embedding_bag({_bad(d, [2, 2], n)}.long(), {x})",
            f"F.nll_loss({x}, {target})",
            f"F.nll_loss({x}, {target}, reduction='none')",
            f"F.cross_entropy({x}, {target})",
            f"F.cross_entropy({x}, {target}, reduction='sum')",
            f"F.multi_margin_loss({x}, {target})",
        )
    )


def _values(d: Draw, x: str) -> str:
    """Values that the op refuses."""
    f = f"{x}.double()"
    mask = d.mask(x, thin=False)
    return d.one(
        (
            f"F.one_hot(torch.tensor([0, -1]) + {x}.flatten()[:1].long() * 0)",
            f"F.one_hot({x}.long() * 0 + 7, 5)",
            f"F.binary_cross_entropy({f}.abs() + 2, {f} * 0)",
            f"torch.linalg.cholesky(-torch.eye(3) + {f}.sum() * 0)",
            f"torch.linalg.inv(torch.zeros(3, 3) + {f}.sum() * 0)",
            f"{x}.masked_scatter({mask}, {x}.flatten()[:0])",
            f"{x}.long() // ({x}.long() * 0)",
            f"{x}.long() % ({x}.long() * 0)",
            f"torch.tensor([2, 3]) ** ({x}.flatten()[:1].long() * 0 - 1)",
            f"torch.bincount({x}.flatten().long() * 0 - 1)",
            f"torch.repeat_interleave({x}, {x}.flatten().long() * 0 - 1)",
            f"torch.index_put({x}, ({mask},), torch.arange(1000).to({x}.dtype))",
            f"torch.multinomial({f}.flatten() * 0 - 1, 1)",
            f"torch.bernoulli({f} * 0 + 2)",
            f"torch.linalg.eigvalsh(torch.full((2, 2), nan) + {f}.sum() * 0)",
        )
    )


def _shapes(d: Draw, x: str) -> str:
    """Shapes, dims and dtypes that do not fit."""
    ndim = d[x].ndim
    return d.one(
        (
            f"{x} + torch.ones({[n + 2 for n in d.shape(x)] or [0, 'x']})",
            f"torch.sum({x}, {ndim + 1})",
            f"{x}.reshape({d[x].numel() + 1})",
            f"{x} @ torch.ones({(d.shape(x) or (0,))[-1] + 1}, 2, dtype={x}.dtype)",
            f"torch.cat([{x}, {x}[None, None]])",
            f"{x}.transpose(0, {ndim + 2})",
            f"torch.softmax({x}, {ndim + 1})",
            f"{x}.expand({[n + 1 for n in d.shape(x)]})",
            f"torch.mm({x}, {x}.double().to(torch.int64))",
            f"{x}.view({[*d.shape(x), 2]})",
            f"torch.split({x}, [1, 99])[0]",
            f"torch.stack([{x}, {x}[..., None]])",
            f"torch.bitwise_and({x}.double(), 1)",
            f"torch.chunk({x}, 0)[0]",
            f"torch.unbind({x}, {ndim + 1})[0]",
            f"torch.topk({x}, 10000)[0]",
            f"torch.kthvalue({x}, 0)[0]",
            f"torch.amax({x}.flatten()[:0], 0)",
            f"torch.argmax({x}.flatten()[:0])",
            f"torch.max({x}.flatten()[:0])",
            f"{x}.add_(torch.ones({[3, *[n + 1 for n in d.shape(x)]]}))",
            f"{x}.long().add_(1.5)",
            f"F.conv2d({x}, {x})",
            f"torch.norm({x}.long())",
            f"torch.mean({x}.long())",
        )
    )


OPS = (
    Op("bad.lookup", _looked_up, "ficb", least=1, most=3, fails=True, weight=3),
    Op("bad.put", _put, "ficb", least=1, most=3, fails=True, weight=2),
    Op("bad.flat", _flat, "ficb", fails=True),
    Op("bad.rows", _rows, "f", least=2, most=2, fails=True, weight=2),
    Op("bad.values", _values, "fi", fails=True, weight=3),
    Op("bad.shapes", _shapes, "ficb", fails=True, weight=2),
)
