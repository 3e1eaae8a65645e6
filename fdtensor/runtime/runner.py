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
from fdtensor.programs.program import Program
from fdtensor.programs.sources import sources
from fdtensor.programs.text import line_name
from fdtensor.runtime.comm import inside
from fdtensor.runtime.copies import compare_copies, last_result
from fdtensor.runtime.lines import AFTER, BEFORE, Line, LocalProgram
from fdtensor.runtime.local_program import Spelling, local_program
from fdtensor.runtime.source import selected, written

__all__ = ["compiled", "run_lines", "run_locally", "runner_of"]


def run_lines(program: Program, values: Sequence[Any], comm: Any) -> list[Any]:
    """The outputs of a program on a simulated Comm, whose values are tuples of tensors."""
    mesh = program.mesh
    locals_ = [local_program(program, rank, checked=debugging()) for rank in mesh.order]
    constants = [(t.detach(),) * mesh.size for _, t in program.constants]
    values = [[block.detach() for block in value] for value in values]
    given = list(zip(*values, *constants, strict=True)) or [()] * mesh.size
    envs: list[dict[Var, Any]] = [
        dict(zip(p.inputs, v, strict=True)) for p, v in zip(locals_, given, strict=True)
    ]
    with without_autocast():
        _run_together(program, locals_, envs, comm)
    outs = [[env[v] for v in p.outs] for p, env in zip(locals_, envs, strict=True)]
    return [tuple(blocks) for blocks in zip(*outs, strict=True)]


def _run_together(
    program: Program, locals_: Sequence[LocalProgram], envs: Sequence[dict[Var, Any]], comm: Any
) -> None:
    """All ranks through the lines of a program, one line after the other."""
    places, branches = [0] * program.mesh.size, bool(locals_[0].conditions)

    def run_rest(number: int) -> None:
        """The lines of each rank that belong to this line of the program."""
        for r, (p, env) in enumerate(zip(locals_, envs, strict=True)):
            while places[r] < len(p.lines) and p.lines[places[r]].eqn == number:
                _call(p.lines[places[r]], env)
                _forget(env, p, places[r])
                places[r] += 1

    run_rest(BEFORE)
    for number, eqn in enumerate(program.eqns):
        if branches and not _runs(number, locals_[0], envs[0]):
            _leave_out(number, locals_, envs, places)
            continue
        if eqn.steps:
            lines = [p.lines[i] for p, i in zip(locals_, places, strict=True)]
            before = [
                tuple([env[line.args[k]] for env, line in zip(envs, lines, strict=True)])
                for k in range(len(eqn.steps))
            ]
            after = comm.perform_together(eqn.steps, before)
            for r, (env, line) in enumerate(zip(envs, lines, strict=True)):
                env.update(
                    (v, made[r]) for v, made in zip(line.outs, after, strict=True) if v is not None
                )
                _forget(env, locals_[r], places[r])
                places[r] += 1
        before = [*places] if eqn.op is SAME else places
        run_rest(number)
        if eqn.op is SAME and comm.check != "never":
            spans = zip(envs, locals_, before, places, strict=True)
            compare_copies(program, eqn, [last_result(env, p.lines[a:b]) for env, p, a, b in spans])
    run_rest(AFTER)


def _runs(number: int, p: LocalProgram, env: dict[Var, Any]) -> bool:
    """Whether the predicates, which all ranks have alike, say that a line of the program runs."""
    return all(bool(env[v]) == holds for v, holds in p.conditions.get(number, ()))


def _leave_out(
    number: int,
    locals_: Sequence[LocalProgram],
    envs: Sequence[dict[Var, Any]],
    places: list[int],
) -> None:
    """Goes past a line that does not run: what it would give is None."""
    for r, (p, env) in enumerate(zip(locals_, envs, strict=True)):
        while places[r] < len(p.lines) and p.lines[places[r]].eqn == number:
            env.update((v, None) for v in p.lines[places[r]].outs if v is not None)
            _forget(env, p, places[r])
            places[r] += 1


def _forget(env: dict[Var, Any], p: LocalProgram, place: int) -> None:
    for v in p.dead[place]:
        del env[v]


def _call(line: Line, env: dict[Var, Any]) -> None:
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
