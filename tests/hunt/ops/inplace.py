"""Statements that write into a value, whole or through a view of it."""

from __future__ import annotations

from typing import Any

from tests.hunt.draw import Draw, Op, Unfit
from tests.hunt.ops.indexing import tensor_index
from tests.hunt.ops.views import drawn_slice

__all__ = ["OPS"]

ANY = "ficb"


def _view(d: Draw, x: str) -> str:
    """A view of a value, as source."""
    shape = d.shape(x)
    if not shape:
        return d.one((x, f"{x}[None]", f"{x}.view(1)"))
    dim = d.dim(x)
    n = shape[dim]
    options = [
        x,
        f"{x}[{drawn_slice(d, shape[0])}]",
        f"{x}[..., {drawn_slice(d, shape[-1])}]",
        f"{x}.narrow({dim}, 0, {d.between(0, n)})",
        f"{x}.unsqueeze({dim})",
        f"{x}.transpose({dim}, {d.dim(x)})",
        f"{x}.flatten()[{drawn_slice(d, d[x].numel())}]",
        f"{x}.split(1, {dim})[0]" if n else x,
        f"{x}.chunk(2, {dim})[-1]",
        f"{x}.select({dim}, {d.between(-n, n - 1)})" if n else x,
        f"{x}.unbind({dim})[0]" if n else x,
        f"{x}.diagonal()" if len(shape) > 1 else f"{x}[::2]",
        f"{x}[1:].transpose(0, -1)[..., ::2]",
    ]
    return d.one(options)


def _written(method: str, operand: bool = True, views: bool = True) -> Any:
    def text(d: Draw, x: str) -> str:
        target = _view(d, x) if views and d.chance(0.6) else x
        if not operand:
            return f"{target}.{method}()"
        part = d.number(x) if target != x or d.chance(0.4) else d.partner(x, 0, same=True)
        return f"{target}.{method}({part})"

    return text


def _augmented(d: Draw, x: str) -> str:
    sign = d.one("+-*")
    target = d.one((x, f"{x}[{drawn_slice(d, max(1, (d.shape(x) or (1,))[0]))}]"))
    return f"{target} {sign}= {d.number(x) if target != x else d.partner(x, 0.4, same=True)}"


def _assigned(d: Draw, x: str) -> str:
    """`x[...] = y`, by slices and ints, through a view."""
    shape = d.shape(x)
    parts = []
    for n in shape[: d.between(1, len(shape))]:
        parts.append(str(d.between(-n, n - 1)) if n and d.chance(0.3) else drawn_slice(d, n))
    index = ", ".join(parts)
    if d.chance(0.5):
        return f"{x}[{index}] = {_filling(d, x, f'{x}[{index}]')}"
    view = d.one((f"{x}.t()", f"{x}.T", f"{x}.flatten()", f"{x}[0]", f"{x}.view(-1)", f"{x}[1:]"))
    return f"{view}[...] = {_filling(d, x, view)}"


def _filling(d: Draw, x: str, target: str) -> str:
    """A number, or a tensor that fits into `target`."""
    if d.chance(0.4):
        return d.number(x)
    try:
        shape = eval(target, {x: d[x]}).shape
    except Exception as error:
        raise Unfit from error
    if d.chance(0.3):
        return d.pick(lambda t: tuple(t.shape) == tuple(shape) and t.dtype == d[x].dtype)
    return d.fresh(d.thinner(shape), d.other(x))


def _assigned_by_tensor(d: Draw, x: str) -> str:
    if d.chance(0.4):
        return f"{x}[{d.mask(x, thin=False)}] = {d.number(x)}"
    index = tensor_index(d, x)
    if d.chance(0.6):
        return f"{x}[{index}] = {d.number(x)}"
    rows = f"{d.indices([3], d.shape(x)[0])}.long()"
    return f"{x}.index_put_(({rows},), {x}[:1] * 1, accumulate=True)"


def _indexed(d: Draw, x: str) -> str:
    dim = d.dim(x)
    n = d.shape(x)[dim]
    m = d.between(0, 3)
    shape = list(d.shape(x))
    shape[dim] = m
    index, src = d.indices([m], n), d.fresh(shape, d[x].dtype)
    thin = [m if i == dim % len(shape) else 1 for i in range(len(shape))]
    spread = f"{index}.long().reshape({thin}).expand({shape})"
    return d.one(
        (
            f"{x}.index_add_({dim}, {index}, {src})",
            f"{x}.index_fill_({dim}, {index}.long(), {d.number(x)})",
            f"{x}.scatter_add_({dim}, {spread}, {src})",
        )
    )


