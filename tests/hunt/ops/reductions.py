"""Ops along dims: sums, norms, scans, sorts."""

from __future__ import annotations

from typing import Any

from tests.hunt.draw import Draw, Op

__all__ = ["OPS"]


def _over(how: str, all_dims: bool = True) -> Any:
    """A reduction over all dims, one or some."""

    def text(d: Draw, x: str) -> str:
        kind = d.one(("all", "one", "one", "some") if all_dims else ("one",))
        if not d[x].ndim or kind == "all":
            return f"{how}({x})" if all_dims else f"{how}({x}, 0)"
        over = d.dim(x) if kind == "one" else tuple(d.dims(x))
        return f"{how}({x}, dim={over}{d.keep()})"

    return text


def _along(how: str) -> Any:
    return lambda d, x: f"{how}({x}, {d.dim(x)})"


def _norm(d: Draw, x: str) -> str:
    order = d.one(("1", "2", "3", "inf", "-inf", "0.5", "0"))
    over = d.one(("None", d.dim(x), tuple(d.dims(x))))
    return d.one(
        (
            f"torch.linalg.vector_norm({x}, {order}, {over})",
            f"torch.norm({x}, {d.one((1, 2, 3))}, {d.dim(x)})",
            f"{x}.norm()",
        )
    )


def _spread(d: Draw, x: str) -> str:
    how = d.one(("std", "var", "std_mean", "var_mean"))
    return f"torch.{how}({x}, dim={d.dim(x)}, correction={d.between(0, 1)}{d.keep()})"


def _sort(d: Draw, x: str) -> str:
    dim, down = d.dim(x), d.one((True, False))
    return d.one(
        (
            f"torch.sort({x}, dim={dim}, descending={down}, stable=True)",
            f"torch.argsort({x}, dim={dim}, descending={down}, stable=True)",
            f"torch.sort({x}, dim={dim}, descending={down})[0]",
        )
    )


def _topk(d: Draw, x: str) -> str:
    dim = d.dim(x)
    n = d.shape(x)[dim]
    k = d.between(1, n)
    return d.one(
        (
            f"torch.topk({x}, {k}, {dim}, largest={d.chance(0.5)})",
            f"torch.kthvalue({x}, {k}, {dim}{d.keep()})",
        )
    )


def _quantile(d: Draw, x: str) -> str:
    return f"torch.quantile({x}, {d.one((0.0, 0.25, 0.5, 1.0))}, dim={d.dim(x)})"


def _search(d: Draw, x: str) -> str:
    edges = d.one(("torch.tensor([-2, 0, 1, 3])", "torch.arange(-3, 4)"))
    right = d.one((True, False))
    return d.one(
        (
            f"torch.bucketize({x}, {edges}, right={right})",
            f"torch.searchsorted(torch.sort({edges}.to({x}.dtype))[0], {x}, right={right})",
            f"torch.searchsorted(torch.sort({x}, -1)[0], {x}, right={right})",
        )
    )


def _sum_dtype(d: Draw, x: str) -> str:
    how = d.one(("sum", "cumsum", "prod", "mean"))
    return f"torch.{how}({x}, {d.dim(x)}, dtype=torch.float64)"


