"""Ops that look at one element of each operand."""

from __future__ import annotations

from typing import Any

from tests.hunt.draw import Draw, Op
from tests.hunt.values import kind_of

__all__ = ["OPS"]


def _unary(names: str, **facts: Any) -> list[Op]:
    return [Op(n, lambda d, x, n=n: f"torch.{n}({x})", **facts) for n in names.split()]


def _activations(names: str, **facts: Any) -> list[Op]:
    return [Op(n, lambda d, x, n=n: f"F.{n}({x})", "f", **facts) for n in names.split()]


def _binary(names: str, numbers: float = 0.3, **facts: Any) -> list[Op]:
    def text(d: Draw, x: str, n: str) -> str:
        return f"torch.{n}({x}, {d.partner(x, numbers)})"

    return [Op(n, lambda d, x, n=n: text(d, x, n), **facts) for n in names.split()]


def _operator(sign: str) -> Any:
    def text(d: Draw, x: str) -> str:
        y = d.partner(x)
        return f"{x} {sign} {y}" if d.chance(0.7) else f"{y} {sign} {x}"

    return text


def _where(d: Draw, x: str) -> str:
    return f"torch.where({d.mask(x)}, {x}, {d.partner(x)})"


def _clamp(d: Draw, x: str) -> str:
    low, high = d.one(("-1", "0", "None")), d.one(("2", "1", "3"))
    if d.chance(0.3):
        low = d.twin(x)
    return f"torch.clamp({x}, {low}, {high})"


def _divisor(d: Draw, x: str) -> str:
    """What is nowhere near zero."""
    if d.chance(0.5):
        return d.one(("2", "3", "4"))
    return d.fresh(d.thinner(d.shape(x)), d[x].dtype, "positive")


_SAME_SIZE = {
    "f": ("torch.int64", "torch.int32", "torch.int16"),
    "i": ("torch.float64", "torch.uint8"),
}


def _cast(d: Draw, x: str) -> str:
    method = d.one(["double", "float", "half", "bfloat16", "long", "int", "short", "char", "bool"])
    dtype = d.one(
        [
            "float64",
            "float32",
            "float16",
            "bfloat16",
            "int64",
            "int32",
            "complex128",
            "complex64",
            "bool",
        ]
    )
    return d.one((f"{x}.{method}()", f"{x}.to(torch.{dtype})"))


def _finer(d: Draw, x: str) -> str:
    """Casts that round nothing away."""
    return f"{x}.to(torch.{'complex128' if d[x].is_complex() else 'float64'})"


def _factory(d: Draw, x: str) -> str:
    shape = list(d.shape(x))
    n = d.between(0, 5)
    return d.one(
        (
            f"torch.zeros_like({x})",
            f"torch.ones_like({x})",
            f"torch.full_like({x}, {d.number(x)})",
            f"{x}.new_zeros({shape})",
            f"{x}.new_full({shape}, {d.number(x)})",
            f"{x} * torch.ones({shape})",
            f"{x}[..., None] + torch.arange({n})",
            f"{x}[..., None] * torch.linspace(0, 4, {n})",
            f"{x}[..., None] - torch.tensor([1, 2, 3])",
            f"{x}.new_tensor([1, 0, 2]) + {x}[..., None]",
        )
    )