def _masked(d: Draw, x: str) -> str:
    view = d.one((x, f"{x}[0:1]", f"{x}[..., 1:]"))
    return d.one(
        (
            f"{x}.masked_fill_({d.mask(x)}, {d.number(x)})",
            f"{view}.masked_fill_({view} > 0, {d.number(x)})",
            f"{view}[{view} > 0] = {d.number(x)}",
            f"{x}.masked_scatter_({d.mask(x)}, {d.fresh([d[x].numel()], d[x].dtype)})",
        )
    )


def _restored(d: Draw, x: str) -> str:
    return d.one(
        (
            f"{x}.squeeze_()",
            f"{x}.unsqueeze_({d.between(0, d[x].ndim)})",
            f"{x}.t_()",
            f"{x}.transpose_(0, -1)",
        )
    )


def _out(d: Draw, x: str) -> str:
    y = d.twin(x)
    return d.one((f"torch.add({y}, {d.number(x)}, out={x})", f"torch.mul({y}, {y}, out={x})"))


def _moving(d: Draw, x: str) -> str:
    """Batch norm writes running statistics."""
    n = d.shape(x)[1]
    if not n or d[x].numel() // n < 2:
        raise Unfit
    mean, var = d.fresh([n], d[x].dtype), d.fresh([n], d[x].dtype, "positive")
    return f"{x}.copy_(F.batch_norm({x} * 1, {mean}, {var}, training=True, momentum=0.5))"


OPS = (
    *[Op(f"{m}_", _written(f"{m}_"), "fic", writes=True) for m in ("add", "sub", "mul")],
    Op("copy_", lambda d, x: f"{x}.copy_({d.partner(x, 0, same=True)})", ANY, writes=True),
    Op("copy_.number", lambda d, x: f"{_view(d, x)}.copy_({d.number(x)})", ANY, writes=True),
    *[
        Op(f"{m}_", _written(f"{m}_", False), "fi", writes=True)
        for m in ("neg", "zero", "relu", "square", "abs")
    ],
    *[
        Op(f"{m}_", _written(f"{m}_", False), "f", False, writes=True)
        for m in ("exp", "sigmoid", "tanh", "sin")
    ],
    Op("fill_", _written("fill_"), ANY, writes=True),
    Op("clamp_", lambda d, x: f"{_view(d, x)}.clamp_(-1, 2)", "fi", writes=True),
    Op("div_", lambda d, x: f"{_view(d, x)}.div_(4)", "fc", False, writes=True),
    Op("augmented", _augmented, "fic", writes=True, weight=2),
    Op("setitem", _assigned, ANY, least=1, writes=True, weight=3),
    Op("setitem.tensor", _assigned_by_tensor, ANY, least=1, writes=True, weight=2),
    Op("indexed_", _indexed, "fi", least=1, writes=True, weight=2),
    Op("masked_", _masked, "fi", jumps=True, least=1, writes=True, weight=2),
    Op("logical_not_", _written("logical_not_", False), "b", writes=True),
    Op("bitwise_and_", _written("bitwise_and_"), "ib", writes=True),
    Op("tril_", lambda d, x: f"{x}.tril_({d.between(-1, 1)})", ANY, least=2, writes=True),
    Op("cumsum_", lambda d, x: f"{_view(d, x)}.cumsum_(0)", "fi", least=1, writes=True),
    Op("out=", _out, "fi", writes=True),
    Op("reshaped_", _restored, ANY, least=2, most=3, writes=True),
    Op("batch_norm_", _moving, "f", False, least=2, writes=True),
    Op(
        "addmm_",
        lambda d, x: f"{x}.addmm_({x} * 1, {x}.t() @ {x})",
        "f",
        least=2,
        most=2,
        writes=True,
    ),
    Op(
        "foreach_add_", lambda d, x: f"torch._foreach_add_([{x}], {d.number(x)})", "fi", writes=True
    ),
    Op("lerp_", lambda d, x: f"{x}.lerp_({d.twin(x)}, 0.5)", "f", False, writes=True),
    Op("swap_halves", lambda d, x: f"{x}[:1].copy_({x}[-1:])", ANY, least=1, writes=True),
)
