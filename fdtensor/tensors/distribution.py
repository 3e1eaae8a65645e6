"""`from_local` and `distribute`: how plain tensors become DTensors."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, overload

import torch

from fdtensor.layouts.errors import CommError, LayoutError
from fdtensor.layouts.expected import no_layout, no_type
from fdtensor.layouts.free_type import FreeType
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.opaque import opaque
from fdtensor.layouts.signatures import named_arguments
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.ops.pins import constrain
from fdtensor.ops.transparent import recording
from fdtensor.plans.planner import plan
from fdtensor.runtime.autograd import shared, spread, tracked
from fdtensor.runtime.comm import Check, Comm, inside, ranks_here, refuse_no_comm, speaker
from fdtensor.runtime.interpreter import run
from fdtensor.runtime.simulator import SimulatedComm
from fdtensor.tensors.admission import (
    agree,
    agree_on,
    compare_replicas,
    plain_value,
    refuse_overlaps,
    type_everywhere,
    vacant,
)
from fdtensor.tensors.dtensor import DTensor
from fdtensor.tensors.einops import tell_einops
from fdtensor.tensors.given import Given
from fdtensor.tensors.scattered import scattered
from fdtensor.tensors.traced_dtensor import TracedDTensor

__all__ = ["distribute", "from_local", "local_blocks", "shards"]


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
    tell_einops()
    if isinstance(type, FreeType):
        raise type.unchosen()
    if not isinstance(type, TensorType):
        raise no_type(type)
    refuse_overlaps(type.layout)
    agree("from_local", type, comm, comm.mistake(local, type), check)
    compare_replicas("from_local", local, type, comm, check)
    local = plain_value(local, comm) if inside(comm, type.mesh) else vacant(type, comm, local)
    return DTensor(shared(local, type, comm), type, comm)


@overload
def distribute(
    tensor: torch.Tensor | None,
    layout: Layout,
    comm: Comm[Any],
    *,
    src_rank: int | None = None,
    check: Check | None = None,
) -> DTensor[Any]: ...


@overload
def distribute(
    tensor: Any,
    layout: Any,
    comm: Comm[Any],
    *,
    src_rank: int | None = None,
    check: Check | None = None,
) -> Any: ...


@opaque
@named_arguments
def distribute(
    tensor: Any,
    layout: Any,
    comm: Comm[Any],
    *,
    src_rank: int | None = None,
    check: Check | None = None,
) -> Any:
    """`tensor` under a layout; the blocks share no memory with it. Differentiable.

    Every rank cuts its own block from the same `tensor`, without traffic. With `src_rank` only that
    rank needs it, and sends each rank its block; the others may pass None. Partial layouts get one
    term that holds the value, the others identity elements (avg, max, min, band, bor: the value).
    Collective: ranks agree on layout, shape, dtype and whether autograd tracks it, and fail
    together.

    `tensor` may be a pytree, dataclasses included, and `layout` one for all or a pytree of layouts
    that is a prefix of it; ranks agree on all at once. Under one that stands for all below it a
    tensor without dims stays whole. Arrays of numpy, and of other libraries by
    DLPack, are tensors too; leaves that are no tensors come back as they are. With `src_rank` the
    other ranks pass None only where the layouts have the structure of the tree.

    In a traced function it pins the layout of the tensor, of which every rank has its block there.

    The gradient is that of one process: on every rank that of the full tensor, with `src_rank` on
    that rank. Under transforms of `torch.func` the others must pass a tensor too, with any values.

    >>> mesh = Mesh(x=2)
    >>> comm = SimulatedComm(mesh)
    >>> x = distribute(torch.arange(5), mesh.layout("x"), comm)
    >>> x.local
    (tensor([0, 1, 2]), tensor([3, 4]))
    >>> distribute({"x": torch.ones(4, 2), "step": 3}, mesh.layout("x"), comm)
    {'x': DTensor(f32[4@x,2] on Mesh(x=2)), 'step': 3}
    """
    refuse_no_comm(comm)
    tell_einops()
    given = Given.of(tensor, layout, src_rank is not None)
    for wanted, name in zip(given.layouts, given.names, strict=True):
        if not isinstance(wanted, Layout):
            raise no_layout(wanted, name and f"the layout of {name}")
        refuse_overlaps(wanted)
    if not given.tensors:  # those of a module without buffers
        return given.with_tensors([])
    if recording():
        return given.with_tensors(list(map(_in_trace, given.tensors, given.layouts)))
    if src_rank is None:
        return given.with_tensors(_cut(given, comm, check))
    pairs = zip(given.tensors, given.layouts, strict=True)
    return given.with_tensors([scattered(t, to, comm, src_rank, check) for t, to in pairs])


def _in_trace(tensor: torch.Tensor, layout: Layout) -> TracedDTensor:
    """What stands for a tensor that a traced function distributes: its layout is pinned."""
    if layout.partial:  # of which a traced value has no terms
        return TracedDTensor(tensor, layout.mesh)
    type = TensorType(tuple(tensor.shape), tensor.dtype, layout)
    return TracedDTensor(constrain(tensor, layout), layout.mesh, type)


def _cut(given: Given, comm: Comm[Any], check: Check | None) -> list[DTensor[Any]]:
    """The DTensors of tensors that all ranks hold, each of which cuts its own blocks."""
    meshes = list(dict.fromkeys(layout.mesh for layout in given.layouts))
    wholes: list[TensorType] = []
    types: list[TensorType] = []
    for tensor, layout, name in zip(given.tensors, given.layouts, given.names, strict=True):
        try:
            wholes.append(type_everywhere(tensor, layout.mesh))
            types.append(wholes[-1].with_layout(layout))
        except LayoutError as error:  # one rank alone may see it: the others must not wait for it
            sentence = f"{name}: {error.sentence}" if name else error.sentence
            mistake = f"{speaker(comm)}{sentence.removesuffix('.')}"
            with contextlib.suppress(CommError):
                agree_on("", "distribute", meshes, comm, mistake, check)
            raise LayoutError(sentence, hint=error.hint, **error.facts) from None
    pairs = zip(given.tensors, wholes, strict=True)
    values = [comm.value(spread(tensor, comm.width(whole))) for tensor, whole in pairs]
    flags = [tracked([tensor]) for tensor in given.tensors]  # the backward is collective
    each = [f"{t!r}{' that requires grad' * f}" for t, f in zip(types, flags, strict=True)]
    facts = f"distribute {', '.join(each)}"
    wrong = [comm.mistake(value, whole) for value, whole in zip(values, wholes, strict=True)]
    agree_on(facts, "distribute", meshes, comm, next(filter(None, wrong), None), check)
    made: list[DTensor[Any]] = []
    for tensor, value, whole, type in zip(given.tensors, values, wholes, types, strict=True):
        compare_replicas("distribute", value, whole, comm, check)
        if inside(comm, type.mesh):
            slicing = plan(whole, type, cost=comm.cost)
            made.append(DTensor(run(slicing, value, comm, check="never"), type, comm))
        else:
            made.append(DTensor(vacant(type, comm, tensor), type, comm))
    return made


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
