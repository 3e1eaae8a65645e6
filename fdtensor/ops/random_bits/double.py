"""`erfinv` and `log` for float64, by sums, products, quotients and roots: the same on any machine.

Giles 2012, "Approximating the erfinv function", in double precision, as XLA has it; the logarithm
is that of Sun's fdlibm.
"""

from __future__ import annotations

import torch

from fdtensor.ops.random_bits.keys import recorded
from fdtensor.ops.random_bits.opaque import opaque

__all__ = ["erfinv", "log"]


@opaque("erfinv", 1)
def erfinv(u: torch.Tensor) -> torch.Tensor:
    """The inverse of the error function, for float64 in (-1, 1)."""
    w = -_log(1 - u * u)
    if recorded(u) or u.device.type != "cpu":
        root = w.sqrt()
        far = torch.where(w < 16, _horner(_MIDDLE, root - 3.25), _horner(_TAIL, root - 5))
        return torch.where(w < 6.25, _horner(_CENTER, w - 3.125), far) * u
    factor = _horner(_CENTER, w - 3.125)  # for nearly all
    for above, below, center, coefficients in ((6.25, 16, 3.25, _MIDDLE), (16, 64, 5, _TAIL)):
        at = ((w >= above) & (w < below)).nonzero(as_tuple=True)
        if at[0].numel():
            factor[at] = _horner(coefficients, w[at].sqrt() - center)
    return factor.mul_(u)


@opaque("log", 1)
def log(y: torch.Tensor) -> torch.Tensor:
    """The natural logarithm of positive float64, none of them subnormal."""
    return _log(y)


def _log(y: torch.Tensor) -> torch.Tensor:
    bits = y.view(torch.int64)
    exponent = (bits - _ROOT_OF_HALF) >> 52
    f = (bits - (exponent << 52)).view(torch.float64) - 1  # in [sqrt(1/2), sqrt(2)), less 1
    s = f / (f + 2)
    square = s * s
    half = f * f * 0.5
    series = _horner(_LOG, square) * square
    k = exponent.to(torch.float64)
    return k * _LOG_2_HIGH - ((half - (s * (half + series) + k * _LOG_2_LOW)) - f)


def _horner(coefficients: tuple[float, ...], x: torch.Tensor) -> torch.Tensor:
    total = x * coefficients[0] + coefficients[1]
    for coefficient in coefficients[2:]:
        total = total * x + coefficient if recorded(x) else total.mul_(x).add_(coefficient)
    return total


_ROOT_OF_HALF = 0x3FE6A09E667F3BCD
"""The bits of sqrt(1/2)."""

_LOG_2_HIGH = 6.93147180369123816490e-01
"""The first 32 bits of log(2): its product with an exponent is exact."""

_LOG_2_LOW = 1.90821492927058770002e-10

_LOG = (
    1.479819860511658591e-01, 1.531383769920937332e-01, 1.818357216161805012e-01,
    2.222219843214978396e-01, 2.857142874366239149e-01, 3.999999999940941908e-01,
    6.666666666666735130e-01,
)  # fmt: skip

_CENTER = (
    -3.64441206401782e-21, -1.6850591381820166e-19, 1.28584807152564e-18, 1.1157877678025181e-17,
    -1.3331716628546209e-16, 2.0972767875968562e-17, 6.6376381343583238e-15,
    -4.0545662729752069e-14, -8.1519341976054722e-14, 2.6335093153082323e-12,
    -1.2975133253453532e-11, -5.4154120542946279e-11, 1.0512122733215323e-09,
    -4.1126339803469837e-09, -2.9070369957882005e-08, 4.2347877827932404e-07,
    -1.3654692000834679e-06, -1.3882523362786469e-05, 0.00018673420803405714,
    -0.000740702534166267, -0.0060336708714301491, 0.24015818242558962, 1.6536545626831027,
)  # fmt: skip
_MIDDLE = (
    2.2137376921775787e-09, 9.0756561938885391e-08, -2.7517406297064545e-07,
    1.8239629214389228e-08, 1.5027403968909828e-06, -4.013867526981546e-06, 2.9234449089955446e-06,
    1.2475304481671779e-05, -4.7318229009055734e-05, 6.8284851459573175e-05,
    2.4031110387097894e-05, -0.00035503752036284748, 0.0009532893797373805, -0.0016882755560235047,
    0.0024914420961078508, -0.0037512085075692412, 0.0053709145535900636, 1.0052589676941592,
    3.0838856104922208,
)  # fmt: skip
_TAIL = (
    -2.7109920616438573e-11, -2.5556418169965252e-10, 1.5076572693500548e-09,
    -3.789465440126737e-09, 7.61570120807834e-09, -1.496002662714924e-08, 2.9147953450901081e-08,
    -6.7711997758452339e-08, 2.2900482228026655e-07, -9.9298272942317e-07, 4.5260625972231537e-06,
    -1.9681778105531671e-05, 7.5995277030017761e-05, -0.00021503011930044477,
    -0.00013871931833623122, 1.0103004648645344, 4.8499064014085844,
)  # fmt: skip
