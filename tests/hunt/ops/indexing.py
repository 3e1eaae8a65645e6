"""Ops that look elements up by index or mask, or put them where an index or mask says."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tests.hunt.draw import Draw, Op, Unfit
from tests.hunt.ops.views import drawn_slice
from tests.hunt.values import kind_of

__all__ = ["OPS", "tensor_index"]

ANY = "ficb"


def tensor_index(d: Draw, x: str, data: bool = False) -> str:
    """What stands in the brackets: tensors of integers or bools, among slices."""
    shape = d.shape(x)
    if data and d.chance(0.5):
        return d.fresh(shape[: d.between(1, len(shape))], d[x].bool().dtype)
    parts, common = [], [d.between(0, 3) for _ in range(d.between(1, 2))]
    for n in shape[: d.between(1, len(shape))]:
        kind = d.one(("tensor", "tensor", "slice", "int", "list"))
        if kind == "tensor" and n:
            parts.append(d.indices(d.thinner(common) or [1], n))
        elif kind == "list" and n:
            parts.append(str([d.between(-n, n - 1)]))
        elif kind == "int" and n:
            parts.append(str(d.between(-n, n - 1)))
        else:
            parts.append(drawn_slice(d, n))
    if d.chance(0.15):
        parts.insert(d.between(0, len(parts)), "None")
    return ", ".join(parts)


def _indexed(d: Draw, x: str) -> str:
    return f"{x}[{tensor_index(d, x)}]"


def _along(d: Draw, x: str) -> tuple[int, int]:
    dim = d.dim(x)
    return dim, d.shape(x)[dim]


def _index_select(d: Draw, x: str) -> str:
    dim, n = _along(d, x)
    return f"torch.index_select({x}, {dim}, {d.indices([d.between(0, 5)], n)})"


def _smaller(d: Draw, shape: Sequence[int], dim: int) -> list[int]:
    """A shape for indices: any size along `dim`, at most those of `shape` elsewhere."""
    found = [n if d.chance(0.7) else d.between(0, n) for n in shape]
    found[dim] = d.between(0, 5)
    return found


def _gather(d: Draw, x: str) -> str:
    dim, n = _along(d, x)
    shape = _smaller(d, d.shape(x), dim)
    return f"torch.gather({x}, {dim}, {d.indices(shape, n)}.long())"


def _take_along(d: Draw, x: str) -> str:
    dim, n = _along(d, x)
    shape = list(d.shape(x))
    shape[dim] = d.between(1, 4)
    return f"torch.take_along_dim({x}, {d.indices(shape, n)}.long(), {dim})"


def _take(d: Draw, x: str) -> str:
    return f"torch.take({x}, {d.indices([d.between(0, 4), 2], d[x].numel())}.long())"


def _scattered(d: Draw, x: str, adds: bool) -> str:
    dim, n = _along(d, x)
    shape = _smaller(d, d.shape(x), dim)
    if not adds:  # no place twice: the last of several is any
        shape[dim] = min(shape[dim], 1)
    index = f"{d.indices(shape, n)}.long()"
    if not adds:
        src = d.one((d.number(x), d.fresh(shape, d[x].dtype)))
        return f"torch.scatter({x}, {dim}, {index}, {src})"
    src = d.fresh(shape, d[x].dtype)
    how = d.one(("sum", "amax", "amin", "prod", "mean"))
    own = d.one((True, False))
    return d.one(
        (
            f"torch.scatter_add({x}, {dim}, {index}, {src})",
            f"torch.scatter_reduce({x}, {dim}, {index}, {src}, {how!r}, include_self={own})",
        )
    )


def _index_put_along(d: Draw, x: str) -> str:
    dim, n = _along(d, x)
    count = d.between(0, 4)
    shape = list(d.shape(x))
    shape[dim] = count
    src = d.fresh(shape, d[x].dtype)
    how = d.one(("amax", "amin", "prod", "mean"))
    order = f"torch.tensor({d.random.sample(range(n), min(n, count))}, dtype=torch.long)"
    index = d.indices([count], n)
    return d.one(
        (
            f"torch.index_add({x}, {dim}, {index}, {src})",
            f"torch.index_copy({x}, {dim}, {order}, {src})",
            f"torch.index_fill({x}, {dim}, {index}.long(), {d.number(x)})",
            f"torch.index_reduce({x}, {dim}, {index}, {src}, {how!r})",
        )
    )


def _index_put(d: Draw, x: str) -> str:
    n = d.shape(x)[0]
    m = d.between(0, 4)
    src = d.fresh([m, *d.shape(x)[1:]], d[x].dtype)
    return f"torch.index_put({x}, ({d.indices([m], n)}.long(),), {src}, accumulate=True)"


def _put(d: Draw, x: str) -> str:
    m = d.between(0, 4)
    index = d.indices([m], d[x].numel())
    return f"{x}.put({index}.long(), {d.fresh([m], d[x].dtype)}, accumulate=True)"


def _masked_scatter(d: Draw, x: str) -> str:
    return f"{x}.masked_scatter({d.mask(x)}, {d.fresh([d[x].numel()], d[x].dtype)})"


def _part_scattered(d: Draw, x: str) -> str:
    dim, n = _along(d, x)
    shape = list(d.shape(x))
    start, end = sorted((d.between(0, n), d.between(0, n)))
    kind = d.one(("slice", "select", "diagonal"))
    if kind == "slice":
        shape[dim] = end - start
        return f"torch.slice_scatter({x}, {d.fresh(shape, d[x].dtype)}, {dim}, {start}, {end})"
    if kind == "select":
        at = d.between(-n, n - 1)
        del shape[dim]
        return f"torch.select_scatter({x}, {d.fresh(shape, d[x].dtype)}, {dim}, {at})"
    if len(shape) != 2:
        raise Unfit
    return f"torch.diagonal_scatter({x}, {d.fresh([min(shape)], d[x].dtype)})"


def _embedding(d: Draw, x: str) -> str:
    rows = d.shape(x)[0]
    index = d.indices([d.between(0, 3) for _ in range(d.between(0, 2))], rows)
    padding = d.one(("", "", f", padding_idx={d.between(0, max(0, rows - 1))}"))
    return f"F.embedding({index}, {x}{padding})"


def _embedding_bag(d: Draw, x: str) -> str:
    index = d.indices([3, 2], d.shape(x)[0])
    return f"F.embedding_bag({index}, {x}, mode={d.one(('sum', 'mean', 'max'))!r})"


def _one_hot(d: Draw, x: str) -> str:
    return f"F.one_hot({x}.abs().remainder(5).long(), {d.between(5, 6)})"


def _masked(d: Draw, x: str) -> str:
    mask = d.mask(x, thin=False)
    return d.one(
        (
            f"{x}[{mask}]",
            f"torch.masked_select({x}, {mask})",
            f"torch.nonzero({x})",
            f"torch.argwhere({x})",
            f"{x} * {x}.sum().item()",
            f"{x}.unique()",
            f"torch.where({mask})",
            f"{x}[{tensor_index(d, x, True)}]",
            f"({x} + 1 if bool(({x} > 0).any()) else {x} - 1)",
            f"torch.bincount({x}.flatten().abs().long())",
            f"{x}[: int({mask}.sum())]",
            f"{x}[{d.indices([], d.shape(x)[0])}]",
        )
    )


def _rolled_index(d: Draw, x: str) -> str:
    """Indices that the program computes."""
    dim, n = _along(d, x)
    order = f"torch.argsort({x}.select({0 if dim % d[x].ndim else -1}, 0), dim=0, stable=True)"
    if d[x].ndim != 2 or not n:
        raise Unfit
    return f"torch.index_select({x}, {dim}, {order})"


def _flat_lookup(d: Draw, x: str) -> str:
    count = math.prod(d.shape(x))
    if not count:
        raise Unfit
    index = d.pick(lambda t: kind_of(t.dtype) == "i" and t.dtype.itemsize > 3 and t.ndim > 0)
    return f"{x}.flatten()[{index} % {count}]"


OPS = (
    Op("getitem.tensor", _indexed, ANY, least=1, weight=3),
    Op("index_select", _index_select, ANY, least=1),
    Op("gather", _gather, ANY, least=1),
    Op("take_along_dim", _take_along, ANY, least=1),
    Op("take", _take, ANY),
    Op("scatter", lambda d, x: _scattered(d, x, False), ANY, least=1),
    Op("scatter.reduced", lambda d, x: _scattered(d, x, True), "fi", least=1),
    Op("index_along", _index_put_along, "fi", least=1, weight=2),
    Op("index_put", _index_put, "fic", least=1),
    Op("put", _put, "fi"),
    Op("masked_scatter", _masked_scatter, ANY, least=1),
    Op("part_scattered", _part_scattered, ANY, least=1),
    Op("embedding", _embedding, "f", least=2, most=2),
    Op("embedding_bag", _embedding_bag, "f", False, least=2, most=2),
    Op("one_hot", _one_hot, "i"),
    Op("index_computed", _rolled_index, "fi", jumps=True, least=2, most=2),
    Op("flat_lookup", _flat_lookup, ANY),
    Op("masked", _masked, "fi", jumps=True, data=True, least=1),
)
