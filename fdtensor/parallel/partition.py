"""`tensor_parallel`: an exported program of one device as that of one rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind
from torch.export.passes import move_to_device_pass

from fdtensor.layouts.errors import MeshError
from fdtensor.layouts.expected import no_argument
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import Replicate
from fdtensor.layouts.progress import working
from fdtensor.layouts.torch_private import torch_pytree
from fdtensor.layouts.tree import flatten, unflatten
from fdtensor.parallel.exported import Exported, Pins, opened
from fdtensor.parallel.exported_roles import role_in, uses_of
from fdtensor.parallel.module_layouts import identity, laid, pin, placed
from fdtensor.parallel.opaque_calls import opaque_calls
from fdtensor.parallel.rank_programs import device_of, rank_programs
from fdtensor.parallel.styles import Style, axes_of, matched
from fdtensor.parallel.writing import written
from fdtensor.programs.out_layouts import asked_layouts
from fdtensor.runtime.control.process import groups
from fdtensor.runtime.process_groups import initialized, this_rank

__all__ = ["tensor_parallel"]


def tensor_parallel(
    exported_program: ExportedProgram,
    mesh: Mesh,
    styles: Mapping[str, Any],
    *,
    axis: str | Sequence[str] | None = None,
    rank: int | None = None,
    device: str | torch.device | None = None,
    out_layouts: Any = None,
) -> ExportedProgram:
    """The exported program that `rank` runs of one that was exported for a single device.

    `styles` maps names of modules, or globs such as `"layers.*.mlp.up"` or `"*.up"`, to
    `Colwise()`, `Rowwise()`, `VocabParallel()` and `SequenceParallel()`, or to torch's own classes.
    Parameters are cut along `axis`, by default the only one of the mesh, or 'tp'; they stay where
    they are, and activations move, in as few collectives as there can be. It takes full inputs, and
    returns full outputs but where `out_layouts`, a prefix of what the function returns, says
    otherwise.
    Gradients of an exported training step have the layouts of their parameters; results have no
    derivatives of their own, which would be those of one rank.

    `rank` is by default this one, whose process groups are made too; the program of any rank can be
    made without processes. Where it is loaded again, `groups(mesh)` makes the groups that it names.
    `device` is by default that of the parameters. The program that is given is left as it is. Sizes
    that are not known yet are not cut. Raises `TraceError` for names and styles that fit no module,
    `MeshError` for an axis or rank that is not there, `DataDependentError` where shapes depend on
    the values of tensors.

    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    >>> exported = torch.export.export(model, (torch.ones(2, 4),))
    >>> styles = {"0": fd.parallel.Colwise(), "2": fd.parallel.Rowwise()}
    >>> ours = fd.parallel.tensor_parallel(exported, Mesh(tp=2), styles, rank=0)
    >>> {name: list(block.shape) for name, block in ours.state_dict.items()}
    {'0.weight': [4, 4], '0.bias': [4], '2.weight': [4, 4], '2.bias': [4]}
    """
    if not isinstance(exported_program, ExportedProgram):
        hint = "Write torch.export.export(model, args)."
        raise no_argument("exported_program", exported_program, "ExportedProgram", hint)
    axes = axes_of(mesh, axis)
    is_this_rank = rank is None
    rank = _this(mesh) if rank is None else rank
    if mesh.position(rank) is None:
        raise MeshError(
            f"rank {rank} runs nothing: it is not in the mesh.",
            mesh=mesh,
            hint="Ask for a rank of the mesh.",
        )
    mesh, out_layouts = _along(mesh, axes, rank, out_layouts)
    if is_this_rank and initialized():
        groups(mesh)
    exported = opened(exported_program)
    style_of = matched(styles, _modules(exported))
    layouts = _layouts(exported, style_of, mesh, axes)
    wants = _wants(exported, layouts, out_layouts, mesh)
    backend = "nccl" if torch.device(device or device_of(exported)).type == "cuda" else "gloo"
    with opaque_calls(), working(f"making the program of rank {rank}"):
        pins = _pins(style_of, mesh, axes)
        programs = rank_programs(exported, mesh, rank, layouts, pins, wants, backend)
        program = written(exported, programs, layouts, rank)
    return program if device is None else move_to_device_pass(program, device)


def _along(mesh: Mesh, axes: Sequence[str], rank: int, out_layouts: Any) -> tuple[Mesh, Any]:
    """The part of the mesh that acts together with a rank, and the layouts of results on it.

    The whole mesh where results are to be cut along other axes.
    """
    rest = [axis for axis in mesh.axes if axis not in axes]
    leaves, tree = flatten(out_layouts)
    wanted = [x for x in leaves if isinstance(x, Layout)]
    if not rest or any(x[axis] != Replicate() for x in wanted for axis in rest):
        return mesh, out_layouts
    kept = tuple(axis for axis in mesh.axes if axis in axes)
    coord = mesh.coord(rank)
    assert coord is not None
    line = mesh.part(kept, coord)

    def on_line(x: Any) -> Any:
        if not isinstance(x, Layout):
            return x
        return Layout(line, [x[axis] for axis in kept], dict(x.order))

    return line, unflatten(tree, list(map(on_line, leaves)))


def _this(mesh: Mesh) -> int:
    """The rank of this process."""
    rank = this_rank()
    if rank is None:
        raise MeshError(
            "this process has no rank: no process group is up.",
            mesh=mesh,
            hint="Pass rank=..., for any of the mesh.",
        )
    return rank


def _modules(exported: Exported) -> list[str]:
    """The names of the modules that an exported program was made of."""
    parents = [name.rpartition(".")[0] for name in exported.program.state_dict]
    entries = [entry.fqn.partition("@")[0] for entry in exported.program.module_call_graph]
    return [name for name in dict.fromkeys([*entries, *parents]) if name] + [""]


def _layouts(
    exported: Exported, style_of: Mapping[str, Style], mesh: Mesh, axes: Sequence[str]
) -> dict[str, Layout]:
    """The layout of each tensor of the state, by its name in the module."""
    state = _state(exported)
    inputs = {target: name for name, target in exported.targets.items()}
    uses = uses_of(exported)
    alike = _alike(state)
    placements = {}
    for name, style in style_of.items():
        prefix = f"{name}." if name else ""
        own = [
            key.removeprefix(prefix)
            for key in inputs | state
            if key.startswith(prefix) and "." not in key.removeprefix(prefix)
        ]
        parameters = [k for k in own if isinstance(state.get(prefix + k), torch.nn.Parameter)]
        role_of = {
            key: role_in([use for a in alike[prefix + key] for use in uses.get(a, [])], name)
            for key in parameters
        }
        placements |= {prefix + k: p for k, p in placed(style, name, role_of).items()}
    return laid(state, placements, mesh, axes)


def _state(exported: Exported) -> dict[str, torch.Tensor]:
    """The parameters and buffers by name, those that are not saved too."""
    constants = exported.program.constants.items()
    names = set(exported.targets.values())
    unsaved = {k: t for k, t in constants if k in names and isinstance(t, torch.Tensor)}
    return {**exported.program.state_dict, **unsaved}


def _alike(state: Mapping[str, torch.Tensor]) -> dict[str, list[str]]:
    """The names of each tensor, by each of them."""
    groups: dict[Any, list[str]] = {}
    for name, tensor in state.items():
        groups.setdefault(identity(tensor), []).append(name)
    return {name: names for names in groups.values() for name in names}


def _pins(style_of: Mapping[str, Style], mesh: Mesh, axes: Sequence[str]) -> Pins:
    """The layouts that styles pin on the inputs and outputs of modules."""

    def of(name: str, style: Style) -> Any:
        def layout(entering: bool, ndim: int) -> Layout | None:
            end = style.input if entering else style.output
            return None if end is None else pin(end, ndim, mesh, axes, name)

        return layout

    return {n: of(n, s) for n, s in style_of.items() if s.input is not None or s.output is not None}


def _wants(
    exported: Exported, layouts: Mapping[str, Layout], out_layouts: Any, mesh: Mesh
) -> list[Layout]:
    """The layout of each tensor that the program returns."""
    specs = exported.program.graph_signature.output_specs
    own = [spec for spec in specs if spec.kind in _USER]
    wanted = dict(zip(map(id, own), _asked(exported, len(own), out_layouts), strict=True))
    vals = [n.meta.get("val") if isinstance(n, torch.fx.Node) else None for n in exported.results]
    wants = []
    for spec, val in zip(specs, vals, strict=True):
        if isinstance(val, torch.Tensor):
            like = layouts.get(spec.target) if spec.target and spec.kind in _OF_STATE else None
            wants.append(wanted.get(id(spec)) or like or mesh.layout())
    return wants


_USER = (OutputKind.USER_OUTPUT, OutputKind.LOSS_OUTPUT)

_OF_STATE = (
    OutputKind.BUFFER_MUTATION,
    OutputKind.PARAMETER_MUTATION,
    OutputKind.GRADIENT_TO_PARAMETER,
)
"""Results whose target is a parameter or buffer: an input may have the same name."""


def _asked(exported: Exported, count: int, out_layouts: Any) -> list[Layout | None]:
    """The layouts that are asked for of what the function returns, in the order of the program."""
    spec = exported.program.call_spec.out_spec
    if out_layouts is None:
        return [None] * count
    whole = list(range(count))
    if spec is not None and spec.num_leaves == count:  # what torch calls a tree, once as our own
        whole = torch_pytree.tree_unflatten(whole, spec)
    order, tree = flatten(whole)
    layout_of = dict(zip(order, asked_layouts(tree, out_layouts), strict=True))
    return [layout_of[i] for i in range(count)]
