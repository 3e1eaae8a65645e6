"""What may be wrong with results: `differences` names the first thing that is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fdtensor.layouts.layout import Layout
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.tensors.dtensor import DTensor
from fdtensor.testing.values import block, gather_full
from tests.hunt.plain import Reference
from tests.hunt.values import kind_of

__all__ = ["Wrong", "check_gradients", "check_results"]


class Wrong(Exception):
    """A result that is not right; `kind` says in what way."""

    def __init__(self, kind: str, text: str, place: int | None = None) -> None:
        super().__init__(text)
        self.kind, self.place = kind, place


def check_results(
    made: Sequence[Any],
    due: Reference,
    wanted: Sequence[Layout | None] | None,
    given: Sequence[Any] = (),
) -> None:
    """Compares DTensors with the results of plain torch, on every rank.

    Those of `given` may be handed through as they are.
    """
    if len(made) != len(due.outs):
        raise Wrong("structure", f"{len(made)} results, not {len(due.outs)}")
    for i, (x, full) in enumerate(zip(made, due.outs)):
        assert full is not None
        if not isinstance(x, DTensor):
            raise Wrong("structure", f"result {i} is {type(x).__name__}, no DTensor", i)
        asked = wanted[i] if wanted else None
        if not any(x is y for y in given):
            _check_type(x, full, asked, i)
        _check_values(x.local, x.type, full, due, i, f"result {i}")


def check_gradients(
    made: Sequence[tuple[TensorType, Sequence[torch.Tensor | None]]], due: Reference
) -> None:
    """Compares gradients of local tensors with those of plain torch."""
    for i, ((type, blocks), full) in enumerate(zip(made, due.outs)):
        if full is None:
            full = torch.zeros(type.shape, dtype=type.dtype)
        locals = [
            torch.zeros(type.local_shape(rank), dtype=type.dtype) if t is None else t.detach()
            for rank, t in zip(type.mesh.ranks, blocks)
        ]
        _check_values(locals, type, full, due, i, f"gradient {i}")


def _check_type(x: DTensor[Any], full: torch.Tensor, asked: Layout | None, i: int) -> None:
    if x.type.dtype != full.dtype:
        raise Wrong("dtype", f"result {i} is {x.type}, not {full.dtype}{list(full.shape)}", i)
    if x.type.shape != tuple(full.shape):
        raise Wrong("shape", f"result {i} is {x.type}, not {full.dtype}{list(full.shape)}", i)
    if asked is not None and x.layout != asked:
        raise Wrong("layout", f"result {i} is {x.layout}, not {asked} as asked", i)
    if asked is None and x.layout.partial:
        raise Wrong("pending", f"result {i} is {x.type}", i)


def _check_values(
    blocks: Sequence[torch.Tensor],
    type: TensorType,
    full: torch.Tensor,
    due: Reference,
    i: int,
    name: str,
) -> None:
    for rank, local in zip(type.mesh.ranks, blocks, strict=True):
        if tuple(local.shape) != type.local_shape(rank) or local.dtype != type.dtype:
            text = f"{name} {type} on rank {rank} is {local.dtype}{list(local.shape)}"
            raise Wrong("block", f"{text}, not {list(type.local_shape(rank))}", i)
    _check_replicas(blocks, type, i, name)
    noisy = [r.outs[i] for r in due.noisy if r.error is None]
    if type.layout.partial:
        try:
            whole = gather_full([t.detach() for t in blocks], type)
        except AssertionError as error:
            raise Wrong("replicas", f"{name} {type}: {error}", i) from error
        pairs = [(-1, whole, lambda t: t)]
    else:
        pairs = [
            (rank, local, lambda t, rank=rank: block(t, type, rank))
            for rank, local in zip(type.mesh.ranks, blocks)
        ]
    for rank, local, part in pairs:
        spread = [part(t) for t in noisy if t is not None]
        said = unlike(local.detach(), part(full), due.eps, spread)
        if said:
            raise Wrong("value", f"{name} {type} on rank {rank}: {said}", i)


def _check_replicas(blocks: Sequence[torch.Tensor], type: TensorType, i: int, name: str) -> None:
    """Ranks that hold the same indices, of the same term, hold the same bits."""
    pending = [type.mesh.axis(axis) for axis in type.layout.partial]
    first: dict[object, torch.Tensor] = {}
    for rank, local in zip(type.mesh.ranks, blocks):
        coord = type.mesh.coord(rank)
        assert coord is not None
        term = tuple(coord[k] for k in pending)
        held = first.setdefault((term, tuple(map(tuple, type.index(rank)))), local)
        if unlike(local.detach(), held.detach(), 0.0, []):
            raise Wrong("replicas", f"{name} {type}: rank {rank} holds no replica", i)


def unlike(a: torch.Tensor, b: torch.Tensor, eps: float, spread: Sequence[torch.Tensor]) -> str:
    """How `a` differs from `b`, or ""; within rounding, and what noise does to `b`, it does not."""
    a, b = a.resolve_conj().resolve_neg(), b.resolve_conj().resolve_neg()
    if kind_of(b.dtype) in "ib":
        return "" if torch.equal(a, b) else f"{_few(a)}, not {_few(b)}"
    if not b.numel():
        return ""
    if b.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
        spread = [torch.view_as_real(t.resolve_conj()) for t in spread]
    a, b, spread = a.double(), b.double(), [t.double() for t in spread]
    finite = b.isfinite()
    for t in spread:  # what noise may make infinite is any value
        finite = finite & t.isfinite()
        a, b = torch.where(t.isfinite() == b.isfinite(), torch.stack([a, b]), 0.0)
    same = torch.where(finite, 0.0, a) == torch.where(finite, 0.0, b)
    same = same | (a.isnan() & b.isnan())
    size = float(torch.where(finite, b, 0.0).abs().max())
    noise = max((float(torch.where(finite, t - b, 0.0).abs().max()) for t in spread), default=0.0)
    most = _slack(eps) * max(1.0, size) + 50 * noise
    off = torch.where(finite, a - b, 0.0).abs()
    if bool(same.all()) and float(off.nan_to_num(nan=float("inf")).max()) <= most:
        return ""
    by = float(off.nan_to_num(nan=float("inf")).max())
    return f"{_few(a)}, not {_few(b)}; off by {by:.3g}, where {most:.3g} may be rounding"


def _slack(eps: float) -> float:
    """What rounding may come to in results of size 1: much of what a narrow dtype can say."""
    return min(1e6 * eps, 4e-5) if eps < 1e-5 else 30 * eps


def _few(t: torch.Tensor) -> str:
    return str(list(t.reshape(-1)[:8].tolist()))
