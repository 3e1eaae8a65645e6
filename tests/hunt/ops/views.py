"""Ops that only say where elements are: views, flips, joins and parts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from tests.hunt.draw import Draw, Op, Unfit

__all__ = ["OPS", "drawn_slice"]

ANY = "ficb"


def drawn_slice(d: Draw, n: int) -> str:
    """A slice of a dim of this size, sometimes empty."""
    kind = d.one(("all", "from", "to", "both", "both", "step", "ends", "empty"))
    a, b = sorted((d.between(0, n), d.between(0, n)))
    match kind:
        case "all":
            return ":"
        case "from":
            return f"{a}:"
        case "to":
            return f":{b}"
        case "step":
            return f"{a}::{d.between(2, 3)}"
        case "ends":
            return f"-{d.between(1, n + 1)}:{d.one(('', b + 2))}"
        case "empty" if d.chance(0.3):
            return f"{a}:{a}"
    return f"{a}:{b}"


def _index(d: Draw, x: str) -> str:
    """An index without tensors."""
    parts = []
    for n in d.shape(x)[: d.between(0, 5)]:
        if d.chance(0.3) and n:
            parts.append(str(d.between(-n, n - 1)))
        else:
            parts.append(drawn_slice(d, n))
    if d.chance(0.2):
        parts.insert(d.between(0, len(parts)), "None")
    if d.chance(0.15):
        parts.append("...")
    return f"{x}[{', '.join(parts) or '...'}]"


def _sizes(d: Draw, count: int) -> list[int]:
    """A shape of so many elements."""
    if not count:
        return d.one(([0], [0, 3], [2, 0]))
    found = []
    while count > 1 and len(found) < 3:
        n = d.one(k for k in range(1, count + 1) if count % k == 0)
        found.append(n)
        count //= n
    return [*found, count] if count > 1 or not found else found


def _reshape(d: Draw, x: str) -> str:
    shape = _sizes(d, math.prod(d.shape(x)))
    if d.chance(0.4) and 0 not in shape:
        shape[d.between(0, len(shape) - 1)] = -1
    how = d.one(("reshape", "reshape", "view"))
    return f"{x}.{how}({shape})"


def _flatten(d: Draw, x: str) -> str:
    start, end = sorted((d.dim(x) % d[x].ndim, d.dim(x) % d[x].ndim))
    return f"torch.flatten({x}, {start}, {end})"


def _unflatten(d: Draw, x: str) -> str:
    dim = d.dim(x)
    return f"torch.unflatten({x}, {dim}, {tuple(_sizes(d, d.shape(x)[dim]))})"


def _permute(d: Draw, x: str) -> str:
    dims = list(range(d[x].ndim))
    d.random.shuffle(dims)
    return f"{x}.permute({dims})"


def _expand(d: Draw, x: str) -> str:
    shape = [d.between(1, 3) if n == 1 else d.one((n, -1)) for n in d.shape(x)]
    return f"{x}.expand({[2] * d.between(0, 1) + shape})"


def _narrow(d: Draw, x: str) -> str:
    dim = d.dim(x)
    start = d.between(0, d.shape(x)[dim])
    return f"torch.narrow({x}, {dim}, {start}, {d.between(0, d.shape(x)[dim] - start)})"


def _select(d: Draw, x: str) -> str:
    dim = d.dim(x)
    n = d.shape(x)[dim]
    return f"torch.select({x}, {dim}, {d.between(-n, n - 1)})"


def _unfold(d: Draw, x: str) -> str:
    dim = d.dim(x)
    return f"{x}.unfold({dim}, {d.between(1, d.shape(x)[dim])}, {d.between(1, 3)})"


def _diagonal(d: Draw, x: str) -> str:
    a, b = d.random.sample(range(d[x].ndim), 2)
    return f"torch.diagonal({x}, {d.between(-1, 1)}, {a}, {b})"


def _split(d: Draw, x: str) -> str:
    dim = d.dim(x)
    n = d.shape(x)[dim]
    if d.chance(0.5):
        return f"torch.split({x}, {d.between(1, max(1, n))}, {dim})"
    cuts = [0, *sorted(d.between(0, n) for _ in range(d.between(0, 2))), n]
    return f"torch.split({x}, {[b - a for a, b in itertools.pairwise(cuts)]}, {dim})"


def _chunk(d: Draw, x: str) -> str:
    how = d.one(("chunk", "tensor_split"))
    return f"torch.{how}({x}, {d.between(1, 4)}, {d.dim(x)})"


def _part(d: Draw, x: str) -> str:
    """One of several outputs; nobody reads the others."""
    dim = d.dim(x)
    n = d.shape(x)[dim]
    at = d.between(-n, n - 1)
    return d.one(
        (
            f"{x}.unbind({dim})[{at}]",
            f"torch.split({x}, 1, {dim})[{at}]",
            f"torch.chunk({x}, 2, {dim})[-1]",
            f"[r * 2 for r in {x}][-1]",
            f"torch.max({x}, {dim})[{d.between(0, 1)}]",
        )
    )


def _joined(d: Draw, x: str, dim: int | None = None) -> list[str]:
    shape = d.shape(x)

    def fits(s: Sequence[int]) -> bool:
        return len(s) == len(shape) and all(
            a == b or i == dim for i, (a, b) in enumerate(zip(s, shape))
        )

    found = [x]
    for _ in range(d.between(0, 2)):
        if d.chance(0.5):
            found.append(d.pick(lambda t: fits(tuple(t.shape))))
        else:
            other = [d.between(0, 4) if i == dim else n for i, n in enumerate(shape)]
            found.append(d.fresh(other, d.other(x)))
    d.random.shuffle(found)
    return found


def _cat(d: Draw, x: str) -> str:
    dim = d.dim(x)
    return f"torch.cat([{', '.join(_joined(d, x, dim % d[x].ndim))}], {dim})"


def _stack(d: Draw, x: str) -> str:
    ndim = d[x].ndim
    how = d.one(("stack", "stack", "hstack", "vstack", "dstack", "column_stack"))
    dim = f", {d.between(-ndim - 1, ndim)}" if how == "stack" else ""
    return f"torch.{how}([{', '.join(_joined(d, x))}]{dim})"


def _pad(d: Draw, x: str) -> str:
    mode = d.one(("constant", "constant", "reflect", "replicate", "circular"))
    ndim = d[x].ndim
    deep = d.between(1, min(3, ndim)) if mode == "constant" else ndim - d.between(1, 2)
    low = -1 if mode == "constant" else 0
    if deep < 1:
        raise Unfit
    return f"F.pad({x}, {[d.between(low, 2) for _ in range(2 * deep)]}, {mode!r})"


def _roll(d: Draw, x: str) -> str:
    if d.chance(0.2):
        return f"torch.roll({x}, {d.between(-7, 7)})"
    dims = d.dims(x)
    return f"torch.roll({x}, {[d.between(-5, 5) for _ in dims]}, {dims})"


def _repeat(d: Draw, x: str) -> str:
    counts = [d.one((1, 2, 3)) for _ in range(d[x].ndim + d.between(0, 1))]
    return f"{x}.{d.one(('repeat', 'tile'))}({counts})"


def _interleaved(d: Draw, x: str) -> str:
    dim = d.dim(x)
    return f"torch.repeat_interleave({x}, {d.between(1, 3)}, {dim})"


def _counted(d: Draw, x: str) -> str:
    dim = d.dim(x)
    counts = [d.between(0, 2) for _ in range(d.shape(x)[dim])]
    return f"torch.repeat_interleave({x}, torch.tensor({counts}), {dim})"


def _meshgrid(d: Draw, x: str) -> str:
    y = d.pick(lambda t: t.ndim == 1 and t.dtype == d[x].dtype)
    return f"torch.meshgrid({x}, {y}, indexing={d.one(('ij', 'xy'))!r})"


def _rot90(d: Draw, x: str) -> str:
    return f"torch.rot90({x}, {d.between(-1, 3)}, {d.random.sample(range(d[x].ndim), 2)})"


def _shuffle(d: Draw, x: str) -> str:
    return d.one(
        (
            f"F.pixel_unshuffle({x}, 2)",
            f"F.pixel_shuffle({x}, 2)",
            f"F.channel_shuffle({x}, 2)",
        )
    )


def _formatted(d: Draw, x: str) -> str:
    how = d.one(("torch.channels_last", "torch.contiguous_format"))
    return d.one((f"{x}.contiguous()", f"{x}.contiguous(memory_format={how})", f"{x}.clone()"))


def _as_strided(d: Draw, x: str) -> str:
    whole = d[x].untyped_storage().nbytes() == d[x].numel() * d[x].itemsize
    if not d[x].is_contiguous() or not whole:  # what lies beside a view is not ours to read
        raise Unfit
    count = d[x].numel()
    a, b = d.between(1, 3), d.between(1, 3)
    if (a - 1) * b + b > count:
        raise Unfit
    return f"torch.as_strided({x}, ({a}, {b}), ({b}, 1))"


OPS = (
    Op("getitem", _index, ANY, least=1, weight=2),
    Op("reshape", _reshape, ANY),
    Op("flatten", _flatten, ANY, least=1),
    Op("ravel", lambda d, x: f"torch.ravel({x})", ANY),
    Op("unflatten", _unflatten, ANY, least=1),
    Op(
        "t",
        lambda d, x: f"{x}.{d.one(('t()', 'T', 'mT', 'transpose(0, 1)', 'adjoint()'))}",
        ANY,
        least=2,
        most=2,
    ),
    Op("transpose", lambda d, x: f"torch.transpose({x}, {d.dim(x)}, {d.dim(x)})", ANY, least=1),
    Op("movedim", lambda d, x: f"torch.movedim({x}, {d.dim(x)}, {d.dim(x)})", ANY, least=1),
    Op("permute", _permute, ANY),
    Op(
        "squeeze",
        lambda d, x: d.one((f"torch.squeeze({x})", f"{x}.squeeze({d.dim(x)})")),
        ANY,
        least=1,
    ),
    Op("unsqueeze", lambda d, x: f"{x}.unsqueeze({d.between(-d[x].ndim - 1, d[x].ndim)})", ANY),
    Op("expand", _expand, ANY),
    Op("broadcast_to", lambda d, x: f"torch.broadcast_to({x}, {(2, *d.shape(x))})", ANY),
    Op("narrow", _narrow, ANY, least=1),
    Op("select", _select, ANY, least=1),
    Op("unfold", _unfold, ANY, least=1),
    Op("diagonal", _diagonal, ANY, least=2),
    Op("split", _split, ANY, least=1),
    Op("chunk", _chunk, ANY, least=1),
    Op("unbind", lambda d, x: f"torch.unbind({x}, {d.dim(x)})", ANY, least=1),
    Op("part", _part, "fi", least=1, jumps=True),
    Op("cat", _cat, ANY, least=1, weight=2),
    Op("stack", _stack, ANY),
    Op("pad", _pad, "fi", least=1),
    Op("flip", lambda d, x: f"torch.flip({x}, {d.dims(x)})", ANY),
    Op("roll", _roll, ANY, least=1),
    Op("rot90", _rot90, ANY, least=2),
    Op("repeat", _repeat, ANY),
    Op("repeat_interleave", _interleaved, ANY, least=1),
    Op("repeat_counted", _counted, ANY, least=1, data=True),
    Op(
        "tril",
        lambda d, x: f"torch.{d.one(('tril', 'triu'))}({x}, {d.between(-2, 2)})",
        ANY,
        least=2,
    ),
    Op("diag", lambda d, x: f"torch.diag({x}, {d.between(-1, 2)})", ANY, least=1, most=2),
    Op("diag_embed", lambda d, x: f"torch.diag_embed({x}, {d.between(-1, 1)})", ANY, least=1),
    Op("block_diag", lambda d, x: f"torch.block_diag({x}, {x})", ANY, most=2),
    Op("meshgrid", _meshgrid, ANY, least=1, most=1),
    Op("shuffle", _shuffle, "fi", least=3, most=4),
    Op("formatted", _formatted, ANY),
    Op("atleast", lambda d, x: f"torch.atleast_{d.between(1, 3)}d({x})", ANY),
    Op("detach", lambda d, x: f"{x}.detach()", "fc"),
    Op("as_strided", _as_strided, "fi", least=1),
    Op("fftshift", lambda d, x: f"torch.fft.{d.one(('fftshift', 'ifftshift'))}({x})", "fic"),
    Op("fliplr", lambda d, x: f"torch.{d.one(('fliplr', 'flipud'))}({x})", ANY, least=2),
    Op(
        "view_as_complex",
        lambda d, x: (
            f"torch.view_as_complex({x}[..., None].expand({(*d.shape(x), 2)}).contiguous())"
        ),
        "f",
    ),
    Op("cartesian_prod", lambda d, x: f"torch.cartesian_prod({x}, {x})", ANY, least=1, most=1),
    Op("combinations", lambda d, x: f"torch.combinations({x})", ANY, least=1, most=1),
)