OPS = (
    Op("sum", _over("torch.sum"), "ficb", weight=2),
    Op("sum.dtype", _sum_dtype, "fib", False, least=1),
    Op("mean", _over("torch.mean"), "fc", False),
    Op("nansum", _over("torch.nansum"), "f"),
    Op("nanmean", _over("torch.nanmean"), "f", False),
    Op("prod", lambda d, x: f"torch.prod({x}, {d.dim(x)}{d.keep()})", "ficb", least=1),
    Op("amax", _over("torch.amax"), "fi"),
    Op("amin", _over("torch.amin"), "fi"),
    Op("aminmax", lambda d, x: f"torch.aminmax({x}, dim={d.dim(x)}{d.keep()})", "fi", least=1),
    Op("max", lambda d, x: d.one((f"torch.max({x})", f"{x}.min()")), "fib"),
    Op(
        "max.dim",
        lambda d, x: f"torch.{d.one(('max', 'min'))}({x}, {d.dim(x)}{d.keep()})",
        "fi",
        jumps=True,
        least=1,
    ),
    Op("argmax", _over("torch.argmax"), "fi", jumps=True),
    Op("argmin", lambda d, x: f"{x}.argmin({d.dim(x)}{d.keep()})", "fi", jumps=True, least=1),
    Op("all", _over("torch.all"), "fib", jumps=True),
    Op("any", _over("torch.any"), "fib", jumps=True),
    Op(
        "count_nonzero",
        lambda d, x: f"torch.count_nonzero({x}, {d.dim(x)})",
        "ficb",
        jumps=True,
        least=1,
    ),
    Op("spread", _spread, "f", False, least=1),
    Op("logsumexp", _over("torch.logsumexp"), "f", False, least=1),
    Op("norm", _norm, "fc", False, least=1),
    Op("cumsum", _along("torch.cumsum"), "ficb", least=1),
    Op("cumprod", _along("torch.cumprod"), "fi", least=1),
    Op("cummax", _along("torch.cummax"), "fi", jumps=True, least=1),
    Op("cummin", _along("torch.cummin"), "fi", jumps=True, least=1),
    Op("logcumsumexp", _along("torch.logcumsumexp"), "f", False, least=1),
    Op("diff", lambda d, x: f"torch.diff({x}, {d.between(1, 2)}, {d.dim(x)})", "fib", least=1),
    Op("sort", _sort, "fib", jumps=True, least=1),
    Op("sort.values", lambda d, x: f"torch.sort({x}, {d.dim(x)})[0]", "f", least=1),
    Op("topk", _topk, "fi", jumps=True, distinct=True, least=1),
    Op("topk.values", lambda d, x: f"torch.topk({x}, 1, {d.dim(x)})[0]", "f", least=1),
    Op("median", _along("torch.median"), "fi", jumps=True, distinct=True, least=1),
    Op("nanmedian", lambda d, x: f"torch.nanmedian({x})", "f", distinct=True),
    Op("mode", lambda d, x: f"torch.mode({x}, {d.dim(x)})[0]", "fi", jumps=True, least=1),
    Op("quantile", _quantile, "f", False, least=1),
    Op("search", _search, "fi", jumps=True, least=1),
    Op(
        "trapezoid",
        lambda d, x: f"torch.{d.one(('trapezoid', 'cumulative_trapezoid'))}({x}, dim={d.dim(x)})",
        "f",
        False,
        least=1,
    ),
    Op("histc", lambda d, x: f"torch.histc({x}, 4, -4, 4)", "f", jumps=True),
    Op("renorm", lambda d, x: f"torch.renorm({x}, 2, {d.dim(x)}, 3.0)", "f", False, least=2),
    Op("dist", lambda d, x: f"torch.dist({x}, {d.twin(x)}, {d.between(1, 3)})", "f", False),
    Op("gradient", lambda d, x: f"torch.gradient({x}, dim={d.dim(x)})[0]", "f", False, least=1),
    Op("isin", lambda d, x: f"torch.isin({x}, torch.tensor([1, 2, 3]))", "fi", jumps=True),
    Op("unique_consecutive", lambda d, x: f"torch.unique({x})", "ib", data=True),
    Op("equal", lambda d, x: f"{x} * (1 if torch.equal({x}, {d.twin(x)}) else 2)", "i", data=True),
    Op("msort", lambda d, x: f"torch.msort({x})", "fi", least=1),
    Op(
        "corrcoef",
        lambda d, x: f"torch.{d.one(('cov', 'corrcoef'))}({x})",
        "f",
        False,
        least=2,
        most=2,
    ),
)
