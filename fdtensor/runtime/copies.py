"""Checks that simulated ranks have the same where a layout says so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fdtensor.layouts.errors import LayoutError
from fdtensor.layouts.mesh import Mesh
from fdtensor.ops.graph import Var
from fdtensor.programs.program import Eqn, Program
from fdtensor.runtime.lines import Line

__all__ = ["compare_copies", "cosets", "is_smooth", "last_result", "refuse_different"]


def is_smooth(dtype: torch.dtype) -> bool:
    """Whether values of a dtype have derivatives."""
    return dtype.is_floating_point or dtype.is_complex


def cosets(mesh: Mesh, axes: tuple[str, ...]) -> list[list[int]]:
    """The places of the mesh, those that differ only in `axes` together."""
    return [[mesh.position(rank) or 0 for rank in ranks] for ranks in mesh.cosets(axes)]


def refuse_different(
    result: Sequence[torch.Tensor], mesh: Mesh, axes: tuple[str, ...], name: str
) -> None:
    """Raises where copies differ along an axis that is said to replicate them."""
    for axis in axes:
        for first, *others in cosets(mesh, (axis,)):
            for other in others:
                if not _same(result[first], result[other]):
                    ranks = f"{mesh.order[first]} and {mesh.order[other]}"
                    raise LayoutError(
                        f"{name} of shard_map is said to be replicated over {axis!r}, but ranks "
                        f"{ranks} have different values.",
                        hint=f"psum it over {axis!r}, or say Shard or Partial in out_layouts.",
                    )


def last_result(env: Mapping[Var, Any], lines: Sequence[Line]) -> Any:
    """The result of the last of some lines; None where it is read by nobody."""
    results = [v for line in lines for v in line.outs if v is not None]
    return env.get(results[-1]) if results else None


def compare_copies(program: Program, eqn: Eqn, results: Sequence[Any]) -> None:
    """Raises where a value that is said to be the same on ranks is not."""
    (v,), (out,) = eqn.ins, eqn.outs
    if out is not None and all(t is not None for t in results):
        axes = tuple(program.type_of(v).layout.cuts(eqn.args[1]))
        refuse_different(results, program.mesh, axes, "a result")


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether tensors are equal, but for the rounding of sums in another order."""
    a, b = a.detach(), b.detach()
    if a.is_meta:
        return True
    if not is_smooth(a.dtype):
        return torch.equal(a, b)
    if a.dtype.itemsize == 1 or a.dtype == torch.complex32:
        a, b = (t.to(torch.complex64 if t.is_complex() else torch.float32) for t in (a, b))
    eps = 32 * torch.finfo(a.dtype).eps
    finite = a[a.isfinite()].abs()
    scale = float(finite.max()) if finite.numel() else 0.0
    return torch.allclose(a, b, rtol=eps, atol=eps * scale, equal_nan=True)
