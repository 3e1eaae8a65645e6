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
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import attrs

from fdtensor.layouts.errors import LayoutError, MeshError, TraceError
from fdtensor.layouts.expected import no_mesh
from fdtensor.layouts.kinds import is_list, is_tuple
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import Partial, Placement, Replicate
from fdtensor.layouts.record import natural
from fdtensor.layouts.words import shown

__all__ = [
    "Colwise",
    "Rowwise",
    "SequenceParallel",
    "Style",
    "VocabParallel",
    "axes_of",
    "matched",
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


def _count(_: Any, attribute: attrs.Attribute[Any], value: object) -> None:
    if not natural(value):
        raise LayoutError(
            f"{attribute.name}={value!r} is no number of layers.",
            hint="Write how many lie side by side in the weight: parts=3 for q, k and v.",
        )


@attrs.frozen(repr=False)
class Colwise:
    """The weight is cut by what it gives: a linear layer's rows, a convolution's channels out, an
    embedding's columns; the bias with it. `input` and `output` pin what goes in and comes out.

    `parts` is how many layers the weight has side by side, such as 3 for queries, keys and values:
    each is cut by itself.

    >>> styles = {"up": fd.parallel.Colwise()}
    >>> model = torch.nn.ModuleDict({"up": torch.nn.Linear(4, 8)})
    >>> print(fd.parallel.layouts_for(model, Mesh(tp=2), styles)["up.weight"])
    (tp=S(0))
    """

    input: End = None
    output: End = None
    parts: int = attrs.field(default=1, validator=_count)

    __repr__ = _short


@attrs.frozen(repr=False)
class Rowwise:
    """The weight is cut by what it reads: a linear layer's columns, a convolution's channels in, an
    embedding's rows; the bias is whole. `input` and `output` pin what goes in and comes out.

    >>> styles = {"down": fd.parallel.Rowwise()}
    >>> model = torch.nn.ModuleDict({"down": torch.nn.Linear(8, 4)})
    >>> print(fd.parallel.layouts_for(model, Mesh(tp=2), styles)["down.weight"])
    (tp=S(1))
    """

    input: End = None
    output: End = None

    __repr__ = _short


@attrs.frozen(repr=False)
class VocabParallel:
    """An embedding or an output layer of which each rank has a part of the vocabulary.

    >>> styles = {"token": fd.parallel.VocabParallel()}
    >>> model = torch.nn.ModuleDict({"token": torch.nn.Embedding(10, 4)})
    >>> print(fd.parallel.layouts_for(model, Mesh(tp=2), styles)["token.weight"])
    (tp=S(0))
    """

    input: End = None
    output: End = None

    __repr__ = _short


@attrs.frozen(repr=False)
class SequenceParallel:
    """The parameters are whole; what goes in and comes out is cut along `dim`.

    >>> styles = {"norm": fd.parallel.SequenceParallel()}
    >>> model = torch.nn.ModuleDict({"norm": torch.nn.LayerNorm(4)})
    >>> print(fd.parallel.layouts_for(model, Mesh(tp=2), styles)["norm.weight"])
    (tp=R)
    """

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
    if not isinstance(mesh, Mesh):
        raise no_mesh(mesh)
    if axis is None:
        if mesh.ndim != 1 and "tp" not in mesh.axes:
            raise MeshError(
                f"none of the {mesh.ndim} axes was named, and none is called 'tp'.",
                mesh=mesh,
                hint=f"Pass axis={mesh.axes[-1]!r}, or another of them.",
            )
        return ("tp",) if "tp" in mesh.axes else mesh.axes
    axes: tuple[Any, ...] = tuple(axis) if is_list(axis) or is_tuple(axis) else (axis,)
    for name in axes:
        if name not in mesh.axes:
            raise MeshError(
                f"the mesh has no axis {name!r}.",
                mesh=mesh,
                hint=f"Pass axis={mesh.axes[-1]!r}, or another of its axes.",
            )
    if not axes or len(set(axes)) < len(axes):
        raise MeshError(
            f"axis={axis!r} names {'an axis twice' if axes else 'no axis'}.",
            mesh=mesh,
            hint=f"Pass axis={mesh.axes[-1]!r}, or another of its axes.",
        )
    return axes


def matched(styles: Mapping[str, Any], names: Collection[str]) -> dict[str, Style]:
    """The style of each module that a name or a glob means; a name means more than a glob.

    A `*` stands for a part between dots, or where that means no module for several of them: so
    `"*.q_proj"` is that of all layers. Raises `TraceError` for what means no module, and where
    globs give a module two styles.
    """
    if not isinstance(styles, Mapping):
        raise TraceError(
            f"styles are {shown(styles)}, which names no modules.",
            hint='Write {"layers.*.mlp.up": Colwise()}: styles by the names of modules, or globs.',
        )
    matches: dict[str, tuple[bool, str, Style]] = {}
    missing: dict[str, str] = {}
    for pattern, given in styles.items():
        style = styled(given)
        names_meant = (
            [n for n in names if n == pattern]
            or [n for n in names if n and _means(pattern, n)]
            or [n for n in names if n and fnmatchcase(n, pattern)]
        )
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
