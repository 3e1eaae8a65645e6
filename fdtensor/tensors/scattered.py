"""`scattered`: the tensor of one rank, as a DTensor of all."""

from __future__ import annotations

from typing import Any

import torch

from fdtensor.layouts.dtypes import parse_dtype
from fdtensor.layouts.errors import CommError
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import Replicate
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.plans.planner import plan
from fdtensor.runtime.autograd import tracked
from fdtensor.runtime.comm import Check, Comm
from fdtensor.runtime.interpreter import run
from fdtensor.tensors.admission import agree_on, plain_value, type_everywhere, vacant
from fdtensor.tensors.dtensor import DTensor

__all__ = ["scattered"]


def scattered(
    tensor: torch.Tensor | None,
    layout: Layout,
    comm: Comm[Any],
    src_rank: int,
    check: Check | None,
) -> DTensor[Any]:
    """The tensor of one rank, as a redistribution from a mesh that has only this rank."""
    for rank in (src_rank, *(() if layout.mesh is comm.mesh else layout.mesh.order)):
        if comm.mesh.position(rank) is None:
            raise CommError(
                f"rank {rank} is not in the mesh of this Comm.",
                comm=comm.mesh,
                layout=layout,
                hint="Let src_rank and the ranks of the layout be among its ranks.",
            )
    agree_on(f"{layout!r} {src_rank}", "distribute", [comm.mesh], comm, None, check)
    alone = Mesh.from_ranks([src_rank], ("src",))
    own_rank = src_rank if comm.rank is None else comm.rank
    if comm.mesh.position(own_rank) is None:
        type = type_everywhere(tensor, layout.mesh).with_layout(layout)
        return DTensor(vacant(type, comm, tensor), type, comm)
    header = _told(tensor, alone, comm) if own_rank == src_rank else [0] * 64
    header = comm.share(header, src_rank)
    if header[0] < 0:
        facts = {} if own_rank != src_rank else {"found": _described(tensor)}
        raise CommError(
            f"rank {src_rank} has no tensor that can be distributed.",
            **facts,
            hint="Pass a dense tensor, of the Comm's device and of a plain dtype, on src_rank.",
        )
    ndim, dtype, differentiable, *shape = header
    source = TensorType(shape[:ndim], _DTYPES[dtype], Layout(alone, [Replicate()]))
    type = source.with_layout(layout)
    if own_rank == src_rank:
        value = plain_value((tensor,) if comm.rank is None else tensor, comm)
    else:  # its graph goes along with that of src_rank, so that both run the backward
        value = vacant(source, comm, tensor if differentiable else None)
        if differentiable and not tracked([value]):
            value.requires_grad_()
    return DTensor(run(plan(source, type, cost=comm.cost), value, comm, check=check), type, comm)


_DTYPES = [parse_dtype(name) for name in (
    "f64", "f32", "f16", "bf16", "i64", "i32", "i16", "i8", "u8", "u16", "u32", "u64", "bool",
    "c32", "c64", "c128", *sorted(n for n in dir(torch) if n.startswith("float8_")),
)]  # fmt: skip


def _told(tensor: Any, alone: Mesh, comm: Comm[Any]) -> list[int]:
    """A tensor as 64 numbers: dims, dtype, whether it is tracked, shape; -1 where it is unfit."""
    if isinstance(tensor, torch.Tensor) and tensor.dim() <= 60 and tensor.dtype in _DTYPES:
        type = type_everywhere(tensor, alone)
        value = (tensor,) if comm.rank is None else tensor
        if comm.mistake(value, type) is None:
            header = [tensor.dim(), _DTYPES.index(tensor.dtype), tracked([tensor]), *tensor.shape]
            return header + [0] * (64 - len(header))
    return [-1] * 64


def _described(tensor: object) -> str:
    if not isinstance(tensor, torch.Tensor):
        return repr(tensor)
    return f"{tensor.layout} tensor of {tensor.dtype} on {tensor.device}, {tensor.dim()} dims"
