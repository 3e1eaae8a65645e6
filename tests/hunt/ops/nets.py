"""Normalizations, losses and attention."""

from __future__ import annotations

from tests.hunt.draw import Draw, Op, Unfit

__all__ = ["OPS"]


def _reduction(d: Draw) -> str:
    return d.one(("", ", reduction='sum'", ", reduction='none'"))


def _classes(d: Draw, x: str) -> tuple[list[int], int]:
    shape = list(d.shape(x))
    at = 1 if len(shape) > 1 else 0
    return [n for i, n in enumerate(shape) if i != at], shape[at]


def _cross_entropy(d: Draw, x: str) -> str:
    shape, count = _classes(d, x)
    if not count:
        raise Unfit
    target = f"{d.indices(shape, count)}.long()"
    extra = d.one(("", "", f", ignore_index={d.between(0, count - 1)}", ", label_smoothing=0.1"))
    weight = d.one(("", "", f", weight={d.fresh([count], d[x].dtype, 'positive')}"))
    if d.chance(0.3):
        return f"F.nll_loss(F.log_softmax({x}, 1), {target}{weight}{_reduction(d)})"
    if d.chance(0.2):
        return f"F.cross_entropy({x}, {d.fresh(d.shape(x), d[x].dtype, 'unit')}{_reduction(d)})"
    return f"F.cross_entropy({x}, {target}{weight}{extra}{_reduction(d)})"


def _loss(d: Draw, x: str) -> str:
    y, how = d.twin(x), _reduction(d)
    unit = d.fresh(d.shape(x), d[x].dtype, "unit")
    signs = f"({d.twin(x)} > 0) * 2 - 1"
    return d.one(
        (
            f"F.mse_loss({x}, {y}{how})",
            f"F.l1_loss({x}, {y}{how})",
            f"F.smooth_l1_loss({x}, {y}{how})",
            f"F.huber_loss({x}, {y}{how})",
            f"F.binary_cross_entropy(torch.sigmoid({x}), {unit}{how})",
            f"F.binary_cross_entropy_with_logits({x}, {unit}{how})",
            f"F.kl_div({x}, {unit}{how})",
            f"F.soft_margin_loss({x}, {y}{how})",
            f"F.margin_ranking_loss({x}, {y}, {unit}{how})",
            f"F.hinge_embedding_loss({x}, {signs}{how})",
            f"F.poisson_nll_loss({x}, {unit}{how})",
            f"F.gaussian_nll_loss({x}, {y}, {unit}{how})",
        )
    )


def _rows_loss(d: Draw, x: str) -> str:
    n, c = d.shape(x)
    if not c or not n:
        raise Unfit
    y, how = d.twin(x), _reduction(d)
    return d.one(
        (
            f"F.triplet_margin_loss({x}, {y}, {d.fresh(d.shape(x), d[x].dtype)}{how})",
            f"F.multi_margin_loss({x}, {d.indices([n], c)}.long(){how})",
            f"F.cosine_embedding_loss({x}, {y}, torch.ones({n}){how})",
            f"F.multilabel_soft_margin_loss({x}, {d.fresh([n, c], d[x].dtype, 'unit')}{how})",
        )
    )


def _softmax(d: Draw, x: str) -> str:
    return f"{d.one(('torch.softmax', 'F.log_softmax', 'F.softmin'))}({x}, {d.dim(x)})"


def _layer_norm(d: Draw, x: str) -> str:
    last = list(d.shape(x)[-d.between(1, min(2, d[x].ndim)) :])
    weight = d.one(("None", d.fresh(last, d[x].dtype)))
    if d.chance(0.3):
        return f"F.rms_norm({x}, {last}, {weight}, 0.1)"
    bias = d.one(("None", d.fresh(last, d[x].dtype)))
    return f"F.layer_norm({x}, {last}, {weight}, {bias}, 0.1)"


def _channel_norm(d: Draw, x: str) -> str:
    _n, c = d.shape(x)[:2]
    groups = d.one(g for g in (1, 2, 3) if c and c % g == 0)
    weight = d.one(("None", d.fresh([c], d[x].dtype)))
    mean, var = d.fresh([c], d[x].dtype), d.fresh([c], d[x].dtype, "positive")
    return d.one(
        (
            f"F.group_norm({x}, {groups}, {weight}, eps=0.1)",
            f"F.instance_norm({x}, eps=0.1)",
            f"F.batch_norm({x}, {mean}, {var}, {weight}, eps=0.1)",
            f"F.batch_norm({x}, None, None, {weight}, training=True, eps=0.1)",
            f"F.local_response_norm({x}, 2)",
        )
    )


def _normalize(d: Draw, x: str) -> str:
    return f"F.normalize({x}, dim={d.dim(x)}, eps=0.5)"


def _attention(d: Draw, x: str) -> str:
    *batch, length, width = d.shape(x)
    keys = d.between(1, 4)
    k = d.fresh([*batch, keys, width], d[x].dtype)
    v = d.fresh([*batch, keys, d.between(1, 3)], d[x].dtype)
    mask = d.one(("", ", is_causal=True", f", attn_mask={d.fresh([length, keys], d[x].dtype)}"))
    return f"F.scaled_dot_product_attention({x}, {k}, {v}{mask})"


def _heads(d: Draw, x: str) -> str:
    length, width = d.shape(x)
    w = d.fresh([3 * width, width], d[x].dtype)
    if not width or width % 2:
        raise Unfit
    split = f"F.linear({x}, {w}).reshape({length}, 3, 2, {width // 2}).permute(1, 2, 0, 3)"
    return f"F.scaled_dot_product_attention(*{split}.unbind(0)).transpose(0, 1).flatten(1)"


def _grid(d: Draw, x: str) -> str:
    grid = d.fresh([d.shape(x)[0], d.between(1, 3), d.between(1, 3), 2], d[x].dtype, "unit")
    return f"F.grid_sample({x}, {grid}, align_corners={d.chance(0.5)})"


def _rotary(d: Draw, x: str) -> str:
    a, b = f"{x}.chunk(2, -1)[0]", f"{x}.chunk(2, -1)[1]"
    if d.shape(x)[-1] % 2 or not d.shape(x)[-1]:
        raise Unfit
    return f"torch.cat((-{b}, {a}), -1) * {x}.cos() + {x} * {x}.sin()"


OPS = (
    Op("cross_entropy", _cross_entropy, "f", False, least=2, most=4, weight=2),
    Op("loss", _loss, "f", False, weight=2),
    Op("loss.rows", _rows_loss, "f", False, least=2, most=2),
    Op("softmax", _softmax, "f", False, least=1, weight=2),
    Op("layer_norm", _layer_norm, "f", False, least=1, weight=2),
    Op("channel_norm", _channel_norm, "f", False, least=2, weight=2),
    Op("normalize", _normalize, "f", False, least=1),
    Op("attention", _attention, "f", False, least=3, most=4, weight=2),
    Op("heads", _heads, "f", False, least=2, most=2),
    Op("grid_sample", _grid, "f", False, least=4, most=4),
    Op("rotary", _rotary, "f", False, least=2),
    Op("dropout.off", lambda d, x: f"F.dropout({x}, 0.5, training=False)", "f"),
    Op("dropout.all", lambda d, x: f"F.dropout({x}, 0.0)", "f"),
)
