"""`from_torch`: torch DTensors, alone or in a pytree, as those of this library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs

from fdtensor.io.interop.device_meshes import check_groups, comm_of, remember
from fdtensor.io.interop.layouts import types_of, widened
from fdtensor.io.interop.tensors import arrived, local_of
from fdtensor.layouts.errors import CommError, FdtensorError, LayoutError, MeshError, ValueTreeError
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.layouts.tree import flatten, paths, unflatten
from fdtensor.layouts.words import a_kind
from fdtensor.runtime.comm import Check, Comm
from fdtensor.runtime.interpreter import digest_of
from fdtensor.tensors.dtensor import DTensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor as TorchDTensor

__all__ = ["from_torch", "meant", "refuse_simulated"]


def from_torch(
    tree: Any,
    comm: Comm[Any] | None = None,
    *,
    mesh: Mesh | None = None,
    check: Check | None = None,
) -> Any:
    """A torch DTensor, or each one of a pytree, as the DTensor with the same blocks.

    Its local tensor shares the memory of the torch DTensor. Other leaves come back as they are:
    `dict(model.named_parameters())`, state dicts and those of optimizers can be handed over whole.
    With `mesh`, DTensors on sub-meshes of it, such as `device_mesh["tp"]`, become tensors on it:
    they are taken to be the same along the axes that they lack.

    Differentiable: gradients come back as torch DTensors with Replicate for Partial, also to a
    parameter. Collective, as `from_local` is: all ranks agree once for the tensors of a mesh.
    `comm` is by default a FuncolComm of each mesh. Raises `LayoutError` for placements that have no
    meaning here, such as the masked partial of an embedding, and for a mesh on which torch's own
    functions disagree about who holds which block; in a pytree `ValueTreeError`, which names every
    such leaf.

    >>> from torch.distributed import tensor as dt
    >>> def rows():
    ...     mesh = dt.init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    ...     return fd.io.from_torch(dt.distribute_tensor(torch.arange(4), mesh, [dt.Shard(0)])).type

    >>> with local_cluster(2) as cluster:
    ...     print(cluster.run(rows)[0])
    i64[4@x]
    """
    from torch.distributed.tensor import DTensor as TorchDTensor

    leaves, spec = flatten(tree)
    places = [""] if spec.is_leaf() else paths(spec, "tree")
    if spec.is_leaf() and not isinstance(leaves[0], TorchDTensor):
        raise LayoutError(
            f"got {a_kind(leaves[0])}, not a torch DTensor.",
            hint="Pass a torch.distributed.tensor.DTensor or a pytree that has some, such as "
            "dict(model.named_parameters()); for plain tensors there are distribute and "
            "from_local.",
        )
    arriving: dict[int, _Arriving] = {}
    problems: dict[str, FdtensorError] = {}
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, TorchDTensor):
            try:
                arriving[i] = _Arriving.of(leaf, places[i], comm, mesh)
            except FdtensorError as error:
                problems[places[i]] = error
    if problems:
        _refuse(problems, len(arriving) + len(problems))
    for i, own_type in _settled(arriving, check).items():
        x = arriving[i]
        local = local_of(x.dtensor, own_type, x.comm)
        type = widened(own_type, mesh) if mesh is not None else own_type
        assert type is not None  # what arrives fits the mesh
        leaves[i] = DTensor(local, type, x.comm)
    return unflatten(spec, leaves)


@attrs.frozen
class _Arriving:
    """A torch DTensor at a place of a pytree, and what it may be here."""

    dtensor: TorchDTensor
    place: str
    types: Sequence[TensorType]
    """On its own mesh: more than one where its spec may mean different blocks."""
    comm: Comm[Any]

    @classmethod
    def of(
        cls, dtensor: TorchDTensor, place: str, comm: Comm[Any] | None, mesh: Mesh | None
    ) -> _Arriving:
        device_mesh = dtensor.device_mesh
        own = Mesh.from_device_mesh(device_mesh)
        types = types_of(dtensor, own)
        if mesh is not None and widened(types[0], mesh) is None:
            raise MeshError(
                f"{own!r} is no sub-mesh of {mesh!r}.",
                hint="A sub-mesh has axes of the same names, and all ranks along them.",
            )
        if comm is None:
            comm = comm_of(mesh or own, arrived(dtensor).device)
        refuse_simulated(comm)
        check_groups(device_mesh, types[0])
        remember(own, device_mesh)
        return cls(dtensor, place, types, comm)


def meant(dtensor: TorchDTensor) -> TensorType:
    """The type of a torch DTensor on its own mesh; collective where its spec leaves it open."""
    types = types_of(dtensor, Mesh.from_device_mesh(dtensor.device_mesh))
    if len(types) == 1:
        return types[0]
    return _fitting(_Arriving.of(dtensor, "", None, None), None)


def _settled(arriving: dict[int, _Arriving], check: Check | None) -> dict[int, TensorType]:
    """The type of each arriving tensor. All ranks agree on it, once for all tensors of a mesh."""
    settled: dict[int, TensorType] = {}
    groups: dict[tuple[Comm[Any], Mesh], list[int]] = {}
    for i, x in arriving.items():
        if len(x.types) > 1 and (check or x.comm.check) != "never":
            settled[i] = _fitting(x, check)
        else:
            settled[i] = x.types[0]
            groups.setdefault((x.comm, settled[i].mesh), []).append(i)
    for members in groups.values():
        _agree([(arriving[i], settled[i]) for i in members], check)
    return settled


def _agree(members: Sequence[tuple[_Arriving, TensorType]], check: Check | None) -> None:
    """Raises `CommError` on all ranks where types differ or a local tensor does not fit."""
    comm, mesh = members[0][0].comm, members[0][1].mesh
    mistakes = [
        f"{x.place} of {mistake}" if x.place else mistake
        for x, type in members
        if (mistake := comm.mistake(arrived(x.dtensor), type)) is not None
    ]
    facts = " ".join(f"{x.place} {type!r}" for x, type in members)
    mistake = "; ".join(mistakes) or None
    if (check or comm.check) != "never":
        comm.agree("from_torch", digest_of(facts), [mesh], mistake)
    elif mistake is not None:
        comm.refuse("from_torch", mistake, [mesh])


def _fitting(x: _Arriving, check: Check | None) -> TensorType:
    """The first type whose local shapes all ranks have; all ranks raise where there is none."""
    problem = ""
    for type in x.types:
        try:
            _agree([(x, type)], check)
            return type
        except CommError as error:
            problem = error.sentence
    raise LayoutError(
        "the blocks of this torch DTensor cannot be written: its uneven strided shards fit neither "
        "as an order of axes nor as cuts from left to right.",
        order=x.types[0],
        cuts=x.types[1],
        problem=problem,
        hint="Redistribute it in torch first, to placements without _StridedShard.",
    )


def _refuse(problems: dict[str, FdtensorError], count: int) -> None:
    if [*problems] == [""]:
        raise problems[""]
    raise ValueTreeError(
        f"{len(problems)} of {count} torch DTensors have no meaning here.",
        **{place: error.sentence for place, error in problems.items()},
        hint=next(iter(problems.values())).hint,
    )


def refuse_simulated(comm: Comm[Any]) -> None:
    """Raises `CommError` for a Comm of which torch has no counterpart."""
    if comm.rank is None:
        raise CommError(
            "a torch DTensor has the local tensor of one rank, but a value of this Comm has those "
            "of all.",
            comm=comm,
            hint="Use a FuncolComm: connect(mesh) where a process group is up.",
        )
