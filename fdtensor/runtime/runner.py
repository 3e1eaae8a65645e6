"""`runner_of` and `run_locally`: what runs a program on a Comm.

On a real mesh the lines of this rank are written out as one Python function, which is compiled
once; on a simulated mesh all ranks go through the program line by line, together (`run_lines`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from torch.profiler import record_function

from fdtensor.layouts.torch_private import below_autograd, profiling
from fdtensor.ops.ambient import autocasting, without_autocast
from fdtensor.ops.line_checks import debugging
from fdtensor.plans.local_tensors import empty
from fdtensor.programs.program import Program
from fdtensor.programs.sources import sources
from fdtensor.programs.text import line_name
from fdtensor.runtime.all_ranks import run_lines
from fdtensor.runtime.comm import inside
from fdtensor.runtime.local_program import Spelling, local_program
from fdtensor.runtime.reuse import taken_over
from fdtensor.runtime.source import written

__all__ = ["compiled", "run_locally", "runner_of"]


def compiled(
    program: Program,
    comm: Any,
    profiled: bool = False,
    donated: frozenset[int] = frozenset(),
    takes: bool = False,
) -> Callable[..., tuple[Any, ...]]:
    """The function of local tensors that this rank runs: inputs, then constants.

    Where inputs are `donated` it takes all in one list, which it empties, so that these are freed;
    it `takes` their memory for results where nobody else is in it.
    The Comm keeps it for as long as the program lives. Where it is `profiled`, a profiler of torch
    sees the modules and collectives by name.
    """
    known = comm.compiled.setdefault(compiled, WeakKeyDictionary()).setdefault(program, {})
    checked = debugging()
    key = checked, profiled, donated, takes
    function = known.get(key)
    if function is None:
        spelling = Spelling(comm.backend, str(comm.device), exchanges=False, lane=comm.lane)
        groups = _groups(program, comm)
        local = local_program(program, comm.rank, spelling, checked)
        labels = _labels(program) if profiled else ()
        reuses = not checked and len(program.eqns) >= 3  # autograd is not at work in those
        source, names = written(local, comm, groups, labels, donated, reuses, takes)
        exec(compile(source, f"<fdtensor {program.name}>", "exec"), names)
        function = known[key] = names["program"]
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


def runner_of(
    program: Program, comm: Any, donated: frozenset[int] = frozenset()
) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """The work of `run_locally` for a program on a Comm, prepared once.

    On a real mesh it empties the list of values where some are `donated`, and frees these when they
    are read last.
    """
    if comm.rank is None or not inside(comm, program.mesh):
        return comm.watched(program, functools.partial(run_locally, program, comm=comm))
    constants = [tensor for _, tensor in program.constants]
    if donated:
        return comm.watched(program, _freeing(program, comm, donated, constants))
    function = as_traced(program, comm)
    if len(program.eqns) < 3 and not constants:
        usual = compiled(program, comm)

        def briefly(values: Sequence[Any]) -> Sequence[Any]:
            return function(*values) if profiling() or autocasting() else usual(*values)

        return comm.watched(program, briefly)

    def below(values: Sequence[Any]) -> Sequence[Any]:
        with below_autograd():  # a third faster where torch would look for derivatives
            return function(*values, *constants)

    return comm.watched(program, below)


def _freeing(
    program: Program, comm: Any, donated: frozenset[int], constants: list[Any]
) -> Callable[[list[Any]], Sequence[Any]]:
    """The work of a program on a list that it empties."""
    known: dict[bool, Callable[..., Any]] = {}  # most calls are of one kind

    def freeing(values: list[Any]) -> Sequence[Any]:
        takes = taken_over(values, donated)
        if takes not in known:
            known[takes] = as_traced(program, comm, donated, takes)
        values += constants
        with below_autograd():
            return known[takes](values)

    return freeing


def as_traced(
    program: Program, comm: Any, donated: frozenset[int] = frozenset(), takes: bool = False
) -> Callable[..., tuple[Any, ...]]:
    """The function of local tensors, run without the casts that its program says already.

    While a profiler of torch is at work, it is one that has names for it.
    """
    function = compiled(program, comm, False, donated, takes)

    def run(*values: Any) -> Any:
        if profiling():
            named = compiled(program, comm, True, donated, takes)
            with without_autocast(), record_function(f"fdtensor {program.name}"):
                return named(*values)
        if autocasting():
            with without_autocast():
                return function(*values)
        return function(*values)

    return run
