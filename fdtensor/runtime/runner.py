"""`runner_of` and `run_locally`: what runs a program on a Comm.

On a real mesh the lines of this rank are written out as one Python function, which is compiled
once; on a simulated mesh all ranks go through the program line by line, together.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from torch.profiler import record_function

from fdtensor.layouts.torch_private import below_autograd, profiling
from fdtensor.ops.ambient import autocasting, without_autocast
from fdtensor.ops.graph import Var, substituted, tensors_of
from fdtensor.ops.line_checks import debugging
from fdtensor.ops.rank_dims import SAME
from fdtensor.ops.select import SELECT
from fdtensor.plans.local_tensors import empty
from fdtensor.programs.eqn import Eqn
from fdtensor.programs.loops import Loop, loops_of
from fdtensor.programs.program import Program
from fdtensor.programs.sources import sources
from fdtensor.programs.text import line_name
from fdtensor.runtime.comm import inside
from fdtensor.runtime.copies import compare_copies, last_result
from fdtensor.runtime.lines import AFTER, BEFORE, Again, Ask, Line, LocalProgram
from fdtensor.runtime.local_program import Spelling, local_program
from fdtensor.runtime.source import selected, written

__all__ = ["compiled", "run_lines", "run_locally", "runner_of"]

Env = dict[Var, Any]
"""The values of a rank."""


def run_lines(program: Program, values: Sequence[Any], comm: Any) -> list[Any]:
    """The outputs of a program on a simulated Comm, whose values are tuples of tensors."""
    mesh = program.mesh
    locals_ = [local_program(program, rank, checked=debugging()) for rank in mesh.order]
    constants = [(t.detach(),) * mesh.size for _, t in program.constants]
    values = [[block.detach() for block in value] for value in values]
    given = list(zip(*values, *constants, strict=True)) or [()] * mesh.size
    envs: list[Env] = [
        dict(zip(p.inputs, v, strict=True)) for p, v in zip(locals_, given, strict=True)
    ]
    with without_autocast():
        _Ranks(program, locals_, envs, comm).run()
    outs = [[env[v] for v in p.outs] for p, env in zip(locals_, envs, strict=True)]
    return [tuple(blocks) for blocks in zip(*outs, strict=True)]


class _Ranks:
    """All ranks on their way through the lines of a program, together."""

    def __init__(
        self, program: Program, locals_: Sequence[LocalProgram], envs: Sequence[Env], comm: Any
    ) -> None:
        self.program, self.locals, self.envs, self.comm = program, locals_, envs, comm
        self.places = [0] * program.mesh.size
        self.branches = bool(locals_[0].conditions)

    def run(self) -> None:
        """Runs all lines, those of a loop for as long as its predicate holds."""
        asks = {loop.asks: loop for loop in loops_of(self.program)}
        starts = {loop.start: loop for loop in asks.values()}
        rounds = {loop.stop: loop for loop in asks.values()}
        again: dict[Loop, list[int]] = {}
        self._rest(BEFORE)
        number = 0
        while number <= len(self.program.eqns):
            if number in rounds and rounds[number] in again:
                loop = rounds[number]
                number, self.places[:] = loop.start, again[loop]
            elif number in starts and starts[number] not in again:
                again[starts[number]] = [*self.places]
            if number in asks and not self._goes_on():
                loop = asks[number]
                del again[loop]
                self._skip_to(loop.stop)
                number = loop.stop
                continue
            if number < len(self.program.eqns):
                self._line(number)
            number += 1
        self._rest(AFTER)

    def _goes_on(self) -> bool:
        """Whether a loop goes on, which all ranks have alike."""
        ask = self.locals[0].lines[self.places[0]]
        return bool(self.envs[0][ask.args[0]])

    def _skip_to(self, number: int) -> None:
        """Goes past the lines of each rank that belong to earlier lines of the program."""
        for r, p in enumerate(self.locals):
            while self.places[r] < len(p.lines) and 0 <= p.lines[self.places[r]].eqn < number:
                self.places[r] += 1

    def _rest(self, number: int) -> None:
        """The lines of each rank that belong to this line of the program."""
        for r, (p, env) in enumerate(zip(self.locals, self.envs, strict=True)):
            while self.places[r] < len(p.lines) and p.lines[self.places[r]].eqn == number:
                _call(p.lines[self.places[r]], env)
                self._pass(r)

    def _pass(self, r: int) -> None:
        """Goes past a line of a rank, after which what nobody reads is dropped."""
        for v in self.locals[r].dead[self.places[r]]:
            del self.envs[r][v]
        self.places[r] += 1

    def _line(self, number: int) -> None:
        """The lines of each rank for a line of the program, if its predicates hold."""
        eqn, asked = self.program.eqns[number], self.locals[0].conditions.get(number, ())
        for r, p in enumerate(self.locals):  # by which a loop goes on, whatever runs in it
            while self.places[r] < len(p.lines) and isinstance(p.lines[self.places[r]].op, Ask):
                self._pass(r)
        if self.branches and not all(bool(self.envs[0][v]) == holds for v, holds in asked):
            self._leave_out(number)
            return
        if eqn.steps:
            self._steps(eqn)
        before = [*self.places] if eqn.op is SAME else self.places
        self._rest(number)
        if eqn.op is SAME and self.comm.check != "never":
            spans = zip(self.envs, self.locals, before, self.places, strict=True)
            results = [last_result(env, p.lines[a:b]) for env, p, a, b in spans]
            compare_copies(self.program, eqn, results)

    def _steps(self, eqn: Eqn) -> None:
        """The steps of a line, for all ranks at once."""
        lines = [p.lines[i] for p, i in zip(self.locals, self.places, strict=True)]
        before = [
            tuple([env[line.args[k]] for env, line in zip(self.envs, lines, strict=True)])
            for k in range(len(eqn.steps))
        ]
        after = self.comm.perform_together(eqn.steps, before)
        for r, (env, line) in enumerate(zip(self.envs, lines, strict=True)):
            pairs = zip(line.outs, after, strict=True)
            env.update((v, made[r]) for v, made in pairs if v is not None)
            self._pass(r)

    def _leave_out(self, number: int) -> None:
        """Goes past a line that does not run: what it would give is None."""
        for r, (p, env) in enumerate(zip(self.locals, self.envs, strict=True)):
            while self.places[r] < len(p.lines) and p.lines[self.places[r]].eqn == number:
                env.update((v, None) for v in p.lines[self.places[r]].outs if v is not None)
                self._pass(r)


def _call(line: Line, env: Env) -> None:
    if isinstance(line.op, (Again, Ask)):
        return
    args, kwargs = substituted((line.args, line.kwargs), env.__getitem__)
    op = selected if line.op is SELECT else line.op
    made = tensors_of(op(*_lists(args), **{k: _lists(v) for k, v in kwargs}))
    # a kernel may give more than its fake: the gradient of a grid that was not asked for
    env.update((v, t) for v, t in zip(line.outs, made, strict=False) if v is not None)


def _lists(tree: Any) -> Any:
    return [_lists(entry) for entry in tree] if isinstance(tree, tuple) else tree


# --- straight-line code --------------------------------------------------------------------------


def compiled(program: Program, comm: Any, profiled: bool = False) -> Callable[..., tuple[Any, ...]]:
    """The function of local tensors that this rank runs: inputs, then constants.

    The Comm keeps it for as long as the program lives. Where it is `profiled`, a profiler of torch
    sees the modules and collectives by name.
    """
    known = comm.compiled.setdefault(compiled, WeakKeyDictionary()).setdefault(program, {})
    checked = debugging()
    function = known.get((checked, profiled))
    if function is None:
        spelling = Spelling(comm.backend, str(comm.device), exchanges=False, lane=comm.lane)
        groups = _groups(program, comm)
        local = local_program(program, comm.rank, spelling, checked)
        source, names = written(local, comm, groups, _labels(program) if profiled else ())
        exec(compile(source, f"<fdtensor {program.name}>", "exec"), names)
        function = known[checked, profiled] = names["program"]
    return function


def _labels(program: Program) -> list[str]:
    """What a profiler shows of each line: the collective, or the module that it is of."""
    labels = []
    for eqn, source in zip(program.eqns, sources(program), strict=True):
        of = source.module or source.line
        backward = f"backward of {of}" if of and source.is_backward else of
        what = line_name(eqn) if eqn.is_collective else ""
        labels.append(" ".join(filter(None, [what, backward])))
    return labels


def _groups(program: Program, comm: Any) -> tuple[str, ...]:
    """The process groups whose names the collectives of a program have, which are made."""
    coord = program.mesh.coord(comm.rank)
    assert coord is not None
    every = [step.collective.link() for step in program.collectives]
    some = [program.mesh.coset(axes, coord) for axes in every if axes]
    return tuple(dict.fromkeys(comm.around.group(tuple(sorted(ranks))) for ranks in some))


def run_locally(program: Program, values: Sequence[Any], comm: Any) -> Sequence[Any]:
    """The outputs of a program, without checks and without autograd."""
    if comm.rank is None:
        return run_lines(program, values, comm)
    if not inside(comm, program.mesh):
        return [empty(type, comm.rank, comm.device) for type in program.out_types]
    constants = [t for _, t in program.constants]
    with below_autograd():
        return as_traced(program, comm)(*values, *constants)


def runner_of(program: Program, comm: Any) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """The work of `run_locally` for a program on a Comm, prepared once."""
    if comm.rank is None or not inside(comm, program.mesh):
        return comm.watched(program, functools.partial(run_locally, program, comm=comm))
    function = as_traced(program, comm)
    constants = [tensor for _, tensor in program.constants]
    if len(program.eqns) < 3 and not constants:
        return comm.watched(program, lambda values: function(*values))

    def below(values: Sequence[Any]) -> Sequence[Any]:
        with below_autograd():  # a third faster where torch would look for derivatives
            return function(*values, *constants)

    return comm.watched(program, below)


def as_traced(program: Program, comm: Any) -> Callable[..., tuple[Any, ...]]:
    """The function of local tensors, run without the casts that its program says already.

    While a profiler of torch is at work, it is one that has names for it.
    """
    function = compiled(program, comm)

    def run(*values: Any) -> Any:
        if profiling():
            named = compiled(program, comm, profiled=True)
            with without_autocast(), record_function(f"fdtensor {program.name}"):
                return named(*values)
        if autocasting():
            with without_autocast():
                return function(*values)
        return function(*values)

    return run
