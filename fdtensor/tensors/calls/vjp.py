"""`adjoint`: the backward of a function, traced with its forward and cut off from it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType
from typing import Any

import attrs
import optree
import torch
import torch.nn.functional as F

from fdtensor.layouts.errors import DataDependentError, TraceError
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.layouts.torch_private import OpOverload
from fdtensor.layouts.tree import flatten, unflatten
from fdtensor.programs.as_if import evenly
from fdtensor.programs.meshes import on_mesh
from fdtensor.programs.options import Like, Options
from fdtensor.programs.program import Program
from fdtensor.programs.recording import TENSOR, filled, name_of
from fdtensor.programs.tracer import Traced
from fdtensor.tensors.calls.adjoint import Adjoint
from fdtensor.tensors.calls.family import Family
from fdtensor.tensors.calls.halves import halves
from fdtensor.tensors.calls.pullbacks import by_autograd, by_vjp
from fdtensor.tensors.calls.weakly import weakly
from fdtensor.tensors.owed import Collecting

__all__ = ["Joint", "adjoint", "joint", "without_tensors"]


@attrs.frozen(eq=False)
class Joint:
    """A function with its derivative, as one program of tensors and cotangents."""

    whole: Program
    """Takes tensors and cotangents; gives the results and the cotangents of `wanted`."""
    function: Callable[..., Any]
    """The plain function that it is the program of."""
    layouts: tuple[list[Layout], list[Layout], None, None]
    """Those of what the function returns: of results, and of cotangents of tensors."""
    out_cts: list[TensorType]
    """The types of the cotangents that it takes."""
    wanted: tuple[int, ...]
    """The tensors that get a derivative."""
    through: tuple[int, ...]
    """The results that may have one."""
    still: frozenset[int]
    """Those of them that have none after all, such as what was detached."""
    apart: frozenset[int]
    """The tensors among `wanted` from which no derivative goes to a result after all."""


def joint(
    f: Callable[..., Any],
    spec: optree.PyTreeSpec,
    leaves: Sequence[Any],
    types: Sequence[TensorType | None],
    primal: Traced,
    tracked: Sequence[object],
    options: Options,
    make: Callable[..., Traced],
    family: Family | None = None,
    every: bool = False,
    ends: frozenset[int] | None = None,
) -> Joint | None:
    """A function with its derivative by the tensors that are `tracked`; None where it has none.

    `primal` is its program and `options` those of it, `make` traces a function. Where a tensor is
    `Collecting`, its cotangent is left as it comes. Tensors that nothing reads have one, of zeros,
    where `every` one is to have it. Results beside the `ends` have no cotangent.
    """
    function = weakly(f)
    known, outs = _known(types, primal), primal.program.out_types
    through = tuple(i for i, t in enumerate(outs) if _smooth(t) and (ends is None or i in ends))
    read = range(len(known)) if every else _read_for(primal.program, through)
    wanted = tuple(i for i, t in enumerate(known) if tracked[i] and _smooth(t) and i in read)
    if not wanted or not through or _is_flat(primal.program):
        return None
    in_cts = [known[i].cotangent() for i in wanted]
    out_cts = [outs[i].cotangent() for i in through]
    _, tree = flatten((([0] * len(known), [0] * len(out_cts)), {}))
    layouts = [t.layout for t in outs], [t.layout for t in in_cts], None, None
    free = [tracked[i] is Collecting for i in wanted]
    own = [Like(None) if is_free else t.layout for t, is_free in zip(in_cts, free, strict=True)]
    given = {"out_layouts": (layouts[0], own, None, None)}
    options = attrs.evolve(options, parameters=_parameters_of(primal.program), **given)
    flat = _flat(function, spec, without_tensors(leaves, types), types, primal.statics)
    joined = functools.partial(_with_cotangents, name_of(f), flat, wanted, through)
    if family is not None:
        make = functools.partial(make, dynamic=family.of_derivative(primal, through))
    takes = [*known, *out_cts], options, primal, through
    program = functools.partial(_joint_program, make, tree, *takes)
    whole, both = _either(program, joined)
    _, _, *known_of = whole.result(range(len(whole.program.outs)))
    return Joint(whole.program, both, layouts, out_cts, wanted, through, *map(frozenset, known_of))


_FLAT = "aten::floor_divide", "aten::heaviside"
"""Ops that are constant between their jumps."""


def _is_flat(program: Program) -> bool:
    """Whether it is one op whose derivative is 0 wherever it has one, of which torch takes none."""
    ops = [call.op for call in program.origin.graph.calls]
    return len(ops) == 1 and ops[0].name().partition(".")[0] in _FLAT


def _either(program: Callable[..., Traced], joined: Callable[..., Any]) -> tuple[Traced, Any]:
    """The program of a function with its derivative, by `torch.func` or else by autograd, and it.

    `torch.func` takes no autograd inside, and no derivative of some ops.
    """
    try:
        return program(both := joined(by_vjp)), both
    except DataDependentError:
        raise
    except TraceError:
        return program(both := joined(by_autograd)), both


def _known(types: Sequence[TensorType | None], primal: Traced) -> list[TensorType]:
    """The types of tensors, as they are seen on the mesh of a program that takes them."""
    return [on_mesh(primal.program.mesh, t) for t in types if t is not None]


def adjoint(
    f: Callable[..., Any],
    both: Joint | None,
    primal: Traced,
    types: Sequence[TensorType | None],
    again: Callable[..., Any],
    part: Callable[[frozenset[int]], Adjoint | None],
    refused: Mapping[int, TraceError],
) -> Adjoint | None:
    """The adjoint of a function from it with its derivative; None where it has none.

    `again(g)` makes a differentiable function of DTensors of a plain one, and `part` gives the
    adjoint for some of the results. A cotangent of those that are `refused` raises.
    """
    if both is None:
        return None
    whole, known = both.whole, _known(types, primal)
    outs = primal.program.out_types

    def pulled(values: Sequence[Any], cts: Sequence[Any], comm: Any) -> Sequence[Any]:
        own = {"out_layouts": both.layouts, "as_if": whole.origin.repeats}
        return again(both.function, known, values, both.out_cts, cts, own, comm)

    forward, backward, kept = halves(whole, len(known), len(outs))
    pairs = enumerate(zip(both.wanted, backward.out_types, strict=True))
    others = tuple([(k, own) for k, (i, t) in pairs if t is not (own := known[i].cotangent())])
    # from replicas of a cotangent blocks are computed, which second derivatives have to add up
    pending = any(t.layout.partial for t in outs)
    moves = others or any(eqn.steps for eqn in whole.eqns)
    facts = both.wanted, both.apart, others, both.through, both.still, pulled
    cut = both.still or both.apart or refused or not _is_of_torch(f)
    local = not (moves or pending or cut)
    return Adjoint(forward, backward, outs, kept, *facts, local, weakly(f), part, refused)


def _is_of_torch(f: object) -> bool:
    """Whether a function is one of torch, with the derivative of the lines that it is recorded in.

    Others may detach values, or have `autograd.Function`s inside, of which lines know nothing.
    """
    if isinstance(f, _OPS):
        return True
    # not by its name, which `functools.wraps` copies
    home = getattr(f, "__globals__", None)
    return any(home is known for known in _OF_TORCH) and f is not F.gumbel_softmax


_OPS = BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType, OpOverload

_OF_TORCH = vars(F), vars(torch.functional), torch.Tensor.backward.__globals__
"""The names of modules of torch whose functions of Python call others, and cut no derivative: of
functions, and of methods of tensors."""


def _read_for(program: Program, outs: Sequence[int]) -> set[int]:
    """The numbers of the inputs that these outputs of a program depend on."""
    read = {program.outs[i] for i in outs}
    for eqn in reversed(program.eqns):
        if not read.isdisjoint(eqn.outs):
            read.update(eqn.ins)
    return {i for i, v in enumerate(program.inputs) if v in read}


def _parameters_of(program: Program) -> frozenset[int]:
    """The numbers of the inputs of a program that are parameters."""
    return program.origin.constraints.parameters


def _joint_program(
    make: Callable[..., Traced],
    tree: optree.PyTreeSpec,
    types: Sequence[TensorType],
    options: Options,
    primal: Traced,
    through: Sequence[int],
    both: Callable[..., Any],
) -> Traced:
    """The program of the forward and the backward, with choices for real sizes as in `primal`."""
    real = primal.program.origin.repeats if options.as_if is not None else None
    # packed=False: nothing of the forward may wait for the backward
    make = functools.partial(make, both, tree, [None] * tree.num_leaves, packed=False)
    if real is not None:
        cotangents = [real.out_types[i].cotangent() for i in through]
        at_real = functools.partial(make, dynamic=None)
        asked: Any = evenly(options.out_layouts)
        own = [t.layout for t in real.out_types], *asked[1:]
        alone = attrs.evolve(options, as_if=None, out_layouts=own)
        whole = at_real([*real.in_types, *cotangents], alone).program
        options = attrs.evolve(options, as_if=whole, max_bytes=None)
    return make(types, options)


def without_tensors(leaves: Sequence[Any], types: Sequence[TensorType | None]) -> list[Any]:
    """The leaves with a mark for each DTensor, which an adjoint would outlive."""
    marks = {id(leaf): object() for leaf in leaves}
    return [x if t is None else marks[id(x)] for x, t in zip(leaves, types, strict=True)]


def _flat(
    function: Callable[[], Any],
    spec: optree.PyTreeSpec,
    leaves: Sequence[Any],
    types: Sequence[TensorType | None],
    statics: Sequence[Any],
) -> Callable[[Sequence[Any]], list[Any]]:
    """The function of tensors alone that gives tensors alone."""

    def flat(tensors: Sequence[Any]) -> list[Any]:
        args, kwargs = unflatten(spec, filled(leaves, types, tensors))
        results, _ = flatten(function()(*args, **kwargs))
        return [r for r, leaf in zip(results, statics, strict=True) if leaf is TENSOR]

    return flat


def _with_cotangents(
    name: str,
    flat: Callable[[Sequence[Any]], list[Any]],
    wanted: Sequence[int],
    through: Sequence[int],
    pull: Callable[..., Any],
) -> Callable[..., Any]:
    """The function of tensors and cotangents that gives results and the cotangents `wanted`.

    And the numbers of the results among `through` that have no derivative after all, and of the
    tensors that none goes to.
    """

    def with_cotangents(tensors: Sequence[Any], cotangents: Sequence[Any]) -> Any:
        still: list[int] = []
        apart: list[int] = []

        def smooth(*varied: Any) -> Any:
            full = [t.clone() for t in tensors]  # f may write to them
            for i, t in zip(wanted, varied, strict=True):
                full[i] = t.clone()
            nodes = [full[i].grad_fn for i in wanted]
            results = flat(full)
            still[:] = [i for i in through if not results[i].requires_grad]
            reached = _nodes_before(results[i].grad_fn for i in through)
            apart[:] = [i for i, node in zip(wanted, nodes, strict=True) if node not in reached]
            return [results[i] for i in through], results

        return *pull(smooth, [tensors[i] for i in wanted], cotangents), still, apart

    with_cotangents.__name__ = name
    return with_cotangents


def _nodes_before(ends: Iterable[Any]) -> set[Any]:
    """The nodes of the graph of autograd that a backward from these reaches."""
    reached: set[Any] = set()
    todo = [*ends]
    while todo:
        node = todo.pop()
        if node is not None and node not in reached:
            reached.add(node)
            todo += [before for before, _ in node.next_functions]
    return reached


def _smooth(type: TensorType) -> bool:
    return type.dtype.is_floating_point or type.dtype.is_complex
