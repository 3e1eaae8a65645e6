"""`outcome`: a program run by fdtensor in its setting, and compared with plain torch.

spmd            the whole as one traced program
call            each line by itself
run             `trace`, then `run` of the program
fx              the modules of `Program.to_fx`, the ranks in threads
gloo            the whole on real ranks
keyed           with random ops and a key, beside the same on one rank
grad            `torch.func.grad` of a weighted sum of the results, traced
jvp, vmap, hessian      other transforms, traced
backward        the whole, then `backward` from outside, to the local tensors
call_backward   each line by itself, then `backward`
"""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Sequence
from random import Random
from typing import Any

import attrs
import torch

from fdtensor import random
from fdtensor.layouts.errors import DataDependentError, RuleError
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.ops.pins import constrain
from fdtensor.programs.tracer import trace
from fdtensor.runtime.interpreter import run
from fdtensor.runtime.simulator import SimulatedComm
from fdtensor.tensors.call import call
from fdtensor.tensors.distribution import distribute, from_local
from fdtensor.tensors.dtensor import DTensor
from fdtensor.tensors.spmd import spmd
from fdtensor.testing.pool import GlooPool
from fdtensor.testing.values import scatter
from tests.hunt.compare import Wrong, check_gradients, check_results
from tests.hunt.layouts import drawn_layout
from tests.hunt.plain import (
    NOISES,
    Reference,
    fulls,
    in_thread,
    line_functions,
    moment,
    reference,
    smooth_inputs,
    transformed,
    weighted,
)
from tests.hunt.records import Program, compiled, line_at, source
from tests.hunt.values import forms_of, kind_of, stored
from tests.support.lockstep import apart

__all__ = ["GOOD", "Outcome", "outcome"]

GOOD = ("ok", "raises", "data", "rule", "wider")
"""Kinds of outcome that are no failure: equal; both raise; refused because it depends on data, or
for want of a rule where that was asked for; torch cannot do it though no mistake was meant."""

KEY = random.key(7)

Gradient = tuple[TensorType, list[torch.Tensor | None]]


@attrs.frozen
class Outcome:
    """What came of a program."""

    kind: str
    """One of GOOD, a kind of `Wrong`, `error`, `crash`, `slow`, `poisoned` (torch does not work any
    more), or `missing`: torch raises and fdtensor does not."""
    text: str = ""
    op: str = ""
    """The op of the line where it was seen, if that is known."""
    about: str = ""
    """The moment, if not plain."""
    error: str = ""
    """The type of the exception."""
    seconds: float = 0.0


def outcome(program: Program) -> Outcome:
    """What comes of a program: the first thing that is wrong, or `ok`."""
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        session, found = _Session(program), Outcome("ok")
        for number, about in enumerate(program.setting.moments):
            found = _called(session, number, about)
            if found.kind not in GOOD:
                break
    return attrs.evolve(found, seconds=time.perf_counter() - start)


