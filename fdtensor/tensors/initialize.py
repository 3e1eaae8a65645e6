"""`initialize`: the parameters of a model, already in shards, drawn from a key."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from fdtensor.layouts.errors import TraceError, ValueTreeError
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.signatures import named_arguments
from fdtensor.layouts.torch_private import RESETS, module_tensors
from fdtensor.layouts.tree import flatten
from fdtensor.ops.random_bits import Key
from fdtensor.ops.random_bits.keys import AnyKey, words_of
from fdtensor.ops.random_key import key_type
from fdtensor.programs.options import Options
from fdtensor.programs.program import Program
from fdtensor.runtime.comm import Comm, refuse_no_comm
from fdtensor.tensors.calls.function import Spmd
from fdtensor.tensors.distribution import distribute
from fdtensor.tensors.tied import first_names, tensors_by_name

__all__ = ["initialize"]


@named_arguments
def initialize(
    model: torch.nn.Module | Callable[[], Any], layouts: Any, key: AnyKey, comm: Comm[Any]
) -> Any:
    """The parameters and buffers of a model by name, each rank's blocks drawn where they are.

    - A module, best one built under `torch.device("meta")`: the modules in it are reset as torch
      does when it builds them, by their own `reset_parameters`. What is not on the meta device, and
      no module resets, keeps its value.
    - A function without arguments that builds and returns a module: it is traced, so what the
      model's own `__init__` draws is what is drawn. Or one that returns any pytree of tensors.

    `layouts` is one Layout, or a dict by name such as `layouts_for` gives (what is not in it is
    replicated), or for other pytrees a prefix of them. The numbers depend on the key alone, not on
    layouts, mesh or ranks; nothing is sent, and no rank makes more than its blocks, but where an
    initialization needs the whole, as that of an orthogonal matrix does.
    Raises `TraceError` where nothing says what a tensor on the meta device is to be.

    >>> mesh = Mesh(x=2)
    >>> with torch.device("meta"):
    ...     model = torch.nn.Linear(4, 6)

    >>> layouts = {"weight": mesh.layout("x")}
    >>> params = initialize(model, layouts, fd.random.key(0), SimulatedComm(mesh))
    >>> print({name: str(p.type) for name, p in params.items()})
    {'weight': 'f32[6@x,4]', 'bias': 'f32[6]'}
    """
    words_of(key)
    refuse_no_comm(comm)
    device = comm.device or torch.device("cpu")
    names: dict[str, str] = {}

    def build() -> Any:
        if isinstance(model, torch.nn.Module):
            tensors = _reset(model, device)
        else:
            with device:
                built = model()
            if not isinstance(built, torch.nn.Module):
                return built
            tensors = tensors_by_name(built)
            names.update(first_names(tensors))
        return {name: tensors[name] for name in dict.fromkeys(names.values())}

    given_layouts = [x for x in flatten(layouts, is_leaf=_is_layout)[0] if _is_layout(x)]
    mesh = given_layouts[0].mesh if given_layouts else comm.mesh
    whole = key.tensor(device) if isinstance(key, Key) else key.to(device, torch.int64)
    words = distribute(whole, key_type(mesh).layout, comm)
    build.__name__ = f"initialize {_name(model)}"
    if isinstance(model, torch.nn.Module):
        names.update(first_names(tensors_by_name(model)))
    else:
        Spmd(build).trace(key=words.type)  # says whether it gives a module
    wanted = _by_name(layouts, names, mesh) if names else layouts
    function = Spmd(build, Options(out_layouts=wanted))
    with torch.no_grad():  # tensors of the module that keep their values are closed over
        if names:
            _all_known(function.trace(key=words), list(dict.fromkeys(names.values())), model)
        tensors = function(key=words)
    return {name: tensors[first] for name, first in names.items()} if names else tensors


def _reset(module: torch.nn.Module, device: torch.device) -> dict[str, torch.Tensor]:
    """The tensors of a module after its modules have been reset, in the order they are built in.

    Each module writes to tensors of its own: one that several share is that of the first of them.
    """
    parts = list(dict.fromkeys(_inner_first(module)))
    kinds: list[Any] = [kind for part in parts for kind in module_tensors(part)]
    kept = [(kind, dict(kind)) for kind in kinds]
    try:
        for kind, before in kept:
            kind.update((name, _copy(t, device)) for name, t in before.items() if t is not None)
        with torch.no_grad():
            for part in parts:
                for name in RESETS:
                    if hasattr(part, name):
                        getattr(part, name)()
                        break
        return tensors_by_name(module)
    finally:
        for kind, before in kept:
            kind.update(before)


def _inner_first(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    for child in module.children():
        yield from _inner_first(child)
    yield module


def _copy(tensor: torch.Tensor, device: torch.device) -> Any:
    """A tensor to write to, with the values that there are."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    return copy if tensor.is_meta else copy.copy_(tensor.detach())


def _by_name(layouts: Any, names: Mapping[str, str], mesh: Mesh) -> dict[str, Layout]:
    """The layout of each tensor of a module; raises `ValueTreeError` for names that it has not."""
    if isinstance(layouts, Layout):
        return dict.fromkeys(names.values(), layouts)
    if not isinstance(layouts, Mapping):
        raise ValueTreeError(
            f"{type(layouts).__name__} has no layouts by name.",
            hint="Pass a Layout, or a dict of them by the names of parameters and buffers.",
        )
    unknown = [name for name in layouts if name not in names]
    if unknown:
        near = {n: ", ".join(difflib.get_close_matches(n, names, 3)) or "-" for n in unknown}
        raise ValueTreeError(
            f"the model has no tensor {unknown[0]!r}.",
            **{f"near {name}": names_near for name, names_near in near.items()},
            hint="Use the names of model.named_parameters() and model.named_buffers().",
        )
    laid: dict[str, Layout] = {}
    for name, first in names.items():
        wanted = layouts.get(name)
        if wanted is not None and laid.setdefault(first, wanted) != wanted:
            raise ValueTreeError(
                f"{name!r} and {first!r} are one tensor, in two layouts.",
                **{first: laid[first], name: wanted},
                hint="Give both the same layout.",
            )
    return {first: laid.get(first) or mesh.layout() for first in names.values()}


def _all_known(program: Program, names: list[str], model: Any) -> None:
    """Raises `TraceError` where an output is memory that nobody has written to."""
    graph = program.origin.graph
    makers = {v: call.op for call in graph.calls for v in call.outs}
    empty = [
        name for name, v in zip(sorted(names), graph.outs, strict=True) if makers.get(v) in _EMPTY
    ]
    if empty:
        raise TraceError(
            f"nothing says what {len(empty)} of the tensors of {_name(model)} are at the start.",
            tensors=", ".join(empty),
            hint="Give their module a reset_parameters(), or pass a function that builds the model "
            "and returns it.",
        )


_EMPTY = {
    overload
    for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
    for overload in (
        getattr(getattr(torch.ops.aten, name), kind)
        for kind in getattr(torch.ops.aten, name).overloads()
    )
}


def _name(model: Any) -> str:
    return getattr(model, "__name__", None) or type(model).__name__


def _is_layout(x: Any) -> bool:
    return isinstance(x, Layout)
