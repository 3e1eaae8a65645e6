"""The verbs on distributed values: connect, distribute, from_local, redistribute."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from fdtensor.comm import Check, Comm
from fdtensor.dtensor import DTensor
from fdtensor.dtypes import parse_dtype
from fdtensor.errors import CommError, LayoutError, ValueTreeError
from fdtensor.fused import fuse
from fdtensor.interpreter import run, run_fused
from fdtensor.kernel import empty
from fdtensor.layout import Layout, TensorType
from fdtensor.mesh import Mesh
from fdtensor.placement import Replicate
from fdtensor.planner import plan
from fdtensor.simulator import SimulatedComm
from fdtensor.tree import broadcast_prefix, flatten, unflatten

__all__ = ["connect", "distribute", "from_local", "redistribute", "shards"]

FUSED_BYTES = 4 << 20
"""Tensors whose blocks are larger travel by themselves: there, packing costs more than it saves."""


def connect(mesh: Mesh, device: str | torch.device | None = None, *, check: Check = "first") -> Any:
    """The Comm of a mesh: real where a process group is up, else simulated.

    Under torchrun a process group is brought up from the environment: NCCL where there is CUDA,
    gloo else. `device` is by default the one that the backend serves.
    """
    from fdtensor.funcol import FuncolComm
    from fdtensor.process_groups import default_device, up

    if not up():
        return SimulatedComm(mesh, check=check)
    return FuncolComm(mesh, device or default_device(), check=check)


def from_local(
    local: Any, type: TensorType, comm: Comm[Any], *, check: Check | None = None
) -> DTensor[Any]:
    """The DTensor whose blocks are these local tensors; nothing is moved or copied. Differentiable.

    Collective: all ranks agree on the type, and raise `CommError` together where a local tensor has
    another shape, dtype or device. A simulated Comm takes the tuple of all blocks. The cotangent of
    a term is that of the tensor, for avg divided by the number of terms.
    """
    if not isinstance(type, TensorType):
        raise LayoutError(
            f"{type!r} is not a TensorType.", hint="Write TensorType(shape, dtype, layout)."
        )
    _agree("from_local", type, comm, comm.mistake(local, type), check)
    return DTensor(_averaged(local, type, comm), type, comm)


def _averaged(local: Any, type: TensorType, comm: Comm[Any]) -> Any:
    """The value, with a backward that divides by the number of terms of an average."""
    count = 1
    for axis, op in type.layout.partial.items():
        count *= type.mesh.axis_size(axis) if op == "avg" else 1
    if count == 1:
        return local
    return comm.value([_Averaged.apply(leaf, count) for leaf in comm.leaves(local)])  # type: ignore[misc]


class _Averaged(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(leaf: torch.Tensor, count: int) -> torch.Tensor:
        return leaf.view_as(leaf)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.count = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return grad / ctx.count, None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, _count: None) -> torch.Tensor:  # type: ignore[override]
        return tangent.view_as(tangent)


def _agree(
    about: str, type: TensorType, comm: Comm[Any], mistake: str | None, check: Check | None
) -> None:
    if (check or comm.check) == "never":
        if mistake is not None:
            comm.refuse(about, mistake)
        return
    digest = hashlib.sha256(f"{about} {type!r}".encode()).hexdigest()[:32]
    comm.agree(about, digest, [type.mesh], mistake)


def distribute(
    tensor: torch.Tensor | None,
    layout: Layout,
    comm: Comm[Any],
    *,
    src_rank: int | None = None,
    check: Check | None = None,
) -> DTensor[Any]:
    """`tensor` under a layout. Differentiable.

    Every rank cuts its own block from the same `tensor`, without traffic. With `src_rank` only that
    rank needs it, and sends each rank its block; the others may pass None. Partial layouts get one
    term that holds the value, the others identity elements (avg, max, min, band, bor: the value).
    Collective: ranks agree on shape and dtype, and fail together.
    """
    if not isinstance(layout, Layout):
        raise LayoutError(f"{layout!r} is not a Layout.", hint="Write Layout(mesh, placements).")
    if src_rank is not None:
        return _scattered(tensor, layout, comm, src_rank, check)
    if not isinstance(tensor, torch.Tensor):
        _agree("distribute", _nothing(layout), comm, f"got {tensor!r}, not a tensor", check)
        raise LayoutError(f"{tensor!r} is not a tensor.", hint="Pass a torch.Tensor.")
    type = TensorType(tensor.shape, tensor.dtype, layout)
    whole = type.with_layout(Layout(layout.mesh, [Replicate()] * layout.mesh.ndim))
    value = comm.each(whole, lambda rank: tensor)
    _agree("distribute", type, comm, comm.mistake(value, whole), check)
    found = plan(whole, type, cost=comm.cost)
    return DTensor(run(found, value, comm, check="never"), type, comm)


def _nothing(layout: Layout) -> TensorType:
    return TensorType((), torch.float32, Layout(layout.mesh, [Replicate()] * layout.mesh.ndim))


def _scattered(
    tensor: torch.Tensor | None,
    layout: Layout,
    comm: Comm[Any],
    src_rank: int,
    check: Check | None,
) -> DTensor[Any]:
    """The tensor of one rank, as a redistribution from a mesh that has only this rank."""
    if comm.mesh.position(src_rank) is None:
        raise CommError(
            f"rank {src_rank} is not in the mesh of this Comm.",
            comm=comm.mesh,
            hint="Let src_rank be one of its ranks.",
        )
    if isinstance(comm, SimulatedComm):
        shape, dtype = _described(tensor, src_rank)
    else:
        rank = comm.rank  # type: ignore[attr-defined]
        told = _told(tensor) if rank == src_rank else [0] * 64
        told = comm.share(told, src_rank)  # type: ignore[attr-defined]
        if told[0] < 0:
            raise CommError(
                f"rank {src_rank} has no tensor to distribute.",
                hint="Pass the tensor on src_rank.",
            )
        shape, dtype = tuple(told[2 : 2 + told[0]]), _DTYPES[told[1]]
        if rank != src_rank:
            tensor = None
    type = TensorType(shape, dtype, layout)
    alone = Mesh.from_ranks([src_rank], ("src",))
    source = TensorType(shape, dtype, Layout(alone, [Replicate()]))
    if isinstance(comm, SimulatedComm):
        value: Any = (tensor,)
    else:
        device = comm.device  # type: ignore[attr-defined]
        value = tensor if tensor is not None else empty(source, comm.rank, device)  # type: ignore[attr-defined]
    found = plan(source, type, cost=comm.cost)
    return DTensor(run(found, value, comm, check=check), type, comm)


_DTYPES = [parse_dtype(name) for name in (
    "f64", "f32", "f16", "bf16", "i64", "i32", "i16", "i8", "u8", "u16", "u32", "u64", "bool",
    "c32", "c64", "c128", *sorted(n for n in dir(torch) if n.startswith("float8_")),
)]  # fmt: skip


def _told(tensor: torch.Tensor | None) -> list[int]:
    """Shape and dtype as 64 numbers; -1 where there is no tensor."""
    if not isinstance(tensor, torch.Tensor) or tensor.dim() > 60 or tensor.dtype not in _DTYPES:
        return [-1] * 64
    told = [tensor.dim(), _DTYPES.index(tensor.dtype), *tensor.shape]
    return told + [0] * (64 - len(told))


def _described(tensor: object, src_rank: int) -> tuple[tuple[int, ...], torch.dtype]:
    if not isinstance(tensor, torch.Tensor):
        raise CommError(
            f"rank {src_rank} has no tensor to distribute.", hint="Pass the tensor on src_rank."
        )
    return tuple(tensor.shape), tensor.dtype


def redistribute(tree: Any, layouts: Any, *, max_bytes: int | None = None) -> Any:
    """A DTensor, or a pytree of them, under other layouts. Differentiable.

    `layouts` is one layout for all, or a pytree of layouts that has the structure of `tree` or of
    a prefix of it. The traffic of small tensors is fused: one message a pair of ranks, in at most
    two rounds. Leaves that are not DTensors come back as they are. `max_bytes` is for each tensor.
    """
    if isinstance(tree, DTensor):
        return tree.redistribute(layouts, max_bytes=max_bytes)
    leaves, spec = flatten(tree, is_leaf=_is_dtensor)
    try:
        wanted = broadcast_prefix(layouts, unflatten(spec, range(len(leaves))), _is_target)
    except ValueError as error:
        raise ValueTreeError(
            "the layouts do not have the structure of the tree.",
            tree=spec,
            problem=error,
            hint="Pass one layout, or a pytree of layouts like the tree or a prefix of it.",
        ) from error
    results = list(leaves)
    together: dict[Any, list[int]] = {}
    for i, (leaf, to) in enumerate(zip(leaves, wanted, strict=True)):
        if not isinstance(leaf, DTensor):
            continue
        if not _is_target(to):
            raise ValueTreeError(
                f"leaf {i} has {to!r} for a layout.", hint="Pass a Layout or a TensorType."
            )
        largest = max(leaf.type.nbytes // max(1, _cut_ways(leaf.type)), 0)
        if max_bytes is not None or largest > FUSED_BYTES:
            results[i] = leaf.redistribute(to, max_bytes=max_bytes)
        else:
            together.setdefault(leaf.comm, []).append(i)
    for comm, places in together.items():
        plans = [plan(leaves[i].type, wanted[i], cost=comm.cost) for i in places]
        found = fuse(plans)
        moved = run_fused(found, [leaves[i].local for i in places], comm)
        for i, p, local in zip(places, plans, moved, strict=True):
            results[i] = DTensor(local, p.dst, comm)
    return unflatten(spec, results)


def _cut_ways(type: TensorType) -> int:
    ways = 1
    for d in range(len(type.shape)):
        for axis in type.layout.cuts(d):
            ways *= type.mesh.axis_size(axis)
    return ways


def _is_dtensor(node: object) -> bool:
    return isinstance(node, DTensor)


def _is_target(node: object) -> bool:
    return isinstance(node, (Layout, TensorType))


def shards(tensor: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, ...]:
    """What each rank of the mesh holds of `tensor`, in mesh order: a value for a SimulatedComm."""
    value: Sequence[torch.Tensor] = distribute(tensor, layout, SimulatedComm(layout.mesh)).local
    return tuple(value)