OPS = (
    *_unary("neg clone positive", kinds="fic"),
    *_unary("abs square conj_physical", kinds="fi"),
    *_unary("resolve_conj conj real view_as_real angle", kinds="c"),
    *_unary("imag", kinds="c"),
    *_unary("sign sgn floor ceil trunc round isnan isfinite isinf signbit", kinds="f", jumps=True),
    *_unary("logical_not", kinds="fib", jumps=True),
    *_unary("bitwise_not", kinds="ib"),
    *_unary("relu", kinds="fi"),
    *_unary("nan_to_num", kinds="f"),
    *_unary("exp sin cos tanh sigmoid sinh atan asinh", kinds="fc", exact=False),
    *_unary("erf erfc expm1 exp2 sinc i0 deg2rad frac logit", kinds="f", exact=False),
    *_unary("tanh exp sigmoid erf", kinds="ib", exact=False),
    *_unary("reciprocal log log1p sqrt rsqrt lgamma digamma", kinds="f", exact=False),
    *_activations("relu6 hardtanh leaky_relu", exact=True),
    *_activations("gelu silu softplus elu selu celu mish hardswish hardsigmoid", exact=False),
    *_activations("softsign logsigmoid tanhshrink softshrink hardshrink", exact=False),
    Op("glu", lambda d, x: f"F.glu({x}, {d.dim(x)})", "f", False, least=1),
    Op("prelu", lambda d, x: f"F.prelu({x}, {d.fresh([1])})", "f", least=2),
    Op("threshold", lambda d, x: f"F.threshold({x}, 0.5, -1.0)", "f"),
    *_binary("add sub mul", kinds="fic"),
    *_binary("maximum minimum", 0.0, kinds="fi"),
    *_binary("fmax fmin", 0.0, kinds="f"),
    *_binary("eq ne lt le gt ge", kinds="fi", jumps=True),
    *_binary("eq ne", kinds="cb", jumps=True),
    *_binary("logical_and logical_or logical_xor", 0.0, kinds="fib", jumps=True),
    *_binary("bitwise_and bitwise_or bitwise_xor", kinds="ib"),
    *_binary("bitwise_left_shift bitwise_right_shift gcd lcm", 0.0, kinds="i"),
    *_binary("atan2 hypot logaddexp xlogy", 0.0, kinds="f", exact=False),
    *_binary("heaviside copysign nextafter", 0.0, kinds="f", jumps=True),
    *[Op(f"operator{s}", _operator(s), k) for s, k in zip("+-*", ("fic", "fic", "fic"))],
    *[Op(f"operator{s}", _operator(s), "ib") for s in "&|^"],
    *[Op(f"operator{s}", _operator(s), "fi", jumps=True) for s in ("<", ">=", "==", "!=")],
    Op("div", lambda d, x: f"torch.div({x}, {_divisor(d, x)})", "fic", False),
    Op("floor_divide", lambda d, x: f"{x} // {_divisor(d, x)}", "fi", jumps=True),
    Op("remainder", lambda d, x: f"{x} % {_divisor(d, x)}", "fi", jumps=True),
    Op("fmod", lambda d, x: f"torch.fmod({x}, {_divisor(d, x)})", "fi", jumps=True),
    Op(
        "div.rounded",
        lambda d, x: (
            f"torch.div({x}, {_divisor(d, x)}, rounding_mode={d.one(('floor', 'trunc'))!r})"
        ),
        "fi",
        jumps=True,
    ),
    Op("rsub", lambda d, x: f"torch.rsub({x}, {d.partner(x)})", "fic"),
    Op(
        "add.alpha", lambda d, x: f"torch.add({x}, {d.partner(x)}, alpha={d.between(-2, 3)})", "fic"
    ),
    Op("pow", lambda d, x: f"{x} ** {d.between(0, 3)}", "fic"),
    Op("pow.tensor", lambda d, x: f"{d.between(1, 3)} ** torch.clamp({x}, -2, 3)", "f", False),
    Op("where", _where, "ficb"),
    Op(
        "where.compared",
        lambda d, x: f"torch.where({x} > 0, {x}, {d.partner(x)})",
        "fi",
        jumps=True,
    ),
    Op("masked_fill", lambda d, x: f"{x}.masked_fill({d.mask(x)}, {d.number(x)})", "ficb"),
    Op("clamp", _clamp, "fi"),
    Op(
        "lerp",
        lambda d, x: f"torch.lerp({x}, {d.twin(x)}, {d.one(('0.5', d.twin(x)))})",
        "f",
        False,
    ),
    Op(
        "addcmul", lambda d, x: f"torch.addcmul({x}, {d.partner(x, 0)}, {d.partner(x, 0)}, value=2)"
    ),
    Op(
        "addcdiv",
        lambda d, x: f"torch.addcdiv({x}, {d.partner(x, 0)}, {d.twin(x, None, 'positive')})",
        "f",
        False,
    ),
    Op("isclose", lambda d, x: f"torch.isclose({x}, {d.twin(x)})", "fi", jumps=True),
    Op("polar", lambda d, x: f"torch.polar({x}, {d.twin(x)})", "f", False),
    Op("complex", lambda d, x: f"torch.complex({x}, {d.twin(x)})", "f"),
    Op("cast", _cast, "ficb", jumps=True),
    Op("cast.finer", _finer, "fc"),
    Op("type_as", lambda d, x: f"{x}.type_as({d.pick(lambda t: True)})", "fib", jumps=True),
    Op(
        "view_dtype",
        lambda d, x: f"{x}.view({d.one(_SAME_SIZE[kind_of(d[x].dtype)])})",
        "fi",
        jumps=True,
    ),
    Op("factory", _factory, "fi"),
    Op("foreach_add", lambda d, x: f"torch._foreach_add([{x}, {d.twin(x)}], {d.number(x)})", "fi"),
    Op(
        "foreach_mul",
        lambda d, x: f"torch._foreach_mul([{x}, {d.twin(x)}], [{d.twin(x)}, {x}])",
        "fi",
    ),
    Op("multigammaln", lambda d, x: f"torch.mvlgamma({x}.abs() + 4, 2)", "f", False),
    Op("polygamma", lambda d, x: f"torch.polygamma(1, {x}.abs() + 1)", "f", False),
    Op(
        "ldexp",
        lambda d, x: f"torch.ldexp({x}, {d.fresh(d.thinner(d.shape(x)), None, 'small')})",
        "f",
    ),
    Op("frexp", lambda d, x: f"torch.frexp({x})", "f", jumps=True),
)
