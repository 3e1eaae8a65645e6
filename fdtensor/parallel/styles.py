"""Parallel styles: how a module is split along a mesh axis, by the names that the field gives them.

    Colwise         a layer's weight is cut by what it gives; what it gives stays cut
    Rowwise         a layer's weight is cut by what it reads; a sum over the ranks ends it
    VocabParallel   an embedding or an output layer is cut by the words of its vocabulary
    SequenceParallel  parameters are whole; what goes in and comes out is cut along the sequence

Megatron-LM (Shoeybi et al., 2019, arXiv 1909.08053) has the first three, Korthikanti et al. (2022,
Reducing activation recomputation in large transformer models, arXiv 2205.05198) the last.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import attrs
import torch

from fdtensor.layouts.errors import MeshError, TraceError
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import Partial, Placement, Replicate, Shard, StridedShard
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.layouts.torch_private import ConvNd, ConvTransposeNd

__all__ = [
    "Colwise",
    "Role",
    "Rowwise",
    "SequenceParallel",
    "Style",
    "VocabParallel",
    "axes_of",
    "layouts_for",
    "matched",
    "pin",
    "placed",
    "roles_in",
    "styled",
]

End = int | Placement | None
"""How a value comes in or goes out: cut along a dim (from the end where negative), in a placement,
or as is cheapest."""


def _short(self: Any) -> str:
    """A style as it is written, without what is so by default."""
    fields = [(a.name, getattr(self, a.name), a.default) for a in attrs.fields(type(self))]
    words = ", ".join(f"{name}={value!r}" for name, value, default in fields if value != default)
    return f"{type(self).__name__}({words})"


@attrs.frozen(repr=False)
class Colwise:
    """The weight is cut by what it gives: a linear layer's rows, a convolution's channels out, an
    embedding's columns; the bias with it. `input` and `output` pin what goes in and comes out.

    `parts` is how many layers the weight has side by side, such as 3 for queries, keys and values:
    each is cut by itself."""

    input: End = None
    output: End = None
    parts: int = attrs.field(default=1, validator=attrs.validators.ge(1))

    __repr__ = _short


@attrs.frozen(repr=False)
class Rowwise:
    """The weight is cut by what it reads: a linear layer's columns, a convolution's channels in, an
    embedding's rows; the bias is whole. `input` and `output` pin what goes in and comes out."""

    input: End = None
    output: End = None

    __repr__ = _short


@attrs.frozen(repr=False)
class VocabParallel:
    """An embedding or an output layer of which each rank has a part of the vocabulary."""

    input: End = None
    output: End = None

    __repr__ = _short


@attrs.frozen(repr=False)
class SequenceParallel:
    """The parameters are whole; what goes in and comes out is cut along `dim`."""

    dim: int = 1

    __repr__ = _short

    @property
    def input(self) -> End:
        """How values come in."""
        return self.dim

    @property
    def output(self) -> End:
        """How values come out."""
        return self.dim


Style = Colwise | Rowwise | VocabParallel | SequenceParallel


@attrs.frozen
class Role:
    """What a parameter is to the op that reads it: which dim is what it gives, which it reads."""

    kind: str
    made: int | None
    read: int | None

    @property
    def is_weight(self) -> bool:
        """Whether it is more than a bias."""
        return self.read is not None


BIAS = Role("bias", 0, None)


def styled(style: Any) -> Style:
    """A style from ours, or from the classes of torch that have the same meaning."""
    if isinstance(style, (Colwise, Rowwise, VocabParallel, SequenceParallel)):
        return style
    name = style.__name__ if isinstance(style, type) else type(style).__name__
    if isinstance(style, type) and (name in _OURS or name in _TORCH):
        return styled(style())
    if name not in _TORCH:
        raise TraceError(
            f"{style!r} is not a parallel style.",
            hint="Use Colwise(), Rowwise(), VocabParallel() or SequenceParallel().",
        )
    if name == "SequenceParallel":
        return SequenceParallel(style.sequence_sharding[0].dim)
    kind, usual = _TORCH[name]
    ends = {"input": _only(style.input_layouts), "output": _only(style.output_layouts)}
    return kind(**{k: None if e == usual[k] else e for k, e in ends.items()})


_OURS = {"Colwise", "Rowwise", "VocabParallel", "SequenceParallel"}

_TORCH: dict[str, Any] = {
    "ColwiseParallel": (Colwise, {"input": Replicate(), "output": -1}),
    "RowwiseParallel": (Rowwise, {"input": -1, "output": Replicate()}),
    "SequenceParallel": (SequenceParallel, {}),
}
"""By the name of a class of torch, ours and the ends that it has by default."""


