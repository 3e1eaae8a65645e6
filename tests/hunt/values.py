"""What the inputs of a program hold, and the memory formats of their blocks."""

from __future__ import annotations

import math

import torch

from tests.hunt.records import Input

__all__ = ["FILLS", "filled", "forms_of", "kind_of", "stored"]

FILLS = ("small", "distinct", "unit", "positive", "real", "special", "wide")
"""Small integers; those that differ; dyadic fractions in (0, 1); 1 to 6; normal numbers; small ones
with nan and infinities; the whole range of an integer dtype. And `index:n`, integers below n."""


def kind_of(dtype: torch.dtype) -> str:
    """`f`, `c`, `i` or `b`: floats, complex numbers, integers, bools."""
    if dtype is torch.bool:
        return "b"
    if dtype.is_floating_point:
        return "f"
    return "c" if dtype.is_complex else "i"


def filled(given: Input) -> torch.Tensor:
    """The full tensor of an input, contiguous."""
    generator = torch.Generator().manual_seed(given.seed)
    if given.dtype.is_complex:
        made = torch.complex(*(_real(given, generator) for _ in range(2)))
    else:
        made = _real(given, generator)
    if given.form.startswith("expanded:") and made.numel():
        dim = int(given.form.partition(":")[2])
        made = made.narrow(dim, 0, 1).expand(given.shape).clone()
    return made.to(given.dtype)


def _real(given: Input, generator: torch.Generator) -> torch.Tensor:
    shape, kind = given.shape, kind_of(given.dtype)
    count = math.prod(shape)

    def integers(low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    if kind == "b":
        return integers(0, 2)
    low = 0 if given.dtype is torch.uint8 else -4
    fill, _, below = given.fill.partition(":")
    match fill:
        case "index":
            return integers(0, max(1, int(below)))
        case "distinct":
            half = 0 if given.dtype is torch.uint8 else count // 2
            return _double(torch.randperm(count, generator=generator).reshape(shape) - half, kind)
        case "positive":
            return _double(integers(1, 7), kind)
        case "unit" if kind in "fc":
            return integers(1, 32).double() / 32
        case "real" if kind in "fc":
            return torch.randn(shape, generator=generator, dtype=torch.float64)
        case "special" if kind in "fc":
            made, odd = integers(-4, 5).double(), integers(0, 12)
            for place, value in enumerate((float("nan"), float("inf"), -float("inf"))):
                made = torch.where(odd == place, value, made)
            return made
        case "wide" if kind == "i":
            limits = torch.iinfo(given.dtype)
            return integers(max(limits.min, -(2**62)), min(limits.max, 2**62))
    return _double(integers(low, 5), kind)


def _double(tensor: torch.Tensor, kind: str) -> torch.Tensor:
    return tensor.double() if kind in "fc" else tensor


def forms_of(shape: tuple[int, ...], dtype: torch.dtype, pending: bool) -> list[str]:
    """The memory formats that a tensor may be stored in."""
    found = ["contiguous", "offset"]
    if len(shape) in (4, 5):
        found += ["channels_last"] * 2
    if len(shape) > 1:
        found += ["reversed", "rotated"]
    if shape:
        found += ["stepped", "padded"]
        if not pending:
            found += [f"expanded:{d}" for d in range(len(shape))]
    if dtype.is_complex:
        found.append("conjugated")
    if kind_of(dtype) in "fc":
        found.append("negated")
    return found


def stored(tensor: torch.Tensor, form: str) -> torch.Tensor:
    """The same values in a memory format of their own."""
    kind, _, at = form.partition(":")
    ndim = tensor.ndim
    match kind:
        case "channels_last":
            formats = {4: torch.channels_last, 5: torch.channels_last_3d}
            return tensor.clone(memory_format=formats[ndim])
        case "reversed":
            dims = list(reversed(range(ndim)))
            return tensor.permute(dims).contiguous().permute(dims)
        case "rotated":
            return tensor.movedim(0, -1).contiguous().movedim(-1, 0)
        case "stepped":
            wide = tensor.new_zeros([2 * n for n in tensor.shape])
            part = wide[tuple(slice(None, None, 2) for _ in tensor.shape)]
            return part.copy_(tensor)
        case "padded":
            wide = tensor.new_zeros([n + 1 for n in tensor.shape])
            return wide[tuple(slice(1, None) for _ in tensor.shape)].copy_(tensor)
        case "offset":
            flat = torch.cat([tensor.new_zeros(3), tensor.reshape(-1)])
            return flat[3:].view(tensor.shape)
        case "expanded" if tensor.numel():
            return tensor.narrow(int(at), 0, 1).contiguous().expand(tensor.shape)
        case "conjugated":
            return tensor.conj().resolve_conj().clone().conj()
        case "negated" if tensor.numel():
            return getattr(torch, "_neg_view")(-tensor)  # noqa: B009
    return tensor.clone(memory_format=torch.contiguous_format)
