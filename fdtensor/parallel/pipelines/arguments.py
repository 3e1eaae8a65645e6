"""What a pipeline is given: read, and refused where it is of no use."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from typing import Any

import torch

from fdtensor.layouts.callsite import warn_user
from fdtensor.layouts.errors import CommError, FallbackWarning, TraceError
from fdtensor.layouts.expected import no_argument
from fdtensor.layouts.kinds import is_iterable
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.tree import flatten, paths
from fdtensor.layouts.words import shown
from fdtensor.programs.tracer import type_of
from fdtensor.tensors.dtensor import DTensor, is_dtensor

__all__ = ["comm_of", "refuse_no_batch", "refuse_unfit", "trees_of", "values_of", "warn_of_inputs"]


def trees_of(params: Any, x: Any, target: Any) -> tuple[Any, Any, Any]:
    """The arguments of a step, params as a list."""
    try:
        return [*params], x, target
    except TypeError:
        hint = "Give a list with a pytree of DTensors for each stage, {} for one without."
        raise no_argument("params", params, "list of pytrees", hint) from None


def refuse_no_batch(**trees: Any) -> None:
    """Raises `ArgumentError` for a part of the batch without a DTensor, where stages fail on it."""
    for name, tree in trees.items():
        if all(type_of(x) is None for x in flatten(tree, is_leaf=is_dtensor)[0]):
            hint = "Write step(params, x, target), with what the stages and the loss compute with."
            raise no_argument(name, tree, "pytree of DTensors", hint) from None


def warn_of_inputs(x: Any) -> None:
    """Warns where the batch wants a gradient: a pipeline gives those of parameters alone."""
    leaves = flatten(x, is_leaf=is_dtensor)[0]
    if torch.is_grad_enabled() and any(is_dtensor(leaf) and leaf.requires_grad for leaf in leaves):
        warn_user(
            "x requires grad, and a pipeline gives it no gradient: only those of params. Pass its "
            ".detach(), or put it among the parameters of the first stage.",
            FallbackWarning,
        )


def values_of(tree: Any) -> list[Any]:
    """The local values of the DTensors of a pytree."""
    leaves, _ = flatten(tree, is_leaf=lambda x: isinstance(x, DTensor))
    return [leaf.local for leaf in leaves if isinstance(leaf, DTensor)]


def comm_of(trees: Any) -> Any:
    """The one Comm that all DTensors are on, which has the ranks of all meshes."""
    leaves, spec = flatten(trees, is_leaf=lambda x: isinstance(x, DTensor))
    comms = {id(x.comm): x.comm for x in leaves if isinstance(x, DTensor)}
    names = zip(leaves, paths(spec, "args"), strict=True)
    plain = [name for x, name in names if isinstance(x, torch.Tensor)]
    if plain or len(comms) != 1:
        raise CommError(
            "a pipeline takes DTensors on one Comm.",
            tensors=", ".join(plain) or f"on {len(comms)} Comms",
            hint="comm = connect(Mesh(x=4)) has all ranks; distribute(tensor, mesh.layout(), comm) "
            "takes meshes of some of them.",
        )
    (comm,) = comms.values()
    return comm


def refuse_unfit(stages: Sequence[Any], loss: object, meshes: Sequence[Any]) -> None:
    """Raises `TraceError` for stages without functions or meshes, or with ranks in common."""
    hint = "Write pipeline([f0, f1], loss, meshes=[m0, m1], microbatches=8)."
    for name, given, kind in (("stages", stages, "functions"), ("meshes", meshes, "meshes")):
        if not (isinstance(given, Sized) and is_iterable(given)):
            raise no_argument(name, given, f"list of {kind}", hint)
    wrong = [f for f in (*stages, loss) if not callable(f)]
    if not stages or wrong:
        raise TraceError(
            f"{shown(wrong[0]) if wrong else 'an empty list'} is no "
            f"{'loss' if stages and all(map(callable, stages)) else 'stage'} of a pipeline.",
            hint=hint,
        )
    others = [mesh for mesh in meshes if not isinstance(mesh, Mesh)]
    if others or len(meshes) != len(stages):
        raise TraceError(
            f"{len(stages)} stages have {len(meshes)} meshes."
            if not others
            else f"{shown(others[0])} is no Mesh.",
            hint="Give one mesh for each stage: Mesh.from_ranks([0, 1], 'dp') has two ranks.",
        )
    several = list(dict.fromkeys(meshes))
    for i, a in enumerate(several):
        for b in several[:i]:
            if set(a.order) & set(b.order):
                raise TraceError(
                    "two meshes of a pipeline have ranks in common.",
                    one=a,
                    other=b,
                    hint="Each rank is on the mesh of one place; several stages may share a mesh.",
                )
