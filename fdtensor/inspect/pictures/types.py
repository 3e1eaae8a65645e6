"""`of_type`, `of_dtensor`, `of_mesh`: what pictures of types, DTensors and meshes say."""

from __future__ import annotations

from math import prod
from typing import Any

import attrs
import torch
from typing_extensions import assert_never

from fdtensor.inspect.pictures.facts import Blocks, Description, Facts, Note, Section
from fdtensor.inspect.pictures.holders import dims_of, mesh_text, most_nbytes, ranks_text, terms_of
from fdtensor.inspect.pictures.panels import Values, blocks_of, value_texts
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import Partial, Ragged, Replicate, Shard, Spans, StridedShard
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.layouts.torch_private import is_functorch_wrapped_tensor
from fdtensor.plans.text import bytes_text
from fdtensor.tensors.dtensor import DTensor, due

__all__ = ["axes_of", "legend", "of_dtensor", "of_mesh", "of_type"]

MOST_VALUES, MOST_ROWS, MOST_PANELS, MOST_TERMS, WIDTH = 512, 24, 12, 4, 76
"""How many elements are shown, in how many rows and panels, of how many terms, how wide."""


def of_type(type: TensorType) -> Description:
    """Which rank holds which indices of a tensor of this type."""
    blocks = blocks_of(type, "")
    return Description(_title(type), (_facts(type), blocks, *legend(type)))


def of_dtensor(x: DTensor[Any]) -> Description:
    """The same of a DTensor, with its values where there are few: of all ranks, or of this one.

    Of one that owes a sum these are the terms: one rank may look alone.
    """
    x = due(x)
    type = x.type
    locals_of = _held(x)
    rank = x.comm.rank
    sections: list[Section] = [_facts(type)]
    if not locals_of or not _fits(type, locals_of):
        sections.append(blocks_of(type, ""))
    else:
        values = value_texts(type, {r: t.tolist() for r, t in locals_of.items()}, _shown)
        sections += [*_with_values(type, values, rank), *_differing(type, locals_of)]
        if rank is not None:
            sections.append(Note(f"values are those that rank {rank} holds"))
    return Description(_title(type), (*sections, *legend(type)))


def _with_values(type: TensorType, values: Values, rank: int | None) -> list[Section]:
    """The blocks with their values; of each pending term, or of those that `rank` holds."""
    if not type.layout.partial:
        return [blocks_of(type, "", values=values)]
    terms = terms_of(type)
    shown = [t for t in terms if rank is None or _of_term(type, rank, t[1])][:MOST_TERMS]
    drawn = [blocks_of(type, f"the term at {t[0]}", values=values, term=t) for t in shown]
    panels = [panel for blocks in drawn for row in blocks.panels for panel in row]
    sections: list[Section] = list(drawn)
    if len(panels) == len(drawn):  # one panel each: side by side
        labels = [
            attrs.evolve(p, label=blocks.title, name="")
            for p, blocks in zip(panels, drawn, strict=True)
        ]
        sections = [Blocks("", (tuple(labels),), drawn[0].empty if len(drawn) == 1 else "")]
    if len(shown) < len(terms):
        sections.append(Note(f"{len(shown)} of {len(terms)} terms are drawn"))
    return sections


def of_mesh(mesh: Mesh) -> Description:
    """The ranks of a mesh by their coordinates."""
    cut = Layout(mesh, [Shard(d) for d in range(mesh.ndim)])
    ranks = TensorType(mesh.sizes, torch.uint8, cut)
    order = "row-major: the last axis counts fastest"
    if not isinstance(mesh.order, range):
        order = "in an order of their own"
    facts = Facts((("ranks", f"{mesh.size}, {order}" if mesh.ndim else "1"),))
    return Description(mesh_text(mesh), (facts, blocks_of(ranks, "", named=True)))


def axes_of(type: TensorType) -> tuple[tuple[str, str], ...]:
    """The placement of each mesh axis, in words."""
    mesh = type.mesh
    return tuple((f"{a}={mesh.axis_size(a)}", _does(type, a)) for a in mesh.axes)


def legend(*types: TensorType) -> tuple[Note, ...]:
    """The text in the blocks of these types; nothing where they have no elements."""
    held, terms = "the ranks that hold it", "+, and the ranks that hold its terms"
    kinds = dict.fromkeys(terms if type.layout.partial else held for type in types if type.numel)
    return (Note(f"in each block: {', or '.join(kinds)}"),) if kinds else ()


def _title(type: TensorType) -> str:
    return f"{type} on {mesh_text(type.mesh)}"


