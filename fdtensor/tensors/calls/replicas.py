"""`on_replicas`: a function that cannot be traced, run by every rank on the full operands."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fdtensor.layouts.callsite import warn_user
from fdtensor.layouts.errors import DataDependentError, FallbackWarning
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.layouts.tree import flatten, unflatten
from fdtensor.ops.graph import Full
from fdtensor.ops.randomness import Drawing
from fdtensor.plans.local_tensors import empty
from fdtensor.programs.meshes import one_mesh
from fdtensor.programs.options import Options
from fdtensor.programs.out_layouts import as_arguments, asked_layouts, resolved
from fdtensor.programs.recording import name_of
from fdtensor.runtime.comm import inside
from fdtensor.tensors.dtensor import DTensor, is_dtensor

__all__ = ["ANSWERS", "on_replicas", "placed", "replica", "warn_of_replicas"]


def on_replicas(f: Callable[..., Any], leaves: Sequence[Any], spec: Any, comm: Any) -> Any:
    """The results of `f` for these arguments, its tensors as replicated DTensors. Differentiable.

    Collective: all ranks gather the operands. Ranks outside of their mesh get the same Python
    values, and empty tensors.
    """
    mesh = one_mesh([leaf.type for leaf in leaves if isinstance(leaf, DTensor)])
    is_tensor = [isinstance(leaf, DTensor) for leaf in leaves]
    if any(isinstance(leaf, DTensor) and leaf.layout is not mesh.layout() for leaf in leaves):
        comm.meet("values on every rank", mesh)
    wholes = [
        leaf.redistribute(leaf.type.mesh.layout()).local if isinstance(leaf, DTensor) else leaf
        for leaf in leaves
    ]
    first = next(w for w, t in zip(wholes, is_tensor, strict=True) if t)
    results: list[Any] = []
    rank = comm.rank
    if inside(comm, mesh):
        for i in range(len(comm.leaves(first))):
            full = [comm.leaves(w)[i] if t else w for w, t in zip(wholes, is_tensor, strict=True)]
            args, kwargs = unflatten(spec, full)
            with Drawing():
                results.append(flatten(f(*args, **kwargs)))
    answer = None
    if results:
        outs, tree = results[0]
        answer = tree, [replica(o, mesh) if isinstance(o, torch.Tensor) else o for o in outs]
    if rank is not None and set(comm.mesh.order) != set(mesh.order):
        answer = _shared_with_all(answer, comm, mesh.order[0])
    assert answer is not None
    tree, outs = answer
    for i, out in enumerate(outs):
        if isinstance(out, TensorType):
            blocks = [blocks[i] for blocks, _ in results]
            value = comm.value(blocks) if blocks else empty(out, comm.rank, comm.device)
            outs[i] = DTensor(value, out, comm)
    return unflatten(tree, outs)


def placed(
    f: Callable[..., Any], result: Any, leaves: Sequence[Any], spec: Any, options: Options
) -> Any:
    """The results of `f` for these arguments, in the layouts that the options ask for.

    Where they leave that open, what is shaped like an argument gets its layout, unless `eager`.
    """
    outs, tree = flatten(result, is_leaf=is_dtensor)
    types = [leaf.type if isinstance(leaf, DTensor) else None for leaf in leaves]
    if options.out_layouts is not None:
        return _moved(result, asked_layouts(tree, resolved(options.out_layouts, f, spec, types)))
    if options.eager:
        return result
    fulls = [Full(o.shape, o.dtype) if isinstance(o, DTensor) else None for o in outs]
    return _moved(result, as_arguments(fulls, tree, types, spec))


def _moved(result: Any, layouts: Sequence[Layout | None]) -> Any:
    """A pytree whose DTensors have the layout that stands for their leaf, where one does."""
    leaves, tree = flatten(result, is_leaf=is_dtensor)
    moved = [x if a is None else x.redistribute(a) for x, a in zip(leaves, layouts, strict=True)]
    return unflatten(tree, moved)


def replica(tensor: torch.Tensor, mesh: Mesh) -> TensorType:
    """The type of a tensor that all ranks of a mesh hold."""
    return TensorType(tuple(tensor.shape), tensor.dtype, mesh.layout())


def _shared_with_all(answer: Any, comm: Any, root: int) -> Any:
    """The value of `root` on every rank of a Comm: Python values, also on ranks outside a mesh."""
    data = pickle.dumps(answer) if comm.rank == root else b""
    (length,) = comm.share([len(data)], root)
    shared = b""
    for start in range(0, length, 512):
        part = data[start : start + 512].ljust(512, b"\0")
        numbers = comm.share(struct.unpack("64q", part), root)
        shared += struct.pack("64q", *numbers)
    return pickle.loads(shared[:length])


def _equal(a: torch.Tensor, b: torch.Tensor) -> Any:
    return (a == b).all() if a.shape == b.shape else False


def _allclose(a: torch.Tensor, b: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.isclose(a, b, *args, **kwargs).all()


ANSWERS: dict[Any, Callable[..., Any]] = {
    torch.equal: _equal,
    torch.Tensor.equal: _equal,
    torch.ops.aten.equal.default: _equal,
    torch.allclose: _allclose,
    torch.Tensor.allclose: _allclose,
}
"""Functions that return a Python number, as ones that return it as a tensor."""


def warn_of_replicas(f: Callable[..., Any], error: DataDependentError, said: set[object]) -> None:
    """Says that a function runs on replicated operands, once for each reason that is not `said`."""
    reason = f"{error.sentence} {error.facts.get('line', '')}".rstrip()
    if reason not in said:
        said.add(reason)
        text = f"{name_of(f)} runs on replicated operands, whole on every rank: {reason}"
        warn_user(text, FallbackWarning)
