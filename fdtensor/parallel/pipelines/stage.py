"""`Stage`: what a mesh runs for one part of a batch, as programs that keep for one another."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import optree

from fdtensor.layouts.errors import TraceError
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.layouts.tree import flatten
from fdtensor.ops.graph import Var
from fdtensor.ops.precision import HALVES, ROUNDED, wide_of
from fdtensor.ops.random_key import key_type
from fdtensor.plans.cost import CostModel
from fdtensor.programs.meshes import one_mesh
from fdtensor.programs.options import Options
from fdtensor.programs.program import Program
from fdtensor.programs.recording import name_of
from fdtensor.programs.timeline import timeline
from fdtensor.programs.tracer import Traced, traced, type_of
from fdtensor.tensors.calls.entry import tell_of_lost
from fdtensor.tensors.calls.phases import Cut, Phase, phases
from fdtensor.tensors.calls.vjp import Joint, joint
from fdtensor.tensors.owed import Collecting

__all__ = ["Gradient", "Stage", "staged"]


@attrs.frozen
class Gradient:
    """The gradient of a parameter: of all parts it is reduced once, after they are added up."""

    parameter: int
    """The number of the parameter, among the tensors of its stage."""
    value: Var
    """What each part gives, pending where it is a sum over ranks."""
    type: TensorType
    """The type of what parts give, in the dtype in which they are added up."""
    wanted: TensorType
    """That of the gradient."""


@attrs.frozen(eq=False)
class Stage:
    """The programs of a stage, for one part of a batch.

    `prepare` takes the parameters alone and runs once for all parts: where parameters are in
    shards, it gathers them, unless they are gathered again for each use. `weights` is what of the
    backward no other stage waits for.
    """

    mesh: Mesh
    prepare: Phase
    forward: Phase
    backward: Phase
    weights: Phase
    finish: Program | None
    """Reduces the gradients that were added up; None where there is none."""
    parameters: tuple[Var, ...]
    """The parameters, in order; those that no program reads too."""
    inputs: tuple[Var, ...]
    """What it takes of each part: of the stage before, of the target, and the random key."""
    cotangents: tuple[Var, ...]
    """The cotangents that come in, for the outputs that have any."""
    outs: tuple[Var, ...]
    sent_back: tuple[Var, ...]
    """The cotangents of the inputs that have any."""
    gradients: tuple[Gradient, ...]
    traced: Traced
    """The program of the function, which has the structure of its result."""
    draws: bool
    """Whether the last of its inputs is a random key."""

    @property
    def phases(self) -> dict[str, Phase]:
        """Its programs by the letter of the action that runs them; prepare has none."""
        return {"F": self.forward, "B": self.backward, "W": self.weights}

    @property
    def programs(self) -> dict[str, Program]:
        """All of its programs by name, in order: prepare and finish run once for all parts."""
        each = {kind: phase.program for kind, phase in self.phases.items()}
        last = {} if self.finish is None else {"finish": self.finish}
        return {"prepare": self.prepare.program, **each, **last}

    @property
    def out_types(self) -> tuple[TensorType, ...]:
        """The types of what it gives for a part."""
        return self.traced.program.out_types

    def seconds(self, kind: str) -> float:
        """How long one of its programs takes by the cost model."""
        return timeline(self.phases[kind].program).seconds


# one walk from the types of a stage to all of its programs
def staged(
    f: Callable[..., Any],
    args: tuple[Any, ...],
    options: Options,
    cost: CostModel,
    device: Any,
    first: bool,
    split: bool,
    parts: int,
    draws: bool,
) -> Stage:
    """The stage of `f(params, inputs, ...)` for these types; one that `draws` takes a `key` too.

    It runs once for each of the `parts` parts of a batch. The `first` one sends nothing back. Where
    the backward is `split`, the gradients of parameters have a program of their own.
    """
    mesh = one_mesh([t for t in map(type_of, _leaves(args)) if t is not None])
    kwargs = {"key": key_type(mesh)} if draws else {}
    leaves, spec = flatten((args, kwargs), is_leaf=lambda x: type_of(x) is not None)
    types: list[TensorType | None] = [type_of(leaf) for leaf in leaves]  # type: ignore[misc]
    # an object of its own for each: equal ones stand for one tensor
    blanks = [object() if t is not None else x for x, t in zip(leaves, types, strict=True)]
    make = functools.partial(traced, cost=cost, device=device)
    primal = make(f, spec, blanks, types, options)
    tell_of_lost(f"the stage {name_of(f)!r}", primal, differentiable=True)
    counts = [sum(t is not None for t in map(type_of, _leaves(arg))) for arg in args]
    own, taken = counts[0], counts[1]
    tracked = [*[Collecting] * own, *[not first] * taken, *[False] * (sum(counts[2:]) + draws)]
    adding = attrs.evolve(options, terms=parts)
    take = functools.partial(joint, f, spec, blanks, types, primal)
    take = functools.partial(take, options=adding, make=make, every=True)
    both = _where_it_has_one(lambda some: take(tracked=some), tracked, own)
    whole = primal.program if both is None else both.whole
    wanted = () if both is None else both.wanted
    known, count = len(primal.program.inputs), len(primal.program.outs)
    outs, cts = whole.outs[:count], whole.outs[count:]
    pairs = list(zip(wanted, cts, strict=True))
    theirs = [t.cotangent() for t in types if t is not None][:own]
    gradients = tuple(_gradient(whole, i, v, theirs[i], options) for i, v in pairs if i < own)
    sent = tuple(v for i, v in pairs if i >= own)
    parameters, inputs = whole.inputs[:own], whole.inputs[own:known]
    back = sent, tuple(g.value for g in gradients)
    programs = _phases(whole, parameters, inputs, outs, back, split, options.regather)
    finish = _finish(gradients, primal.program.name, cost)
    ends = parameters, inputs, whole.inputs[known:], outs, sent
    return Stage(whole.mesh, *programs, finish, *ends, gradients, primal, draws)


def _where_it_has_one(
    take: Callable[[Sequence[object]], Joint | None], tracked: list[object], own: int
) -> Joint | None:
    """A stage with its derivative by those of its `own` parameters that torch takes one by.

    By the running mean of a batch norm, a parameter of a pipeline as any other, it takes none.
    """
    try:
        return take(tracked)
    except TraceError as error:
        if "is not differentiable with respect to argument" not in str(error):
            raise
        refused = _refused(take, len(tracked), range(own))
        if not refused:
            raise
        return take([t if i not in refused else False for i, t in enumerate(tracked)])


def _refused(
    take: Callable[[Sequence[object]], Joint | None], count: int, some: Sequence[int]
) -> frozenset[int]:
    """Those of some parameters that torch takes no derivative by."""
    try:
        take([Collecting if i in some else False for i in range(count)])
    except TraceError:
        if len(some) == 1:
            return frozenset(some)
        half = len(some) // 2
        return _refused(take, count, some[:half]) | _refused(take, count, some[half:])
    return frozenset()


def _phases(
    whole: Program,
    parameters: tuple[Var, ...],
    inputs: tuple[Var, ...],
    outs: tuple[Var, ...],
    back: tuple[tuple[Var, ...], tuple[Var, ...]],
    split: bool,
    regather: bool,
) -> tuple[Phase, Phase, Phase, Phase]:
    """The programs before all parts, of forward, backward and weights; `back` is what these give.

    That is what is sent back, and the gradients. With `regather` nothing is done before all parts.
    """
    sent, gradients = back
    cotangents = whole.inputs[len(parameters) + len(inputs) :]
    cuts = [
        Cut("prepare", parameters, (), lazy=regather),
        Cut("forward", inputs, outs),
        Cut("backward", cotangents, sent if split else (*sent, *gradients), lazy=split),
        Cut("weights", (), gradients if split else ()),
    ]
    prepare, forward, backward, weights = phases(whole, cuts)
    return prepare, forward, backward, weights


def _leaves(tree: Any) -> list[Any]:
    return flatten(tree, is_leaf=lambda x: type_of(x) is not None)[0]


def _gradient(
    whole: Program, parameter: int, v: Var, wanted: TensorType, options: Options
) -> Gradient:
    """The gradient of a parameter, in the dtype of its terms before they are rounded."""
    makers = {out: (eqn, i) for eqn in whole.eqns for i, out in enumerate(eqn.outs)}
    source = v
    while source in makers:
        eqn, i = makers[source]
        if not eqn.steps and eqn.op is not ROUNDED and "_to_copy" not in str(eqn.op):
            break
        source = eqn.ins[i]
        pending = whole.type_of(source).layout.partial.values()
        if pending and set(pending) <= {"sum", "avg"}:
            v = source
    type = whole.type_of(v)
    if type.dtype in HALVES and options.reduce_dtype is not None:
        type = attrs.evolve(type, dtype=wide_of(type.dtype, options.reduce_dtype))
    return Gradient(parameter, v, type, wanted)


def _finish(gradients: Sequence[Gradient], name: str, cost: CostModel) -> Program | None:
    """The program that takes sums over parts to gradients."""
    if all(g.type == g.wanted for g in gradients):
        return None
    dtypes = [g.wanted.dtype for g in gradients]

    def finish(sums: list[Any]) -> list[Any]:
        return [x.to(dtype) for x, dtype in zip(sums, dtypes, strict=True)]

    types = [g.type for g in gradients]
    spec: optree.PyTreeSpec = flatten((([0] * len(types),), {}))[1]
    options = Options(out_layouts=[g.wanted.layout for g in gradients])
    program = traced(finish, spec, [None] * len(types), types, options, cost=cost).program
    return attrs.evolve(program, name=f"{name}.finish")