class _Session:
    """The functions of a program, made once, and the ranks that they run on."""

    def __init__(self, program: Program) -> None:
        self.program, self.comm = program, SimulatedComm(program.mesh)
        self.leaves: dict[str, list[torch.Tensor] | None] = {}
        setting = program.setting
        self.pins = dict(setting.pins)
        self.text = source(program.names, program.lines, program.outs, pinned=tuple(self.pins))
        whole = compiled(self.text, **pin_names(program))
        self.steps = [compiled(text) for text in line_functions(program.lines)]
        self.smooth = smooth_inputs(program)
        self.traced = transformed(setting.way, whole, self.smooth)
        self.spmd = spmd(
            self.traced,
            out_layouts=setting.out_layouts,
            on_missing_rule=setting.on_missing_rule,
        )

    def inputs(self, number: int, about: str) -> list[DTensor[Any]]:
        """The arguments of the call of this number."""
        made = []
        again = number if about == "other_values" else 0
        for i, full in zip(self.program.inputs, fulls(self.program, again)):
            layout, form = i.layout, i.form
            if about == "other_layouts":
                draw = Random(f"{i.seed}/{number}")
                layout = drawn_layout(draw, i.layout.mesh, i.shape, i.dtype, i.fill != "special")
            if about == "other_forms" or (form.startswith("expanded") and layout.partial):
                every = forms_of(i.shape, i.dtype, True)
                form = every[(i.seed + number) % len(every)]
            type = TensorType(i.shape, i.dtype, layout)
            blocks = tuple(stored(t, form) for t in scatter(full, type, i.seed))
            tracked = (about == "tracked" or "backward" in self.program.setting.way) and (
                kind_of(i.dtype) in "fc"
            )
            before = tracked and i.seed % 2 == 1
            self.leaves[i.name] = [t.requires_grad_() for t in blocks] if before else None
            made.append(from_local(blocks, type, self.comm))
            if tracked and not before:
                made[-1].requires_grad_()
        return made

    def run(self, given: Sequence[DTensor[Any]]) -> Sequence[Any]:
        """The results, or with `backward` from outside the gradients of the blocks."""
        way = self.program.setting.way
        match way:
            case "call" | "call_backward":
                outs = self.by_line(given)
            case "run":
                outs = self.as_program(given)
            case "fx":
                outs = self.as_modules(given)
            case "gloo":
                outs = self.on_gloo(given)
            case "keyed":
                outs = self.spmd(*given, key=KEY)
            case _:
                outs = self.spmd(*given)
        if "backward" not in way:
            return outs
        weighted([x.full() for x in outs]).backward()
        leaves = [self.leaves[name] for name in self.program.names]
        return [_gradient(given[k], leaves[k]) for k in self.smooth]

    def by_line(self, given: Sequence[DTensor[Any]]) -> Sequence[Any]:
        """Each line by `call`; what is pinned is asked for in its layout."""
        env = dict(zip(self.program.names, given))
        for line, function in zip(self.program.lines, self.steps):
            names = (*line.binds, *line.writes)
            wanted = tuple(self.pins.get(n) for n in names)
            options = {"out_layouts": wanted} if any(wanted) else {}
            made = call(function, *[env[n] for n in line.reads], **options)
            env.update(zip(names, made))
        return [env[n] for n in self.program.outs]

    def as_program(self, given: Sequence[DTensor[Any]]) -> Sequence[Any]:
        """By `trace` and `run`."""
        program = trace(self.traced, *given, out_layouts=self.program.setting.out_layouts)
        made = run(program, [x.local for x in given], self.comm)
        return [DTensor(v, t, self.comm) for v, t in zip(made, program.out_types, strict=True)]

    def as_modules(self, given: Sequence[DTensor[Any]]) -> Sequence[Any]:
        """By the plain modules of all ranks, each in a thread."""
        mesh = self.program.mesh
        program = trace(self.traced, *given, out_layouts=self.program.setting.out_layouts)
        modules = {rank: program.to_fx(rank) for rank in mesh.ranks}
        inputs = {rank: [x.local[k] for x in given] for k, rank in enumerate(mesh.ranks)}
        each = apart(modules, mesh, inputs)
        values = [tuple(each[rank][i] for rank in mesh.ranks) for i in range(len(program.outs))]
        return [DTensor(v, t, self.comm) for v, t in zip(values, program.out_types)]

    def on_gloo(self, given: Sequence[DTensor[Any]]) -> Sequence[Any]:
        """On real ranks, each a process."""
        pins, setting = pin_names(self.program), self.program.setting
        every = gloo(self.program.mesh.size).run(
            _on_rank, self.text, pins, setting.out_layouts, *given
        )
        return every[0]


def pin_names(program: Program) -> dict[str, Any]:
    """What the source of a program names for its pins."""
    return {"constrain": constrain} | {f"pin_{n}": p for n, p in program.setting.pins}


@functools.cache
def gloo(ranks: int) -> GlooPool:
    """Real ranks, which live as long as this process."""
    return GlooPool(ranks, timeout=30.0)


def _on_rank(text: str, pins: dict[str, Any], wanted: Any, *given: Any) -> Any:
    return spmd(compiled(text, **pins), out_layouts=wanted)(*given)


def _gradient(x: DTensor[Any], leaves: Sequence[torch.Tensor] | None) -> Gradient:
    """The cotangents of the blocks, that of the tensor for each term of it.

    Where autograd tracks the `leaves` that the DTensor was made of, those of an average are parts.
    """
    terms = 1
    for axis, op in x.layout.partial.items():
        terms *= x.mesh.axis_size(axis) if op == "avg" and leaves is not None else 1
    grads = [t.grad for t in (x.local if leaves is None else leaves)]
    return x.type.cotangent(), [None if t is None else t * terms for t in grads]


def _called(session: _Session, number: int, about: str) -> Outcome:
    program = session.program
    again = number if about == "other_values" else 0
    due = _alone(program, about, again) if _keyed(program) else reference(program, about, again)
    given = session.inputs(number, about)
    kept = [[_bare(t.detach()).clone() for t in x.local] for x in given]
    before = dict(session.comm.received)
    try:
        with moment(about):
            made = (
                in_thread(lambda: session.run(given)) if about == "thread" else session.run(given)
            )
    except Exception as error:
        return _raised(program, error, due, about)
    if due.error is not None:
        text = f"torch raises {type(due.error).__name__}: {_first(due.error)}"
        kind = "missing" if program.fails else "wider"
        return Outcome(kind, text, _op(program, due.error), about)
    try:
        _check(session, given, made, due, about, again)
        _check_untouched(given, kept, made)
        if program.setting.way == "spmd" and about == "plain":
            _check_bytes(session, given, before)
    except Wrong as wrong:
        return Outcome(wrong.kind, str(wrong)[:600], _culprit(program, wrong), about)
    return Outcome("ok", about=about)


def _keyed(program: Program) -> bool:
    return program.setting.way == "keyed"


