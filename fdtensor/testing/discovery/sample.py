"""`Sample`: a call of an op, other values for it, and what ranks hold of them."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch

from fdtensor.layouts.blocks import chunk
from fdtensor.layouts.errors import RuleError
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import Partial, Placement, Shard
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.layouts.torch_private import version_of
from fdtensor.ops.graph import Call, Full, substituted, tensors_of
from fdtensor.testing.row_checks import call_of
from fdtensor.testing.values import scatter

__all__ = ["Place", "Sample", "Setting", "close", "cut", "run"]

Place = int | str
"""An argument of a call: its number, or its name where it is given by name."""


@attrs.frozen(eq=False)
class Sample:
    """A call of an op, the tensors that it takes and those that it returns."""

    call: Call
    tensors: tuple[torch.Tensor, ...]
    outs: tuple[torch.Tensor, ...]
    held: dict[Any, list[torch.Tensor]] = attrs.field(factory=dict, init=False)
    """The blocks of an operand, by its number, placement and setting."""
    due: dict[Any, dict[Placement, list[torch.Tensor]]] = attrs.field(factory=dict, init=False)
    """The blocks of an output for each placement, by its number, the size cut and setting."""

    @property
    def ins(self) -> tuple[Full, ...]:
        """The operands but for their values."""
        return tuple(Full(tuple(t.shape), t.dtype) for t in self.tensors)

    @property
    def results(self) -> tuple[Full, ...]:
        """The results but for their values."""
        return tuple(Full(tuple(t.shape), t.dtype) for t in self.outs)

    @staticmethod
    def of(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sample:
        """The sample of these arguments; raises `RuleError` where rows would mean nothing."""
        tensors_given = tensors_of((*args, *kwargs.values()))
        before = [version_of(t) for t in tensors_given]
        call, tensors, outs = call_of(op, args, kwargs)
        again = run(call, tensors)
        if [version_of(t) for t in tensors_given] != before:
            raise RuleError(f"{op} writes to its arguments.", hint="Discover an op that does not.")
        if not all(map(close, again, outs)):
            raise RuleError(
                f"{op} gives other values when it runs again.",
                hint="Only a pure function has rows: pass random numbers in.",
            )
        return Sample(call, tuple(t.detach() for t in tensors), tuple(t.detach() for t in outs))

    def sizes(self) -> list[tuple[Place, int]]:
        """The arguments that are the shape of an output, each with the number of the output."""
        shapes = [tuple(t.shape) for t in self.outs]
        arguments = [*enumerate(self.call.args), *self.call.kwargs]
        return [
            (place, shapes.index(value))
            for place, value in arguments
            if isinstance(value, tuple)
            and value
            and all(type(n) is int for n in value)
            and value in shapes
        ]

    def redrawn(self, seed: int) -> Iterator[Sample]:
        """The sample with other values where the op takes them, those as given among them."""
        draw = torch.Generator().manual_seed(seed)
        smooth = any(t.is_floating_point() or t.is_complex() for t in self.tensors)
        wide = [t.to(_WIDE.get(t.dtype, t.dtype)) for t in self.tensors]
        known = self._with(wide) or self
        yield known
        for how in (_in_range, _small, _small):
            drawn = self._with([how(t, smooth, draw) for t in known.tensors])
            if drawn is not None and all(map(_as_finite, drawn.outs, self.outs)):
                yield drawn

    def _with(self, tensors: Sequence[torch.Tensor]) -> Sample | None:
        try:
            outs = run(self.call, tensors)
        except Exception:
            return None
        return Sample(self.call, tuple(tensors), tuple(outs))

    def blocks(self, i: int, placement: Placement, setting: Setting) -> list[torch.Tensor]:
        """The blocks of operand `i`, by rank."""
        key = i, placement, setting
        if key not in self.held:
            tensor = self.tensors[i]
            match placement:
                case Shard(dim):
                    blocks = cut(tensor, dim, setting)
                case Partial():
                    blocks = _split(tensor, placement, setting.count, setting.seed + i)
                case _:
                    blocks = [tensor] * setting.count
            self.held[key] = blocks
        return self.held[key]


@attrs.frozen
class Setting:
    """Over how many ranks, which cut of a dim, and which split of pending terms."""

    count: int
    cut: str = "even"
    seed: int = 0

    def indices(self, size: int) -> list[torch.Tensor]:
        """Which indices of a dim each rank holds."""
        everything = torch.arange(size)
        match self.cut:
            case "chunk":
                ends = [chunk(size, self.count, i) for i in range(self.count)]
                return [everything[a:b] for a, b in ends]
            case "even":
                return list(everything.tensor_split(self.count))
            case "empty":
                return [*everything.tensor_split(self.count - 1), everything[:0]]
        draw = random.Random(self.seed)
        owners = [*range(self.count), *(draw.randrange(self.count) for _ in range(size))][:size]
        draw.shuffle(owners)
        return [everything[torch.tensor(owners) == i] for i in range(self.count)]


def cut(tensor: torch.Tensor, dim: int, setting: Setting) -> list[torch.Tensor]:
    """The blocks of a cut of a dim."""
    return [tensor.index_select(dim, i) for i in setting.indices(tensor.shape[dim])]


def run(call: Call, tensors: Sequence[torch.Tensor], resized: Any = None) -> list[torch.Tensor]:
    """The results of the op of a call for these tensors; `resized` is an argument and its value."""
    args, kwargs = substituted((call.args, call.kwargs), lambda v: tensors[v.index])
    if resized is not None:
        place, value = resized
        args = [value if i == place else a for i, a in enumerate(args)]
        kwargs = [(k, value if k == place else v) for k, v in kwargs]
    listed = [list(a) if isinstance(a, tuple) else a for a in args]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return tensors_of(call.op(*listed, **dict(kwargs)))


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are the same, but for rounding."""
    if a.shape != b.shape or a.dtype != b.dtype or a.layout != b.layout:
        return False
    try:
        if torch.equal(a, b):
            return True
    except RuntimeError:  # what an op that failed has left behind
        return False
    if not (a.is_floating_point() or a.is_complex()):
        return False
    off = 1e-9 if a.dtype in _WIDE.values() else 50 * torch.finfo(a.dtype).eps
    gap = (a - b).abs()
    scale = float(b.abs().max())
    if gap.isfinite().all() and scale == scale:
        return float(gap.max()) <= off * max(1.0, scale)
    return torch.allclose(a, b, rtol=off, atol=off, equal_nan=True)


