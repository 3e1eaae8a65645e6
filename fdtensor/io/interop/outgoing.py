"""`to_torch`: DTensors of this library, alone or in a pytree, as torch DTensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs
import torch

from fdtensor.io.interop.incoming import meant, refuse_simulated
from fdtensor.io.interop.layouts import layout_to_torch, same_blocks, widened
from fdtensor.io.interop.tensors import handed
from fdtensor.layouts.dtypes import dtype_name
from fdtensor.layouts.errors import FdtensorError, LayoutError, ValueTreeError
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.placement import Replicate
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.layouts.tree import flatten, paths, unflatten
from fdtensor.layouts.words import a_kind
from fdtensor.tensors.connect import redistribute
from fdtensor.tensors.dtensor import DTensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["to_torch"]


def to_torch(tree: Any, device_mesh: DeviceMesh | None = None, *, like: Any = None) -> Any:
    """A DTensor, or each one of a pytree, as the torch DTensor with the same blocks.

    It shares the memory of the local tensor. Other leaves come back as they are. With `like`, a
    pytree that has torch tensors at the same places, each becomes one with the mesh and placements
    of its counterpart, a plain tensor for a plain one: redistributed, collectively, where the
    blocks are others, and else without a copy. So a model takes its parameters back:

        params = from_torch(model.state_dict())
        ...
        model.load_state_dict(to_torch(params, like=model.state_dict()), assign=True)

    Differentiable. `device_mesh` is by default the one that the mesh came from, else
    `to_device_mesh` of it. The full strides are those of a dense tensor whose dims lie as the local
    ones do: channels last stays so, but on ranks whose block is empty or one channel wide. Raises
    `LayoutError` for blocks that no torch placements describe; in a pytree `ValueTreeError`, which
    names every such leaf and every one that is not like its counterpart.

    >>> def rows():
    ...     comm = connect(Mesh(x=2))
    ...     x = distribute(torch.arange(4), comm.mesh.layout("x"), comm)
    ...     return fd.io.to_torch(x).placements

    >>> with local_cluster(2) as cluster:
    ...     print(cluster.run(rows)[0])
    (Shard(dim=0),)
    """
    leaves, spec = flatten(tree, is_leaf=_is_ours)
    places = [""] if spec.is_leaf() else paths(spec, "tree")
    if spec.is_leaf() and not _is_ours(leaves[0]):
        raise LayoutError(
            f"got {a_kind(leaves[0])}, not a DTensor of this library.",
            hint="Pass a DTensor or a pytree that has some.",
        )
    models = None if like is None else _by_place(like)
    leaving_at: dict[int, _Leaving] = {}
    problems: dict[str, FdtensorError] = {}
    for i, leaf in enumerate(leaves):
        try:
            leaving = _Leaving.of(leaf, device_mesh, models, places[i])
            if leaving is not None:
                leaving_at[i] = leaving
        except FdtensorError as error:
            problems[places[i]] = error
    _refuse(problems, len(leaves))
    moving = {i: y for i, y in leaving_at.items() if y.moves}
    moved = redistribute({i: y.x for i, y in moving.items()}, {i: y.to for i, y in moving.items()})
    for i, y in leaving_at.items():
        local = moved[i].local if i in moved else y.x.local
        leaves[i] = local if y.plain else handed(local, y.type, y.x.comm, y.device_mesh)
    return unflatten(spec, leaves)


@attrs.frozen
class _Leaving:
    """A DTensor that goes, and as what."""

    x: DTensor[Any]
    to: TensorType
    """The type that it is redistributed to before."""
    type: TensorType
    """The same blocks on the mesh that torch has."""
    device_mesh: DeviceMesh | None
    plain: bool = False

    @property
    def moves(self) -> bool:
        """Whether its blocks are not there yet."""
        own = self.x.type
        same = own.mesh is self.to.mesh and own.layout.partial == self.to.layout.partial
        return not same or not same_blocks(own, self.to)

    @classmethod
    def of(
        cls,
        leaf: Any,
        device_mesh: DeviceMesh | None,
        models: Mapping[str, Any] | None,
        place: str,
    ) -> _Leaving | None:
        """How a leaf goes; None for one that stays as it is."""
        from torch.distributed.tensor import DTensor as TorchDTensor

        model = None if models is None else models.get(place)
        if not _is_ours(leaf):
            if isinstance(leaf, torch.Tensor) and isinstance(model, TorchDTensor):
                raise LayoutError("it is a plain tensor, but like has a torch DTensor.")
            return None
        refuse_simulated(leaf.comm)
        if models is None:
            layout_to_torch(leaf.type)  # raises where torch has no words for it
            return cls(leaf, leaf.type, leaf.type, device_mesh)
        if not isinstance(model, torch.Tensor):
            kind = "nothing" if model is None else type(model).__name__
            raise LayoutError(f"like has {kind} at this place.")
        if (leaf.shape, leaf.dtype) != (tuple(model.shape), model.dtype):
            raise LayoutError(f"it is {_told(leaf)}, but like has {_told(model)}.")
        if isinstance(model, TorchDTensor):
            own = meant(model)
            return cls(leaf, widened(own, leaf.mesh) or own, own, model.device_mesh)
        whole = leaf.type.with_layout(Layout(leaf.mesh, [Replicate()] * leaf.mesh.ndim))
        return cls(leaf, whole, whole, None, plain=True)


def _told(tensor: Any) -> str:
    return f"{dtype_name(tensor.dtype)}[{','.join(map(str, tensor.shape))}]"


def _by_place(like: Any) -> dict[str, Any]:
    leaves, spec = flatten(like)
    if spec.is_leaf() and not isinstance(leaves[0], torch.Tensor):
        raise LayoutError(
            f"like is {a_kind(leaves[0])}, not a tensor or a pytree that has some.",
            hint="Pass model.state_dict() for a model.",
        )
    places = [""] if spec.is_leaf() else paths(spec, "tree")
    return dict(zip(places, leaves, strict=True))


def _is_ours(node: object) -> bool:
    return isinstance(node, DTensor)


def _refuse(problems: Mapping[str, FdtensorError], count: int) -> None:
    """Raises one error for all leaves that cannot go."""
    if not problems:
        return
    first = next(iter(problems.values()))
    if [*problems] == [""]:
        raise first
    raise ValueTreeError(
        f"{len(problems)} of {count} leaves cannot become tensors of torch.",
        **{place: error.sentence for place, error in problems.items()},
        hint=first.hint or "Let like have a tensor of the same shape and dtype at every place.",
    )
