"""The checks that make a DTensor of tensors need, on all ranks together, and empty blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fdtensor.layouts.errors import LayoutError
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import Replicate
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.layouts.tree import flatten
from fdtensor.layouts.words import a_kind
from fdtensor.plans.local_tensors import empty, plain
from fdtensor.runtime.alike import compare, inputs
from fdtensor.runtime.autograd import tracked, zeros
from fdtensor.runtime.comm import Check, Comm, other_kind
from fdtensor.runtime.interpreter import digest_of
from fdtensor.tensors.dtensor import DTensor

__all__ = [
    "agree",
    "agree_on",
    "compare_replicas",
    "plain_value",
    "refuse_overlaps",
    "type_everywhere",
    "vacant",
]


def refuse_overlaps(layout: Layout) -> None:
    """Refuses blocks that overlap: the derivative of one would be counted twice."""
    if layout.overlaps:
        raise LayoutError(
            f"{layout} has blocks that overlap, which only lines of a program read.",
            hint="Use Shard, StridedShard or Ragged.",
        )


def agree(
    about: str, type: TensorType, comm: Comm[Any], mistake: str | None, check: Check | None
) -> None:
    """Raises `CommError` on all ranks of the mesh where types differ or one has a mistake."""
    agree_on(f"{about} {type!r}", about, [type.mesh], comm, mistake, check)


def compare_replicas(
    about: str, value: Any, type: TensorType, comm: Comm[Any], check: Check | None
) -> None:
    """Raises `CommError` on all ranks where replicas differ, if values are to be compared."""
    if (check or comm.check) == "values":
        compare(about, comm, [type.mesh], inputs([value], [type]))


def agree_on(
    facts: str,
    about: str,
    meshes: Sequence[Mesh],
    comm: Comm[Any],
    mistake: str | None,
    check: Check | None,
) -> None:
    """Raises `CommError` on all ranks of the meshes where facts differ or one has a mistake."""
    if (check or comm.check) != "never":
        comm.agree(about, digest_of(facts), meshes, mistake)
    elif mistake is not None:
        comm.refuse(about, mistake, meshes)


def type_everywhere(tensor: object, mesh: Mesh) -> TensorType:
    """The type of a tensor that every rank holds."""
    if not isinstance(tensor, torch.Tensor):
        name = "None" if tensor is None else a_kind(tensor)
        raise LayoutError(f"{name} is not a tensor.", hint=_as_tensor(tensor))
    kind = other_kind(tensor)
    if kind is not None:
        raise LayoutError(
            f"{kind} cannot be laid out.",
            hint="Pass the plain tensors that it consists of, such as its values and its mask.",
        )
    return TensorType(tensor.shape, tensor.dtype, Layout(mesh, [Replicate()] * mesh.ndim))


def plain_value(local: Any, comm: Comm[Any]) -> Any:
    """The value as a Comm makes it: a tuple where a list was given, bits as they are read."""
    return comm.value([plain(leaf) for leaf in comm.leaves(local)])


def vacant(type: TensorType, comm: Comm[Any], like: Any) -> torch.Tensor:
    """The empty block of a rank outside the mesh; its autograd graph is that of `like`."""
    nothing = empty(type, comm.rank or 0, comm.device or torch.device("cpu"))
    if not isinstance(like, torch.Tensor) or like.dtype != type.dtype or not tracked([like]):
        return nothing
    if like.shape == nothing.shape and like.numel() == 0:
        return like
    return zeros(like, nothing.shape)


def _as_tensor(value: object) -> str:
    """What to pass in place of a value that is no tensor."""
    if isinstance(value, DTensor):
        return "It is distributed already: write x.redistribute(layout)."
    if isinstance(value, torch.nn.Module):
        return (
            "Distribute its tensors: {n: distribute(p.detach(), layout, comm) for n, p in "
            "module.named_parameters()}."
        )
    leaves = [leaf for leaf in flatten(value)[0] if leaf is not value]
    if leaves or isinstance(value, (int, float, complex)):
        return "Write torch.tensor(value)."
    return "Pass a torch.Tensor, or src_rank=... where only one rank has it."