def _facts(type: TensorType) -> Facts:
    dims = dims_of(type)
    most = [dim.most for dim in dims]
    shape = "x".join(map(str, most)) or "one element"
    count = prod(type.mesh.axis_size(axis) for dim in dims for axis in dim.axes)
    same = f"{count} blocks" if count > 1 else "one block"
    of = f"of at most {shape}" if count > 1 and dims else f"of {shape}"
    nbytes = f"{bytes_text(most_nbytes(type))} a rank at most, {bytes_text(type.nbytes)} in full"
    return Facts((*axes_of(type), ("blocks", f"{same} {of}"), ("bytes", nbytes)))


def _does(type: TensorType, axis: str) -> str:
    layout = type.layout
    placement = layout[axis]
    count = type.mesh.axis_size(axis)
    match placement:
        case Replicate():
            return "replicates" + (f": {count} ranks hold the same" if count > 1 else "")
        case Partial(reduce_op):
            ranks = f"each of {count} ranks holds a term" if count > 1 else "one term"
            return f"{reduce_op} pending: {ranks}"
        case Shard(dim):
            return f"cuts dim {dim} into {count}{_inside(layout, axis, dim)}"
        case StridedShard(dim, factor):
            part = f"cuts dim {dim} into {factor} blocks and takes a part of each"
            return part + _inside(layout, axis, dim)
        case Ragged(dim, sizes):
            listed = ", ".join(map(str, sizes[:8])) + ", ..." * (len(sizes) > 8)
            return f"cuts dim {dim} into {listed}"
        case Spans(dim):
            return f"reads ranges of dim {dim} that may overlap"
        case other:
            assert_never(other)


def _inside(layout: Layout, axis: str, dim: int) -> str:
    outer = layout.cuts(dim)[: layout.cuts(dim).index(axis)]
    return f", inside of {', '.join(outer)}" if outer else ""


# --- values ----------------------------------------------------------------------------------


def _held(x: DTensor[Any]) -> dict[int, torch.Tensor]:
    """The local tensors that are here, by rank; none where their values cannot be read."""
    type, rank = x.type, x.comm.rank
    ranks = type.mesh.order if rank is None else [rank]
    try:
        leaves = dict(zip(ranks, x.comm.leaves(x.local), strict=True))
    except (TypeError, ValueError, AttributeError):  # nothing has checked a record made by hand
        return {}
    inside = {r: leaf for r, leaf in leaves.items() if type.mesh.position(r) is not None}
    if all(_readable(leaf, type.local_shape(r)) for r, leaf in inside.items()):
        return {r: _plain(leaf) for r, leaf in inside.items()}
    return {}


def _readable(leaf: Any, shape: tuple[int, ...]) -> bool:
    """Whether it is a plain tensor of this shape, with values."""
    plain = type(leaf) in (torch.Tensor, torch.nn.Parameter) and leaf.device.type != "meta"
    return plain and leaf.shape == shape and not is_functorch_wrapped_tensor(leaf)


def _plain(leaf: torch.Tensor) -> torch.Tensor:
    leaf = leaf.detach().cpu()
    if leaf.is_complex():
        return leaf.to(torch.complex128)
    return leaf.double() if leaf.is_floating_point() else leaf


def _fits(type: TensorType, locals_of: dict[int, torch.Tensor]) -> bool:
    """Whether the values can be shown: few, and narrow enough for a terminal."""
    shape = (1, 1, *type.shape)
    if not 0 < type.numel <= MOST_VALUES or shape[-2] > MOST_ROWS or prod(shape[:-2]) > MOST_PANELS:
        return False
    texts = (_shown(v) for local in locals_of.values() for v in local.reshape(-1).tolist())
    width = max(map(len, texts), default=1)
    bands = len(dims_of(type)[-1].runs) if type.shape else 1
    return shape[-1] * (width + 1) + 2 * bands + 12 <= WIDTH


def _shown(value: Any) -> str:
    match value:
        case bool():
            return "T" if value else "F"
        case float():
            return f"{value:.3g}"
        case complex():
            return f"{value.real:.2g}{value.imag:+.2g}j"
        case _:
            return str(value)


def _differing(type: TensorType, locals_of: dict[int, torch.Tensor]) -> list[Section]:
    """A note where ranks that should hold the same do not."""
    axes = [a for a in type.mesh.axes if not isinstance(type.layout[a], Replicate)]
    first: dict[tuple[int, ...], torch.Tensor] = {}
    other = []
    for rank, local in locals_of.items():
        coord = type.mesh.coord(rank) or ()
        mine = first.setdefault(tuple(coord[type.mesh.axis(a)] for a in axes), local)
        if not ((mine == local) | ((mine != mine) & (local != local))).all():
            other.append(rank)
    if not other:
        return []
    names = ranks_text(sorted(other))
    return [Note(f"not the same on all ranks: {names} hold other values than those shown")]


def _of_term(type: TensorType, rank: int, term: tuple[int, ...]) -> bool:
    coord = type.mesh.coord(rank)
    axes = [type.mesh.axis(axis) for axis in type.layout.partial]
    return coord is not None and tuple(coord[i] for i in axes) == term