def _alone(program: Program, about: str, again: int) -> Reference:
    """What a program with random ops gives on one rank."""
    mesh, comm = Mesh(alone=1), SimulatedComm(Mesh(alone=1))
    f = compiled(source(program.names, program.lines, program.outs))
    try:
        with moment(about):
            given = [distribute(t, mesh.layout(), comm) for t in fulls(program, again)]
            outs = [x.full().detach() for x in spmd(f)(*given, key=KEY)]
    except Exception as error:
        return Reference(error=error)
    eps = [torch.finfo(t.dtype).eps for t in outs if kind_of(t.dtype) in "fc"]
    return Reference(tuple(outs), None, max([1e-7, *eps]))


def _check(
    session: _Session,
    given: Sequence[DTensor[Any]],
    made: Any,
    due: Reference,
    about: str,
    again: int,
) -> None:
    program = session.program

    def compare(due: Reference) -> None:
        if "backward" in program.setting.way:
            check_gradients(made, due)
        else:
            check_results(made, due, _asked(program), given)

    try:
        compare(due)
    except Wrong as wrong:
        if wrong.kind != "value" or _keyed(program):
            raise
        compare(reference(program, about, again, NOISES))


def _asked(program: Program) -> Sequence[Any] | None:
    """The layouts of the results that were asked for."""
    if program.setting.way.startswith("call"):
        pins = dict(program.setting.pins)
        return [pins.get(n) for n in program.outs]
    return program.setting.out_layouts


def _raised(program: Program, error: Exception, due: Reference, about: str) -> Outcome:
    root = error.__cause__ or error
    op, name = _op(program, error), type(error).__name__
    name = name if root is error else f"{name} of {type(root).__name__}"
    if due.error is not None:
        text = f"{name} where torch raises {type(due.error).__name__}"
        return Outcome("raises", text, op, about, name)
    if "modified by an inplace operation" in str(root) and _late(program, about):
        return Outcome("raises", "where torch would in a backward", op, about, name)
    if program.data and DataDependentError in (type(error), type(root)):
        return Outcome("data", _first(root), op, about, name)
    if isinstance(error, RuleError) and program.setting.on_missing_rule == "error":
        return Outcome("rule", _first(root), op, about, name)
    return Outcome("error", _first(root), op, about, name)


def _late(program: Program, about: str) -> bool:
    """Whether the backward of some value is an error in torch, which nobody asked for."""
    way = "call_backward" if program.setting.way.startswith("call") else "backward"
    names = [n for line in program.lines for n in line.binds]
    setting = attrs.evolve(program.setting, way=way, out_layouts=None)
    every = attrs.evolve(program, outs=(*program.names, *names), setting=setting)
    return reference(every, "plain" if about == "tracked" else about).error is not None


def _first(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:400]


def _op(program: Program, error: BaseException) -> str:
    """The op of the line that raised; by single lines, the frames do not tell which."""
    at = line_at(error)
    if program.setting.way.startswith("call") or at is None or at >= len(program.lines):
        failing = [line.op for line in program.lines if line.fails]
        return failing[0] if failing else ""
    return program.lines[at].op


def _culprit(program: Program, wrong: Wrong) -> str:
    """The op that made a wrong result."""
    if wrong.place is None or wrong.place >= len(program.outs):
        return ""
    name = program.outs[wrong.place]
    made = [line.op for line in program.lines if name in (*line.binds, *line.writes)]
    return made[-1] if made and program.setting.way in ("spmd", "call") else ""


def _bare(t: torch.Tensor) -> torch.Tensor:
    return t.resolve_conj().resolve_neg()


def _numbers(t: torch.Tensor) -> torch.Tensor:
    """With 7 for nan, in a dtype that has a kernel for it."""
    return (t.to(torch.complex64) if t.dtype is torch.complex32 else t).nan_to_num(7)


def _check_untouched(
    given: Sequence[DTensor[Any]], kept: Sequence[Sequence[torch.Tensor]], made: Any
) -> None:
    """Inputs are as before, and results have memory of their own."""
    for k, (x, before) in enumerate(zip(given, kept)):
        for t, was in zip(x.local, before):
            if not torch.equal(_numbers(_bare(t.detach())), _numbers(was)):
                raise Wrong("mutated", f"input {k} {x.type} has changed")
    known = {t.untyped_storage().data_ptr() for x in given for t in x.local if t.numel()}
    for i, x in enumerate(made):
        if isinstance(x, DTensor) and not any(x is y for y in given):
            for t in x.local:
                if t.numel() and t.untyped_storage().data_ptr() in known:
                    raise Wrong("aliased", f"result {i} {x.type} shares memory with an input", i)


def _check_bytes(session: _Session, given: Sequence[DTensor[Any]], before: dict[int, int]) -> None:
    """What arrived at each rank is what the program announces."""
    try:
        traced = session.spmd.trace(*given)
    except DataDependentError:
        return
    for rank in session.program.mesh.ranks:
        counted = session.comm.received.get(rank, 0) - before.get(rank, 0)
        announced = traced.received_bytes_at(rank)
        if counted != announced:
            raise Wrong("bytes", f"rank {rank} received {counted} B, {announced} B are announced")
