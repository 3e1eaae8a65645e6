"""The errors for a value of another kind than belongs in its place: what it is, and what to write.

They look at values by what they have, so that every file that takes a layout can ask here.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from fdtensor.layouts.errors import ArgumentError, CommError, LayoutError, MeshError
from fdtensor.layouts.kinds import is_dict, is_list, is_tuple
from fdtensor.layouts.placement import Placement
from fdtensor.layouts.record import integer, natural
from fdtensor.layouts.tree import flatten
from fdtensor.layouts.words import shown

__all__ = [
    "check_path",
    "no_argument",
    "no_comm",
    "no_cuts",
    "no_device_mesh",
    "no_layout",
    "no_mesh",
    "no_rank",
    "no_type",
    "refuse_no_layouts",
    "refuse_no_tensor",
    "shown",
    "whole_number",
]


def no_argument(name: str, value: object, kind: str, hint: str) -> ArgumentError:
    """The error for an argument, by its name, that is not of the kind that a function takes."""
    return ArgumentError(f"{name}={shown(value)} is no {kind}.", hint=hint)


def whole_number(
    name: str, value: object, kind: str, hint: str, least: int = 1, most: int = 2**64
) -> int:
    """An argument as an int; raises `ArgumentError` for what is none, or out of its range."""
    try:
        number = integer(value)
    except (TypeError, AttributeError):
        raise no_argument(name, value, kind, hint) from None
    if not least <= number <= most:
        raise no_argument(name, value, kind, hint)
    return number


def check_path(name: str, value: object) -> None:
    """Raises `ArgumentError` for an argument that is no path."""
    if not isinstance(value, (str, os.PathLike)):
        raise no_argument(name, value, "path", "Pass a str or a pathlib.Path.")


def no_layout(value: object, what: str = "") -> LayoutError:
    """The error for what is no Layout where one belongs; `what` says where it stands."""
    sentence = f"{what} is {shown(value)}, which is not a Layout."
    if not what:
        sentence = f"{shown(value)} is not a Layout."
    return LayoutError(sentence, hint=f"Write {_layout(value)}.")


def _layout(value: object) -> str:
    """What was meant, perhaps, by a value that is no Layout."""
    if isinstance(value, Placement):
        return f"Layout(mesh, [{value!r}]), with one placement for each axis of the mesh"
    if (is_list(value) or is_tuple(value)) and value:
        if all(isinstance(entry, Placement) for entry in value):
            return f"Layout(mesh, {value!r}), with one placement for each axis of the mesh"
        if all(entry is None or isinstance(entry, (str, tuple)) for entry in value):
            return f"mesh.layout({', '.join(map(repr, value))})"
    if isinstance(value, str):
        return f"mesh.layout({value!r})"
    if hasattr(value, "comm") and hasattr(value, "type"):
        return "x.layout for that of a DTensor"
    if hasattr(value, "layout") and hasattr(value, "shape"):
        return "type.layout for that of a TensorType"
    if callable(getattr(value, "layout", None)):
        return "mesh.layout('dp', None): for each dim the axis that cuts it, or None"
    return "Layout(mesh, placements)"


def refuse_no_layouts(tree: object, is_leaf: Callable[[object], bool], what: str) -> None:
    """Raises `LayoutError` for the first leaf of a pytree of layouts that is none."""
    if is_list(tree) or is_tuple(tree):
        if tree and all(isinstance(entry, Placement) for entry in tree):
            raise no_layout(tree, what)
        for i, entry in enumerate(tree):
            refuse_no_layouts(entry, is_leaf, f"{what}[{i}]")
    elif is_dict(tree):
        for key, entry in tree.items():
            refuse_no_layouts(entry, is_leaf, f"{what}[{key!r}]")
    elif tree is not None and not is_leaf(tree) and _is_meant_as_one(tree):
        raise no_layout(tree, what)


def _is_meant_as_one(value: object) -> bool:
    """Whether a value that is no Layout is no pytree of some either."""
    named = any(hasattr(value, name) for name in ("axes", "layout"))
    return named or flatten(value)[1].is_leaf()


def no_placement(value: object) -> LayoutError:
    """The error for what is no placement."""
    return LayoutError(
        f"{shown(value)} is not a placement.",
        hint="Use Replicate(), Shard(dim), StridedShard(dim, split_factor), "
        "Ragged(dim, sizes) or Partial(reduce_op).",
    )


def no_cuts(dim: object) -> tuple[str, ...]:
    """No axes, for a dim that none cuts; raises `LayoutError` for what is no dim."""
    if natural(dim) is None:
        raise LayoutError(
            f"dim={shown(dim)} is not a tensor dim.", hint="Dims are ints, counted from 0."
        )
    return ()


def no_axes(value: object) -> LayoutError:
    """The error for what names no axes where `Mesh.layout` takes those of a dim."""
    given = [*value] if is_list(value) or is_tuple(value) else [value]
    hint = "Write an axis, a tuple of axes from major to minor, or None."
    if given and all(isinstance(entry, Placement) for entry in given):
        hint = f"Write {_layout(value)}; mesh.layout takes for each dim the axis that cuts it."
    return LayoutError(f"{shown(value)} names no mesh axes.", hint=hint)


def no_reduce_ops(value: object) -> LayoutError:
    """The error for what gives `Mesh.layout` no reduce ops by axis."""
    return LayoutError(
        f"partial={shown(value)} gives no axis a reduce op.",
        hint="Write partial={axis: 'sum'}, with the axes that hold pending terms.",
    )


def no_mesh(value: object) -> LayoutError:
    """The error for what is no Mesh where one belongs."""
    hint = "Write Mesh(dp=2, tp=4)."
    if hasattr(value, "mesh_dim_names"):
        hint = "Write Mesh.from_device_mesh(device_mesh)."
    elif hasattr(value, "mesh"):
        hint = "Write its .mesh."
    return LayoutError(f"{shown(value)} is not a Mesh.", hint=hint)


def no_device_mesh(value: object) -> LayoutError:
    """The error for what is no DeviceMesh of torch where one belongs."""
    return LayoutError(
        f"{shown(value)} is not a DeviceMesh.",
        hint="Pass what torch.distributed.init_device_mesh returned, or write Mesh(dp=2, tp=4).",
    )


def no_type(value: object) -> LayoutError:
    """The error for what is no TensorType where one belongs."""
    is_distributed = hasattr(value, "comm") and hasattr(value, "type")
    hint = "Write x.type." if is_distributed else "Write TensorType(shape, dtype, layout)."
    return LayoutError(f"{shown(value)} is not a TensorType.", hint=hint)


def no_comm(value: object) -> CommError:
    """The error for what is no Comm where one belongs."""
    has_one = hasattr(value, "comm")
    return CommError(
        f"{shown(value)} is not a Comm.",
        hint="Write its .comm." if has_one else "Pass connect(mesh).",
    )


def refuse_no_tensor(value: object) -> None:
    """Raises `LayoutError` for what has no layout, since it is no tensor."""
    if not isinstance(value, torch.Tensor):
        raise LayoutError(
            f"{shown(value)} is not a tensor, so it has no layout.",
            hint="Give a tensor of the function that is traced.",
        )


def no_rank(value: object) -> MeshError:
    """The error for what is no rank."""
    return MeshError(f"{shown(value)} is not a rank.", hint="Ranks are ints that count from 0.")