def _split(tensor: torch.Tensor, pending: Partial, count: int, seed: int) -> list[torch.Tensor]:
    """Random terms: not whole numbers where there are others, and any may be the largest."""
    draw = torch.Generator().manual_seed(seed)
    op, shape = pending.reduce_op, (count, *tensor.shape)
    smooth = tensor.is_floating_point() or tensor.is_complex()
    owner = torch.randint(count, (1, *tensor.shape), generator=draw)
    others = torch.arange(count).reshape(-1, *[1] * tensor.ndim) != owner
    if op in ("max", "min") and (smooth or tensor.dtype.is_signed):
        off = torch.randint(0, 64, shape, generator=draw).to(tensor.dtype) / (8 if smooth else 1)
        off = (off * others).to(tensor.dtype)
        return list(tensor - off if op == "max" else tensor + off)
    if op in ("sum", "avg") and smooth:
        noise = torch.randint(-24, 25, shape, generator=draw).to(tensor.dtype) / 8
        if tensor.is_complex():
            noise = noise + 1j * noise.roll(1, 0)
        if op == "avg":
            return list(tensor + noise - noise.roll(1, 0))
        noise = noise * others
        return list(torch.where(others, noise, tensor - noise.sum(0)))
    layout = Layout(Mesh(x=count), [pending])
    return list(scatter(tensor, TensorType(tuple(tensor.shape), tensor.dtype, layout), seed))


_WIDE = {torch.float32: torch.float64, torch.complex64: torch.complex128}


def _in_range(tensor: torch.Tensor, smooth: bool, draw: torch.Generator) -> torch.Tensor:
    """Random values between the least and the most; other whole numbers only by themselves."""
    if tensor.dtype is torch.bool:
        return torch.rand(tensor.shape, generator=draw) < 0.85
    if tensor.is_complex():
        return torch.randn(tensor.shape, generator=draw, dtype=tensor.dtype)
    if not tensor.numel() or (smooth and not tensor.is_floating_point()):
        return tensor
    wide = tensor.double()
    low, high = float(wide.min()), float(wide.max())
    if tensor.is_floating_point():
        if low == high:
            low, high = low - 1, high + 1
        return (torch.rand(tensor.shape, generator=draw) * (high - low) + low).to(tensor.dtype)
    drawn = torch.randint(int(low), int(high) + 1, tuple(tensor.shape), generator=draw)
    return drawn.to(tensor.dtype)


def _small(tensor: torch.Tensor, smooth: bool, draw: torch.Generator) -> torch.Tensor:
    """Few whole numbers, each of them there, which meet each other often."""
    if tensor.dtype is torch.bool:
        return torch.rand(tensor.shape, generator=draw) < 0.15
    if smooth and not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor
    low = -2 if tensor.dtype.is_signed else 0
    order = torch.randperm(tensor.numel(), generator=draw)
    return (order % (3 - low) + low).reshape(tensor.shape).to(tensor.dtype)


def _as_finite(drawn: torch.Tensor, known: torch.Tensor) -> bool:
    return bool(drawn.isfinite().all()) or not bool(known.isfinite().all())
