"""`from_local` and `distribute`: how plain tensors become DTensors."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

from fdtensor.layouts.dtypes import parse_dtype
from fdtensor.layouts.errors import CommError, LayoutError
from fdtensor.layouts.expected import no_layout, no_type
from fdtensor.layouts.free_type import FreeType
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.opaque import opaque
from fdtensor.layouts.placement import Replicate
from fdtensor.layouts.signatures import named_arguments
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.layouts.tree import flatten
from fdtensor.plans.local_tensors import empty, plain
from fdtensor.plans.planner import plan
from fdtensor.runtime.alike import compare, inputs
from fdtensor.runtime.autograd import shared, spread, tracked, zeros
from fdtensor.runtime.comm import (
    Check,
    Comm,
    inside,
    other_kind,
    ranks_here,
    refuse_no_comm,
    speaker,
)
from fdtensor.runtime.interpreter import digest_of, run
from fdtensor.runtime.simulator import SimulatedComm
from fdtensor.tensors.dtensor import DTensor

__all__ = ["agree", "distribute", "from_local", "local_blocks", "shards"]


@opaque
@named_arguments
def from_local(
    local: Any, type: TensorType, comm: Comm[Any], *, check: Check | None = None
) -> DTensor[Any]:
    """The DTensor whose blocks are these local tensors; nothing is moved or copied. Differentiable.

    Collective: all ranks agree on the type, and raise `CommError` together where a local tensor has
    another shape, dtype or device. A simulated Comm takes the tuple of all blocks. A rank outside
    the mesh may give anything, and holds an empty tensor.

    The cotangent of a term is that of the tensor, for avg divided by the number of terms; replicas
    all get the same one, so a tensor given for several ranks gets it several times.

    >>> mesh = Mesh(x=2)
    >>> rows = TensorType((3,), torch.int64, mesh.layout("x"))
    >>> from_local((torch.tensor([1, 2]), torch.tensor([3])), rows, SimulatedComm(mesh)).full()
    tensor([1, 2, 3])
    """
    refuse_no_comm(comm)
    if isinstance(type, FreeType):
        raise type.unchosen()
    if not isinstance(type, TensorType):
        raise no_type(type)
    _held_once(type.layout)
    agree("from_local", type, comm, comm.mistake(local, type), check)
    _compare("from_local", local, type, comm, check)
    local = _plain(local, comm) if inside(comm, type.mesh) else _vacant(type, comm, local)
    return DTensor(shared(local, type, comm), type, comm)


def _held_once(layout: Layout) -> None:
    """Refuses blocks that overlap: the derivative of one would be counted twice."""
    if layout.overlaps:
        raise LayoutError(
            f"{layout} has blocks that overlap, which only lines of a program read.",
            hint="Use Shard, StridedShard or Ragged.",
        )


@opaque
@named_arguments
def distribute(
    tensor: torch.Tensor | None,
    layout: Layout,
    comm: Comm[Any],
    *,
    src_rank: int | None = None,
    check: Check | None = None,
) -> DTensor[Any]:
    """`tensor` under a layout; the blocks share no memory with it. Differentiable.

    Every rank cuts its own block from the same `tensor`, without traffic. With `src_rank` only that
    rank needs it, and sends each rank its block; the others may pass None. Partial layouts get one
    term that holds the value, the others identity elements (avg, max, min, band, bor: the value).
    Collective: ranks agree on layout, shape, dtype and whether autograd tracks it, and fail
    together.

    The gradient is that of one process: on every rank that of the full tensor, with `src_rank` on
    that rank. Under transforms of `torch.func` the others must pass a tensor too, with any values.

    >>> mesh = Mesh(x=2)
    >>> x = distribute(torch.arange(5), mesh.layout("x"), SimulatedComm(mesh))
    >>> x.local
    (tensor([0, 1, 2]), tensor([3, 4]))
    """
    refuse_no_comm(comm)
    if not isinstance(layout, Layout):
        raise no_layout(layout)
    _held_once(layout)
    if src_rank is not None:
        return _scattered(tensor, layout, comm, src_rank, check)
    try:
        whole = _everywhere(tensor, layout.mesh)
        type = whole.with_layout(layout)
    except LayoutError as error:  # one rank alone may see it: the others must not wait for it
        mistake = f"{speaker(comm)}{error.sentence.removesuffix('.')}"
        with contextlib.suppress(CommError):
            _agree("", "distribute", layout.mesh, comm, mistake, check)
        raise
    value = comm.value(spread(tensor, comm.width(whole)))  # type: ignore[arg-type]
    facts = f"distribute {type!r} {tracked([tensor])}"  # the backward is collective
    _agree(facts, "distribute", type.mesh, comm, comm.mistake(value, whole), check)
    _compare("distribute", value, whole, comm, check)
    if not inside(comm, type.mesh):
        return DTensor(_vacant(type, comm, tensor), type, comm)
    slicing = plan(whole, type, cost=comm.cost)
    return DTensor(run(slicing, value, comm, check="never"), type, comm)


def _as_tensor(value: object) -> str:
    """What to pass in place of a value that is no tensor."""
    if isinstance(value, DTensor):
        return "It is distributed already: write x.redistribute(layout)."
    if isinstance(value, torch.nn.Module):
        return (
            "Distribute its tensors: {n: distribute(p.detach(), layout, comm) for n, p in "
            "module.named_parameters()}."
        )
    if hasattr(value, "__array__"):
        return "Write torch.as_tensor(array)."
    leaves = [leaf for leaf in flatten(value)[0] if leaf is not value]
    if leaves and all(isinstance(leaf, torch.Tensor) for leaf in leaves):
        return "Distribute each: optree.tree_map(lambda t: distribute(t, layout, comm), tree)."
    if leaves or isinstance(value, (int, float, complex)):
        return "Write torch.tensor(value)."
    return "Pass a torch.Tensor, or src_rank=... where only one rank has it."


def _everywhere(tensor: object, mesh: Mesh) -> TensorType:
    """The type of a tensor that every rank holds."""
    if not isinstance(tensor, torch.Tensor):
        name = "None" if tensor is None else f"a {type(tensor).__name__}"
        raise LayoutError(f"{name} is not a tensor.", hint=_as_tensor(tensor))
    kind = other_kind(tensor)
    if kind is not None:
        raise LayoutError(
            f"{kind} cannot be laid out.",
            hint="Pass the plain tensors that it consists of, such as its values and its mask.",
        )
    return TensorType(tensor.shape, tensor.dtype, Layout(mesh, [Replicate()] * mesh.ndim))


def _plain(local: Any, comm: Comm[Any]) -> Any:
    """The value as a Comm makes it: a tuple where a list was given, bits as they are read."""
    return comm.value([plain(leaf) for leaf in comm.leaves(local)])


def _vacant(type: TensorType, comm: Comm[Any], like: Any) -> torch.Tensor:
    """The empty block of a rank outside the mesh; its autograd graph is that of `like`."""
    nothing = empty(type, comm.rank or 0, comm.device or torch.device("cpu"))
    if not isinstance(like, torch.Tensor) or like.dtype != type.dtype or not tracked([like]):
        return nothing
    if like.shape == nothing.shape and like.numel() == 0:
        return like
    return zeros(like, nothing.shape)


def agree(
    about: str, type: TensorType, comm: Comm[Any], mistake: str | None, check: Check | None
) -> None:
    """Raises `CommError` on all ranks of the mesh where types differ or one has a mistake."""
    _agree(f"{about} {type!r}", about, type.mesh, comm, mistake, check)


def _compare(
    about: str, value: Any, type: TensorType, comm: Comm[Any], check: Check | None
) -> None:
    """Raises `CommError` on all ranks where replicas differ, if values are to be compared."""
    if (check or comm.check) == "values":
        compare(about, comm, [type.mesh], inputs([value], [type]))


def _agree(
    facts: str,
    about: str,
    mesh: Mesh,
    comm: Comm[Any],
    mistake: str | None,
    check: Check | None,
) -> None:
    if (check or comm.check) != "never":
        comm.agree(about, digest_of(facts), [mesh], mistake)
    elif mistake is not None:
        comm.refuse(about, mistake, [mesh])


def _scattered(
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
    _agree(f"{layout!r} {src_rank}", "distribute", comm.mesh, comm, None, check)
    alone = Mesh.from_ranks([src_rank], ("src",))
    own_rank = src_rank if comm.rank is None else comm.rank
    if comm.mesh.position(own_rank) is None:
        type = _everywhere(tensor, layout.mesh).with_layout(layout)
        return DTensor(_vacant(type, comm, tensor), type, comm)
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
        value = _plain((tensor,) if comm.rank is None else tensor, comm)
    else:  # its graph goes along with that of src_rank, so that both run the backward
        value = _vacant(source, comm, tensor if differentiable else None)
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
        type = _everywhere(tensor, alone)
        value = (tensor,) if comm.rank is None else tensor
        if comm.mistake(value, type) is None:
            header = [tensor.dim(), _DTYPES.index(tensor.dtype), tracked([tensor]), *tensor.shape]
            return header + [0] * (64 - len(header))
    return [-1] * 64


def _described(tensor: object) -> str:
    if not isinstance(tensor, torch.Tensor):
        return repr(tensor)
    return f"{tensor.layout} tensor of {tensor.dtype} on {tensor.device}, {tensor.dim()} dims"


def local_blocks(value: Any, mesh: Mesh, comm: Comm[Any]) -> list[tuple[int, torch.Tensor]]:
    """The ranks of `mesh` in this process, each with its tensor; none on a process outside."""
    ranks = ranks_here(comm, mesh)
    return list(zip(ranks, comm.leaves(value), strict=True)) if ranks else []


@named_arguments
def shards(tensor: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, ...]:
    """The blocks of `tensor` by rank, in the order of the mesh: a value for a SimulatedComm.

    >>> shards(torch.arange(6).reshape(2, 3), Mesh(x=2).layout(None, "x"))
    (tensor([[0, 1],
            [3, 4]]), tensor([[2],
            [5]]))
    """
    if not isinstance(layout, Layout):
        raise no_layout(layout)
    value: Sequence[torch.Tensor] = distribute(tensor, layout, SimulatedComm(layout.mesh)).local
    return tuple(value)
