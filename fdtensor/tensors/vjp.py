"""`Adjoint`: a program with its backward, traced together and cut where cotangents come in."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import optree
import torch

from fdtensor.layouts.errors import TraceError
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.layouts.tree import flatten, unflatten
from fdtensor.ops.graph import Var
from fdtensor.ops.saved_values import ALIAS
from fdtensor.programs.options import Options
from fdtensor.programs.program import Eqn, Program, is_view_line
from fdtensor.programs.recording import TENSOR, filled, name_of
from fdtensor.programs.schedule import scheduled
from fdtensor.programs.tracer import Traced
from fdtensor.runtime.replication import mark, mark_operands, watching
from fdtensor.runtime.runner import as_traced, compiled, runner_of

__all__ = ["Adjoint", "adjoint"]


@attrs.frozen(eq=False)
class Adjoint:
    """The forward and the backward of a function, for inputs of certain types."""

    forward: Program
    """Gives the outputs and then what the backward needs."""
    backward: Program
    """From `kept` inputs, what the forward gave for it and cotangents, to those of `wanted`."""
    out_types: tuple[TensorType, ...]
    kept: tuple[int, ...]
    """The inputs that the backward reads."""
    wanted: tuple[int, ...]
    """The inputs that have a derivative."""
    through: tuple[int, ...]
    """The outputs that may have one."""
    still: frozenset[int]
    """Those of them that have none after all, such as what was detached."""
    again: Callable[[Sequence[Any], Sequence[Any], Any], Sequence[Any]]
    """The cotangents as a differentiable function of the inputs and cotangents."""
    local: bool
    """Whether neither half moves anything: then torch differentiates the lines by itself."""

    def runner(self, comm: Any) -> Callable[[Sequence[Any]], Sequence[Any]]:
        """What gives the outputs, as values with derivatives."""
        count = len(self.out_types)

        @functools.cache
        def halves() -> Any:
            return runner_of(self.forward, comm), runner_of(self.backward, comm)

        def run(values: Sequence[Any]) -> Sequence[Any]:
            if watching():
                mark_operands(values, self.forward.in_types, comm)
            leaves = _Run.apply(self, comm, halves(), len(values), *_flat(values, comm))
            return _grouped(leaves, count, comm)

        if self.local and _is_real(comm) and self.forward.mesh.position(comm.rank) is not None:
            function = as_traced(compiled(self.forward, comm))
            constants = [tensor for _, tensor in self.forward.constants]
            # what torch saves inside of a block has no type that could be told
            return lambda values: (
                run(values) if watching() else function(*values, *constants)[:count]
            )
        halves()
        return run


def _is_real(comm: Any) -> bool:
    return comm.rank is not None


def _flat(values: Sequence[Any], comm: Any) -> Sequence[torch.Tensor]:
    """The tensors of values, one value after the other."""
    if _is_real(comm):
        return values
    return [leaf for value in values for leaf in comm.leaves(value)]


def _grouped(flat: Any, count: int, comm: Any) -> Sequence[Any]:
    """The values that `_flat` has taken apart."""
    if _is_real(comm):
        return flat
    width = len(flat) // max(1, count)
    return [comm.value(list(flat[i * width : (i + 1) * width])) for i in range(count)]


class _Run(torch.autograd.Function):
    """A program on the leaves of its values."""

    @staticmethod
    def forward(
        ctx: Any, adjoint: Adjoint, comm: Any, halves: Any, count: int, *flat: torch.Tensor
    ) -> Any:
        values = halves[0](_grouped(flat, count, comm))
        outs, rest = values[: len(adjoint.out_types)], values[len(adjoint.out_types) :]
        if watching():
            for value, type in zip(rest, adjoint.forward.out_types[len(outs) :], strict=True):
                mark(comm.leaves(value), type)
        ctx.it, ctx.comm, ctx.backward_half = adjoint, comm, halves[1]
        ctx.count, ctx.rest = count, len(rest)
        ctx.save_for_backward(*flat, *_flat(rest, comm))
        leaves = tuple(_flat(outs, comm))
        if adjoint.still or len(adjoint.through) < len(outs):
            through, width = set(adjoint.through) - adjoint.still, len(leaves) // len(outs)
            quiet = [leaf for i, leaf in enumerate(leaves) if i // width not in through]
            ctx.mark_non_differentiable(*quiet)
        return leaves

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:  # type: ignore[override]
        adjoint, comm, saved = ctx.it, ctx.comm, ctx.saved_tensors
        parts = _grouped(saved, ctx.count + ctx.rest, comm)
        values, rest = parts[: ctx.count], parts[ctx.count :]
        cts = _grouped(cotangents, len(adjoint.out_types), comm)
        cts = [cts[i] for i in adjoint.through]
        if torch.is_grad_enabled():
            grads = adjoint.again(values, cts, comm)
        else:
            grads = ctx.backward_half([*(values[i] for i in adjoint.kept), *rest, *cts])
        by_input = dict(zip(adjoint.wanted, grads, strict=True))
        flat: list[Any] = [None, None, None, None]
        for i, value in enumerate(values):
            leaves = comm.leaves(value)
            flat += comm.leaves(by_input[i]) if i in by_input else [None] * len(leaves)
        return tuple(flat)


def adjoint(
    f: Callable[..., Any],
    spec: optree.PyTreeSpec,
    leaves: Sequence[Any],
    types: Sequence[TensorType | None],
    made: Traced,
    tracked: Sequence[bool],
    options: Options,
    make: Callable[..., Traced],
    again: Callable[..., Any],
) -> Adjoint | None:
    """The adjoint of a function whose tensors that are `tracked` want derivatives, or None.

    `made` is its program and `options` those of it, `make` traces a function, `again(g)` makes a
    differentiable function of DTensors of a plain one.
    """
    known = [t for t in types if t is not None]
    wanted = tuple(i for i, t in enumerate(known) if tracked[i] and _smooth(t))
    outs = made.program.out_types
    through = tuple(i for i, t in enumerate(outs) if _smooth(t))
    if not wanted or not through:
        return None

    def flat(tensors: Sequence[Any]) -> list[Any]:
        args, kwargs = unflatten(spec, filled(leaves, types, tensors))
        results, _ = flatten(f(*args, **kwargs))
        return [r for r, leaf in zip(results, made.statics, strict=True) if leaf is TENSOR]

    still: set[int] = set()

    def with_cotangents(tensors: Sequence[Any], cotangents: Sequence[Any]) -> Any:
        def smooth(*varied: Any) -> Any:
            full = [t.clone() for t in tensors]  # f may write to them
            for i, t in zip(wanted, varied, strict=True):
                full[i] = t.clone()
            results = flat(full)
            still.clear()  # of a try that failed
            still.update(i for i in through if not results[i].requires_grad)
            return [results[i] for i in through], results

        if by_autograd:
            return _by_autograd(smooth, [tensors[i] for i in wanted], cotangents)
        made: Any = torch.func.vjp(smooth, *(tensors[i] for i in wanted), has_aux=True)
        _, back, results = made
        return list(results), list(back(list(cotangents)))

    in_cts = [known[i].cotangent() for i in wanted]
    out_cts = [outs[i].cotangent() for i in through]
    _, tree = flatten((([0] * len(known), [0] * len(out_cts)), {}))
    layouts = [t.layout for t in outs], [t.layout for t in in_cts]
    with_cotangents.__name__ = name_of(f)
    by_autograd = False
    traced = functools.partial(
        make,
        with_cotangents,
        tree,
        [None] * tree.num_leaves,
        [*known, *out_cts],
        attrs.evolve(options, out_layouts=layouts),
        packed=False,  # nothing of the forward may wait for the backward
    )
    try:
        whole = traced().program
    except TraceError as error:
        if not any(what in str(error) for what in _NOT_BY_VJP):
            raise
        by_autograd = True
        whole = traced().program
    forward, backward, kept = _halves(whole, len(known), len(outs))

    def cotangents_of(values: Sequence[Any], cts: Sequence[Any], comm: Any) -> Sequence[Any]:
        return again(with_cotangents, known, values, out_cts, cts, layouts, comm)

    local = not any(eqn.steps for eqn in whole.eqns)
    unmoved = frozenset(still)
    return Adjoint(forward, backward, outs, kept, wanted, through, unmoved, cotangents_of, local)


_NOT_BY_VJP = ("requires_grad", "saved tensor hooks", "setup_context")
"""What torch says of functions with autograd or checkpoints inside, or with derivatives of ops."""


def _by_autograd(
    smooth: Callable[..., Any], primals: Sequence[torch.Tensor], cotangents: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """The results of a function and the cotangents of its primals."""
    sources = [t if t.requires_grad else t.detach().requires_grad_() for t in primals]
    outs, results = smooth(*sources)
    pairs = [(out, ct) for out, ct in zip(outs, cotangents, strict=True) if out.requires_grad]
    gradients: Sequence[Any] = [None] * len(sources)
    if pairs:
        ends, cts = zip(*pairs, strict=True)
        gradients = torch.autograd.grad(ends, sources, cts, allow_unused=True, create_graph=True)
    grads = [
        torch.zeros_like(t) if g is None else g for t, g in zip(sources, gradients, strict=True)
    ]
    return list(results), grads


def _smooth(type: TensorType) -> bool:
    return type.dtype.is_floating_point or type.dtype.is_complex


def _halves(whole: Program, inputs: int, outs: int) -> tuple[Program, Program, tuple[int, ...]]:
    """What does not depend on cotangents, and the rest; views are taken again, not kept."""
    primals, cotangents = whole.inputs[:inputs], whole.inputs[inputs:]
    late, early = set(cotangents), _needed(_early(whole, cotangents), whole.outs[:outs])
    first: list[Eqn] = []
    second: list[Eqn] = []
    maker: dict[Var, Eqn] = {}
    for eqn in whole.eqns:
        after = eqn.op is ALIAS or any(v in late for v in eqn.ins)  # what is kept is read late
        after = after and id(eqn) not in early
        (second if after else first).append(eqn)
        for v in eqn.outs:
            if v is not None:
                maker[v] = eqn
                if after:
                    late.add(v)
    constants = {v for v, _ in whole.constants}
    again: dict[int, Eqn] = {}
    rest: dict[Var, None] = {}
    reads: dict[Var, None] = {}

    def need(v: Var) -> None:
        if v in late or v in constants or v in rest or v in reads:
            return
        if v in primals:
            reads[v] = None
        elif is_view_line(maker[v]):
            again[id(maker[v])] = maker[v]
            for u in maker[v].ins:
                need(u)
        else:
            rest[v] = None

    for v in [*(v for eqn in second for v in eqn.ins), *whole.outs[outs:]]:
        need(v)
    repeated = [eqn for eqn in first if id(eqn) in again]
    forward = _used(whole, "forward", primals, [*first], (*whole.outs[:outs], *rest))
    kept = tuple(i for i, v in enumerate(primals) if v in reads)
    sources = (*(primals[i] for i in kept), *rest, *cotangents)
    backward = _used(whole, "backward", sources, [*repeated, *second], whole.outs[outs:])
    return forward, backward, kept


def _early(whole: Program, cotangents: Sequence[Var]) -> list[Eqn]:
    """The lines without the checks of what depends on cotangents."""
    after = set(cotangents)
    for eqn in whole.eqns:
        if not after.isdisjoint(eqn.ins):
            after.update(v for v in eqn.outs if v is not None)
    return [eqn for eqn in whole.eqns if eqn.outs or after.isdisjoint(eqn.ins)]


def _needed(eqns: Sequence[Eqn], outs: Sequence[Var]) -> set[int]:
    """The ids of the lines that these outputs need."""
    needed, lines = set(outs), set()
    for eqn in reversed(eqns):
        if not eqn.outs or any(v in needed for v in eqn.outs if v is not None):
            lines.add(id(eqn))
            needed.update(eqn.ins)
    return lines


def _used(
    whole: Program, half: str, inputs: Sequence[Var], eqns: Sequence[Eqn], outs: Sequence[Var]
) -> Program:
    """The lines that these outputs need, as a program of its own."""
    kept = _needed(eqns, outs)
    lines = [eqn for eqn in eqns if id(eqn) in kept]
    needed = {*outs, *(v for eqn in lines for v in eqn.ins)}
    half_program = attrs.evolve(
        whole,
        name=f"{whole.name}.{half}",
        inputs=tuple(inputs),
        constants=tuple(pair for pair in whole.constants if pair[0] in needed),
        eqns=tuple(lines),
        outs=tuple(outs),
        origin=None,
    )
    return scheduled(half_program, ahead=not whole.origin.regather)