def _only(layouts: Sequence[Any]) -> End:
    """The one placement that torch has for a value."""
    (p,) = layouts
    match type(p).__name__:
        case "Shard":
            return p.dim
        case "Partial":
            return Partial(p.reduce_op)
    return Replicate()


def axes_of(mesh: Mesh, axis: str | Sequence[str] | None) -> tuple[str, ...]:
    """The axes that modules are split along: those that are named, else the one there is, or tp."""
    if axis is None:
        if mesh.ndim != 1 and "tp" not in mesh.axes:
            raise MeshError(
                f"none of the {mesh.ndim} axes was named, and none is called 'tp'.",
                mesh=mesh,
                hint=f"Pass axis={mesh.axes[-1]!r}, or another of them.",
            )
        return ("tp",) if "tp" in mesh.axes else mesh.axes
    axes = (axis,) if isinstance(axis, str) else tuple(axis)
    for name in axes:
        if name not in mesh.axes:
            raise MeshError(
                f"the mesh has no axis {name!r}.",
                mesh=mesh,
                hint=f"Pass axis={mesh.axes[-1]!r}, or another of its axes.",
            )
    return axes


def matched(styles: Mapping[str, Any], names: Collection[str]) -> dict[str, Style]:
    """The style of each module that a name or a glob means; a name means more than a glob.

    A `*` stands for a part between dots. Raises `TraceError` for what means no module, and where
    globs give a module two styles.
    """
    matches: dict[str, tuple[bool, str, Style]] = {}
    missing: dict[str, str] = {}
    for pattern, given in styles.items():
        style = styled(given)
        names_meant = [n for n in names if n == pattern] or [
            n for n in names if n and _means(pattern, n)
        ]
        if not names_meant:
            near = difflib.get_close_matches(pattern, list(names), n=3, cutoff=0.4)
            missing[pattern] = f"near it: {', '.join(near)}" if near else "nothing is near it"
        for name in names_meant:
            exact = name == pattern
            known = matches.get(name)
            if known is not None and known[0] == exact and known[2] != style:
                raise TraceError(
                    f"module {name!r} is given two styles.",
                    **{known[1]: known[2], pattern: style},
                    hint="Name it without a glob, or make the globs narrower.",
                )
            if known is None or exact:
                matches[name] = exact, pattern, style
    if missing:
        raise TraceError(
            f"no module has the name {' or '.join(map(repr, missing))}.",
            **missing,
            hint='Names are those of model.named_modules(); "layers.*.mlp.up" is a glob.',
        )
    return {name: style for name, (_, _, style) in matches.items()}


def _means(pattern: str, name: str) -> bool:
    parts, names = pattern.split("."), name.split(".")
    return len(parts) == len(names) and all(map(fnmatchcase, names, parts))


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
    """
    axes = axes_of(mesh, axis)
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

    Raises `TraceError` where one is to be cut in two ways.
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
        layout = Layout(mesh, [placement if a in axes else Replicate() for a in mesh.axes])
        TensorType(tuple(tensor.shape), tensor.dtype, layout)  # raises where it cannot be
        layouts[name] = layout
    return layouts


def identity(tensor: torch.Tensor) -> Any:
    """What tensors have in common that are one."""
    if tensor.device.type == "meta" or not tensor.numel():
        return id(tensor)
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def roles_in(module: torch.nn.Module) -> dict[str, Role | None]:
    """The roles of the parameters that a module itself has, by what kind of module it is."""
    names = dict(module.named_parameters(recurse=False))
    kinds: list[tuple[Any, Role]] = [
        (torch.nn.Embedding, Role("embedding", 1, 0)),
        (torch.nn.EmbeddingBag, Role("embedding", 1, 0)),
        (ConvTransposeNd, Role("convolution", 1, 0)),
        (ConvNd, Role("convolution", 0, 1)),
        (torch.nn.Bilinear, Role("linear", 0, 1)),
    ]
    weight = next((role for kind, role in kinds if isinstance(module, kind)), None)
    shaped = hasattr(module, "in_features") and hasattr(module, "out_features")
    if weight is None and (isinstance(module, torch.nn.Linear) or shaped):
        weight = Role("linear", 0, 1)
    if weight is None:
        return dict.fromkeys(names)
    roles: dict[str, Role | None] = dict.fromkeys(names)
    roles |= {n: r for n, r in (("weight", weight), ("bias", BIAS)) if n in names}
    return roles
