"""`layouts_for`: the layouts that styles give to the tensors of a module."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from fdtensor.layouts.errors import TraceError
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import Placement, Replicate, Shard, StridedShard
from fdtensor.layouts.signatures import named_arguments
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.layouts.words import shown
from fdtensor.parallel.roles import Role, roles_in
from fdtensor.parallel.styles import (
    Colwise,
    End,
    Rowwise,
    SequenceParallel,
    Style,
    VocabParallel,
    axes_of,
    matched,
)

__all__ = ["identity", "laid", "layouts_for", "pin", "placed"]


def placed(style: Style, name: str, roles: Mapping[str, Role | None]) -> dict[str, Placement]:
    """The placement of each parameter of module `name`, from the roles of its parameters.

    Raises `TraceError` where the style has no meaning for them.
    """
    if isinstance(style, SequenceParallel):
        return dict.fromkeys(roles, Replicate())
    if not any(role is not None and role.is_weight for role in roles.values()):
        raise TraceError(
            f"{type(style).__name__} has no meaning for module {name!r}.",
            parameters=", ".join(roles) or "none of its own",
            hint="It is for linear layers, embeddings and convolutions: name those inside it, or "
            "give norms SequenceParallel().",
        )
    return {key: _placement(style, role) for key, role in roles.items()}


def _placement(style: Style, role: Role | None) -> Placement:
    if role is None:
        return Replicate()
    match style:
        case Colwise(parts=parts):
            if parts > 1 and role.made is not None:
                return StridedShard(role.made, parts)
            dim = role.made
        case Rowwise():
            dim = role.read
        case VocabParallel():
            dim = role.read if role.kind == "embedding" else role.made
        case SequenceParallel():
            dim = None
    return Replicate() if dim is None else Shard(dim)


def pin(end: End, ndim: int, mesh: Mesh, axes: Iterable[str], name: str) -> Layout:
    """The layout that an end of module `name` has, for a value of so many dims."""
    placement: Placement = Replicate()
    if isinstance(end, int):
        if not -ndim <= end < ndim:
            raise TraceError(
                f"module {name!r} is to cut dim {end} of a value that has {ndim} dims.",
                hint="Give a dim that it has.",
            )
        placement = Shard(end % ndim)
    elif end is not None:
        placement = end
    along = dict.fromkeys(axes, placement)
    return Layout(mesh, [along.get(axis) or Replicate() for axis in mesh.axes])


@named_arguments
def layouts_for(
    module: torch.nn.Module,
    mesh: Mesh,
    styles: Mapping[str, Any],
    *,
    axis: str | Sequence[str] | None = None,
) -> dict[str, Layout]:
    """The layout of each parameter and buffer of a module, by its name: replicated but for styles.

    For `distribute` and `spmd` with `torch.func.functional_call`. `styles` maps names of modules,
    or globs, to styles; `axis` is by default the only one of the mesh, or 'tp'. A parameter that
    modules share has one layout. Raises `TraceError` for a name that means no module, a style that
    has no meaning for a module, and a shared parameter that is to be cut in two ways.

    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    >>> styles = {"0": fd.parallel.Colwise(), "2": fd.parallel.Rowwise()}
    >>> layouts = fd.parallel.layouts_for(model, Mesh(tp=2), styles)
    >>> for name, layout in layouts.items():
    ...     print(name, layout)
    0.weight (tp=S(0))
    0.bias (tp=S(0))
    2.weight (tp=S(1))
    2.bias (tp=R)
    """
    axes = axes_of(mesh, axis)
    if not isinstance(module, torch.nn.Module):
        raise TraceError(
            f"{shown(module)} is no module.",
            hint="Give the torch.nn.Module itself; its tensors may be on the meta device.",
        )
    modules = dict(module.named_modules(remove_duplicate=False))
    tensors: dict[str, torch.Tensor] = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    placement_of: dict[str, Placement] = {}
    for name, style in matched(styles, modules).items():
        roles = roles_in(modules[name])
        prefix = f"{name}." if name else ""
        placement_of |= {f"{prefix}{k}": p for k, p in placed(style, name, roles).items()}
    return laid(tensors, placement_of, mesh, axes)


def laid(
    tensors: Mapping[str, torch.Tensor],
    placement_of: Mapping[str, Placement],
    mesh: Mesh,
    axes: Collection[str],
) -> dict[str, Layout]:
    """The layouts of tensors by name, of which those that are one have one.

    Raises `TraceError` where one is to be cut in two ways, or has no such parts.
    """
    shared: dict[Any, str] = {}
    layouts: dict[str, Layout] = {}
    for name, placement in placement_of.items():
        first = shared.setdefault(identity(tensors[name]), name)
        if placement_of[first] != placement:
            raise TraceError(
                f"{first!r} and {name!r} are one parameter, to be cut in two ways.",
                **{first: placement_of[first], name: placement},
                hint="Give both modules styles that agree, such as VocabParallel().",
            )
    for name, tensor in tensors.items():
        first = shared.get(identity(tensor))
        placement = Replicate() if first is None else placement_of[first]
        _refuse_unequal_parts(name, tensor, placement)
        layout = Layout(mesh, [placement if a in axes else Replicate() for a in mesh.axes])
        TensorType(tuple(tensor.shape), tensor.dtype, layout)  # raises where it cannot be
        layouts[name] = layout
    return layouts


def _refuse_unequal_parts(name: str, tensor: torch.Tensor, placement: Placement) -> None:
    """Raises where a tensor is no number of layers of one size."""
    if isinstance(placement, StridedShard) and tensor.shape[placement.dim] % placement.split_factor:
        raise TraceError(
            f"{name!r} is cut into {placement.split_factor} layers that have not one size.",
            shape=list(tensor.shape),
            dim=placement.dim,
            hint="Colwise(parts=n) is for layers of one size that lie side by side in a weight.",
        )


def identity(tensor: torch.Tensor) -> Any:
    """The key that equal tensors have in common."""
    if tensor.device.type == "meta" or not tensor.numel():
        return id(tensor)
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype
