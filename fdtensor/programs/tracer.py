"""`trace`: a plain torch function of full tensors as a program of distributed ones."""

from __future__ import annotations

import functools
import inspect
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs
import optree
import torch

from fdtensor.layouts.errors import TraceError, ValueTreeError
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.opaque import opaque
from fdtensor.layouts.progress import working
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.layouts.tree import (
    argument,
    broadcast_prefix,
    flatten,
    mismatches,
    paths,
    unflatten,
)
from fdtensor.ops.ambient import neutral
from fdtensor.ops.graph import Full, Graph
from fdtensor.ops.pins import pinned
from fdtensor.ops.random_key import is_key, key_type, keyed
from fdtensor.ops.recorder import record
from fdtensor.ops.rewrite import rewritten
from fdtensor.plans.cost import NCCL, CostModel
from fdtensor.programs.assembly import assembled
from fdtensor.programs.choice import Bounds
from fdtensor.programs.options import Like, OnMissingRule, Options
from fdtensor.programs.program import Program

__all__ = ["Traced", "filled", "trace", "traced"]


@attrs.frozen(eq=False)
class Traced:
    """A program and how to put its outputs back into the pytree that the function returned."""

    program: Program
    out_tree: optree.PyTreeSpec
    statics: tuple[Any, ...]
    """For each leaf of the result what it is, or `TENSOR` where the program makes it."""
    bare: bool
    """Whether the function returns one tensor."""
    leaves: tuple[int, ...] = ()
    """The tensors of the result that require grad and are made of nothing that does."""

    def result(self, tensors: Sequence[Any]) -> Any:
        """The pytree that the function returns, with these in place of its tensors."""
        made = iter(tensors)
        leaves = [next(made) if leaf is TENSOR else leaf for leaf in self.statics]
        return unflatten(self.out_tree, leaves)


TENSOR = object()


@opaque
def trace(
    f: Callable[..., Any],
    *args: Any,
    out_layouts: Any = None,
    cost: CostModel | None = None,
    regather: bool = False,
    on_missing_rule: OnMissingRule = "replicate",
    check_indices: bool = True,
    reduce_dtype: torch.dtype | None = torch.float32,
    **kwargs: Any,
) -> Program:
    """The program of `f` for arguments of these types: pytrees of `TensorType`s or `DTensor`s.

    `f` is a plain torch function of full tensors; it is run once, on fake ones. Other leaves are
    Python values, and frozen into the program. `out_layouts` is a prefix of what `f` returns, with
    a Layout, None or `like(argument)` at each leaf. Where it is None the layout is that of the
    parameter where the output has the structure of an argument (gradients, updated parameters),
    that of the argument of its shape and dtype where they have one layout (a state that goes in
    again), else the cheapest one; `like(None)` always is the cheapest.
    With `check_indices` the program ends with a check of all indices, and of other operands that
    ops refuse for their values: it raises on all ranks. Sums of half precision wait and are reduced
    in `reduce_dtype`; with None in their own. `key`, of which the value does not matter,
    lets the random ops of `f` draw from a key.
    Raises `TraceError` for what is no pure function, `RuleError` as `on_missing_rule` says.
    """
    __tracebackhide__ = True
    if "key" in kwargs and is_key(f, kwargs["key"]):
        leaves, _ = flatten((args, kwargs), is_leaf=is_typed)
        mesh = one_mesh([t for t in map(type_of, leaves) if t is not None])
        f, kwargs = keyed(f), {**kwargs, "key": key_type(mesh)}
    leaves, spec = flatten((args, kwargs), is_leaf=is_typed)
    types = [type_of(leaf) for leaf in leaves]
    options = Options(
        out_layouts=out_layouts,
        regather=regather,
        on_missing_rule=on_missing_rule,
        check_indices=check_indices,
        reduce_dtype=reduce_dtype,
    )
    with working(f"tracing {name_of(f)}"):
        return traced(f, spec, leaves, types, options, cost=cost or NCCL).program


def is_typed(leaf: Any) -> bool:
    """Whether a leaf stands for a distributed tensor."""
    return type_of(leaf) is not None


def type_of(leaf: Any) -> TensorType | None:
    """The type of a `TensorType` or of what has one, such as a `DTensor`; None for other leaves."""
    if isinstance(leaf, TensorType):
        return leaf
    found = getattr(leaf, "type", None)
    return found if isinstance(found, TensorType) else None


def traced(
    f: Callable[..., Any],
    spec: optree.PyTreeSpec,
    leaves: Sequence[Any],
    types: Sequence[TensorType | None],
    options: Options,
    *,
    cost: CostModel,
    device: str | torch.device = "cpu",
    requires_grad: Sequence[bool] = (),
    packed: bool = True,
) -> Traced:
    """The program of `f(*args, **kwargs)`, where the arguments have these leaves and types."""
    __tracebackhide__ = True
    known = [t for t in types if t is not None]
    mesh = one_mesh(known)
    checks = options.check_indices
    graph, out_tree, statics, new = recorded(f, spec, leaves, types, device, requires_grad, checks)
    asked = resolved(options.out_layouts, f, spec, types)
    wants = _wants(graph, spec, types, out_tree, statics, asked)
    for layout in (*wants, *map(pinned, graph.calls)):
        if layout is not None and layout.mesh is not mesh:
            raise TraceError(
                "a layout of out_layouts or constrain is on another mesh than the arguments.",
                arguments=mesh,
                layout=layout.mesh,
                hint="A traced function runs on one mesh; redistribute before or after it.",
            )
    with neutral():  # rules ask torch too: what taps an op reads, which dtype it gives
        program = assembled(
            graph,
            mesh,
            known,
            wants,
            cost,
            name=name_of(f),
            regather=options.regather,
            on_missing_rule=options.on_missing_rule,
            packed=packed,
            bounds=Bounds(reduce_dtype=options.reduce_dtype),
        )
    bare = out_tree.is_leaf() and statics == (TENSOR,)
    return Traced(program, out_tree, statics, bare, new)


def name_of(f: Callable[..., Any]) -> str:
    """What a function is called, to readers of its program."""
    if isinstance(f, functools.partial):
        return name_of(f.func)
    return getattr(f, "__name__", None) or getattr(f, "_name", None) or type(f).__name__


def one_mesh(types: Sequence[TensorType]) -> Mesh:
    """The mesh that all types are on."""
    meshes = list(dict.fromkeys(t.mesh for t in types))
    if len(meshes) != 1:
        raise TraceError(
            f"the arguments are on {len(meshes)} meshes, a traced function runs on one.",
            **{f"mesh {i}": m for i, m in enumerate(meshes)},
            hint="Redistribute them to one mesh first."
            if meshes
            else "Pass at least one DTensor or TensorType.",
        )
    return meshes[0]


def filled(
    leaves: Sequence[Any], types: Sequence[TensorType | None], tensors: Iterable[torch.Tensor]
) -> list[Any]:
    """The leaves of arguments with tensors for what has a type; one for what is given twice."""
    given, known, full = iter(tensors), {}, []
    for leaf, type in zip(leaves, types, strict=True):
        if type is None:
            full.append(leaf)
        elif leaf is None or leaf is type:  # equal types, one object, stand for any two tensors
            full.append(next(given))
        else:
            full.append(known.setdefault(id(leaf), next(given)))
    return full


def recorded(
    f: Callable[..., Any],
    spec: optree.PyTreeSpec,
    leaves: Sequence[Any],
    types: Sequence[TensorType | None],
    device: str | torch.device = "cpu",
    requires_grad: Sequence[bool] = (),
    checks: bool = False,
) -> tuple[Graph, optree.PyTreeSpec, tuple[Any, ...], tuple[int, ...]]:
    """The graph of a function of pytrees, the tree that it returns and its leaves but tensors.

    And which of its tensors are leaves of autograd: they require grad, and no argument is behind.
    """
    __tracebackhide__ = True
    told: list[Any] = []

    def flat(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        args, kwargs = unflatten(spec, filled(leaves, types, tensors))
        out, tree = flatten(f(*args, **kwargs))
        made = [o for o in out if isinstance(o, torch.Tensor)]
        taken = {id(t) for t in tensors}
        new = [o.requires_grad and o.is_leaf and id(o) not in taken for o in made]
        statics = tuple(TENSOR if isinstance(o, torch.Tensor) else o for o in out)
        told[:] = [tree, statics, tuple(i for i, leaf in enumerate(new) if leaf)]
        return made

    fulls = [Full(t.shape, t.dtype) for t in types if t is not None]
    how = {"device": device, "requires_grad": requires_grad, "checks": checks}
    try:
        graph = rewritten(record(flat, fulls, **how, of_caller=True))
    except (RuntimeError, TypeError, IndexError, AttributeError) as error:
        nested = _inside(error, "/torch/nested/")
        if isinstance(error, AttributeError) and not nested:
            raise
        if nested:
            raise TraceError(
                f"{name_of(f)} makes nested tensors, and only plain ones are recorded.",
                hint="Write it with the values and the offsets as two tensors, or padded.",
            ) from error
        names = map(argument, paths(spec, "args"))
        facts = {name: t for name, t in zip(names, types, strict=True) if t is not None}
        raise TraceError(
            f"{name_of(f)} fails on these types: {str(error).splitlines()[0].rstrip('.')}.",
            **facts,
            hint="It gets full tensors of these shapes; see the error above for where it fails.",
        ) from error
    return graph, *told


def _inside(error: BaseException, folder: str) -> bool:
    """Whether an error comes from a file below this folder."""
    frames = traceback.extract_tb(error.__traceback__)
    return any(folder in frame.filename.replace("\\", "/") for frame in frames)


def _wants(
    graph: Graph,
    spec: optree.PyTreeSpec,
    types: Sequence[TensorType | None],
    out_tree: optree.PyTreeSpec,
    statics: Sequence[Any],
    out_layouts: Any,
) -> list[Layout | None]:
    """The layout that each output must have, or None where it is chosen."""
    tensors = [i for i, leaf in enumerate(statics) if leaf is TENSOR]
    asked: list[Any] = [None] * len(statics)
    if out_layouts is not None:
        asked = _asked(out_tree, out_layouts)
    outs = iter(graph.outs)
    fulls = [graph.types[next(outs).index] if leaf is TENSOR else None for leaf in statics]
    like = as_arguments(fulls, out_tree, types, spec)
    wants: list[Layout | None] = []
    for v, i in zip(graph.outs, tensors, strict=True):
        wanted = like[i] if asked[i] is None else asked[i]
        if isinstance(wanted, Like):  # like no argument
            wanted = None
        if wanted is not None:
            full = graph.types[v.index]
            TensorType(full.shape, full.dtype, wanted)  # raises where it cannot be
        wants.append(wanted)
    return wants


def resolved(
    out_layouts: Any,
    f: Callable[..., Any],
    spec: optree.PyTreeSpec,
    types: Sequence[TensorType | None],
) -> Any:
    """The layouts with those of the argument that is meant in place of each `like`.

    Raises `TraceError` where there is no such argument.
    """
    leaves, tree = flatten(out_layouts)
    if not any(isinstance(leaf, Like) for leaf in leaves):
        return out_layouts
    layouts = [None if t is None else t.cotangent().layout for t in types]
    args, kwargs = unflatten(spec, layouts)
    names = _names_of(f, args, kwargs)

    def of(argument: int | str | None) -> Any:
        if argument is None:
            return Like(None)
        try:
            return args[argument] if isinstance(argument, int) else names[argument]
        except (IndexError, KeyError):
            raise TraceError(
                f"out_layouts is like argument {argument!r}, which was not given.",
                positions=f"0 to {len(args) - 1}" if args else "none",
                names=", ".join(map(repr, names)) or "none",
                hint="Give the position or the name of an argument.",
            ) from None

    return unflatten(tree, [of(x.argument) if isinstance(x, Like) else x for x in leaves])


def _names_of(f: Callable[..., Any], args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments of a call by name, as far as the signature says."""
    try:
        return {**inspect.signature(f).bind(*args, **kwargs).arguments, **kwargs}
    except (TypeError, ValueError):
        return dict(kwargs)


def asked_layouts(out_tree: optree.PyTreeSpec, out_layouts: Any) -> list[Layout | None]:
    """A layout, or None, for each leaf of a result."""
    return [x if isinstance(x, Layout) else None for x in _asked(out_tree, out_layouts)]


def _asked(out_tree: optree.PyTreeSpec, out_layouts: Any) -> list[Any]:
    """What is asked for each leaf of a result: a layout, None, or `like(None)`."""

    def leaf(x: Any) -> bool:
        return x is None or isinstance(x, (Layout, Like))

    whole = unflatten(out_tree, [0] * out_tree.num_leaves)
    try:
        return broadcast_prefix(out_layouts, whole, leaf)
    except ValueError as error:
        raise ValueTreeError(
            "out_layouts is no prefix of what the function returns.",
            **mismatches(out_layouts, whole, leaf, "out_layouts"),
            hint="Give one Layout, None or like(0) for all, or a tree of the same structure.",
        ) from error


def as_arguments(
    fulls: Sequence[Full | None],
    out_tree: optree.PyTreeSpec,
    types: Sequence[TensorType | None],
    spec: optree.PyTreeSpec,
) -> list[Layout | None]:
    """The layouts of arguments that parts of the result are shaped like.

    First dicts, lists and tuples of the same structure, then single tensors.
    `fulls` are the leaves of the result, `types` those of the arguments, each with its structure.
    """
    arguments = [
        (part, types[start : start + part.num_leaves])
        for part, start in _parts(spec)
        if part.num_leaves and not part.is_leaf()
    ]
    found: list[Layout | None] = [None] * len(fulls)
    for part, start in _parts(out_tree):
        if part.is_leaf() or any(found[start : start + part.num_leaves]):
            continue
        here = fulls[start : start + part.num_leaves]
        for tree, its in arguments:
            if tree == part and all(_alike(t, full) for t, full in zip(its, here, strict=True)):
                for i, t in enumerate(its):
                    found[start + i] = None if t is None else t.cotangent().layout
                break
    return [
        layout if layout is not None or full is None else _of_one_argument(full, types)
        for layout, full in zip(found, fulls, strict=True)
    ]


def _of_one_argument(full: Full, types: Sequence[TensorType | None]) -> Layout | None:
    """The layout of the arguments that have this shape and dtype, where all of them have one.

    So what goes in again, such as the state of a simulation, does not move from step to step.
    """
    layouts = {t.layout for t in types if _alike(t, full) and t is not None}
    layout = layouts.pop() if len(layouts) == 1 else None
    return None if layout is None or layout.partial else layout


def _alike(type: TensorType | None, full: Full | None) -> bool:
    if type is None or full is None:
        return type is None and full is None
    return type.shape == full.shape and type.dtype == full.dtype


def _parts(spec: optree.PyTreeSpec, start: int = 0) -> list[tuple[optree.PyTreeSpec, int]]:
    """Every subtree, outermost first, with the number of its first leaf."""
    found = [(spec, start)]
    for child in spec.children():
        found += _parts(child, start)
        start += child.num_leaves
    return found
