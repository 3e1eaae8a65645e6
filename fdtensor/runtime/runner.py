"""`runner_of` and `run_locally`: what runs a program on a Comm.

On a real mesh the lines of this rank are written out as one Python function without branches, which
is compiled once; on a simulated mesh all ranks go through the program line by line, together.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from math import isfinite
from typing import Any
from weakref import WeakKeyDictionary

import torch

from fdtensor.layouts.torch_private import (
    below_autograd,
    has_schema,
    overload_name,
    packet_name,
    schema_of,
)
from fdtensor.ops.ambient import autocasting, without_autocast
from fdtensor.ops.graph import Var, substituted, tensors_of
from fdtensor.ops.line_checks import LineCheck, debugging
from fdtensor.ops.rank_dims import SAME
from fdtensor.ops.value_checks import SHARED
from fdtensor.plans.collectives import Step
from fdtensor.plans.local_tensors import empty
from fdtensor.programs.program import Program, Together
from fdtensor.runtime.comm import inside
from fdtensor.runtime.copies import compare_copies, last_result
from fdtensor.runtime.lines import AFTER, BEFORE, Begun, Line, LocalProgram, constant, ended
from fdtensor.runtime.local_program import Spelling, local_program
from fdtensor.runtime.operand_memory import BY_HAND

__all__ = ["compiled", "run_lines", "run_locally", "runner_of", "written"]

aten = torch.ops.aten


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
    places = [0] * program.mesh.size

    def run_rest(number: int) -> None:
        """The lines of each rank that belong to this line of the program."""
        for r, (p, env) in enumerate(zip(locals_, envs, strict=True)):
            while places[r] < len(p.lines) and p.lines[places[r]].eqn == number:
                _call(p.lines[places[r]], env)
                _forget(env, p, places[r])
                places[r] += 1

    run_rest(BEFORE)
    for number, eqn in enumerate(program.eqns):
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


def _forget(env: dict[Var, Any], p: LocalProgram, place: int) -> None:
    for v in p.dead[place]:
        del env[v]


def _call(line: Line, env: dict[Var, Any]) -> None:
    args, kwargs = substituted((line.args, line.kwargs), env.__getitem__)
    made = tensors_of(line.op(*_lists(args), **{k: _lists(v) for k, v in kwargs}))
    # a kernel may give more than its fake: the gradient of a grid that was not asked for
    env.update((v, t) for v, t in zip(line.outs, made, strict=False) if v is not None)


def _lists(tree: Any) -> Any:
    return [_lists(entry) for entry in tree] if isinstance(tree, tuple) else tree


# --- straight-line code --------------------------------------------------------------------------


def compiled(program: Program, comm: Any) -> Callable[..., tuple[Any, ...]]:
    """The function of local tensors that this rank runs: inputs, then constants.

    The Comm keeps it for as long as the program lives.
    """
    known = comm.compiled.setdefault(compiled, WeakKeyDictionary()).setdefault(program, {})
    checked = debugging()
    found = known.get(checked)
    if found is None:
        spelling = Spelling(comm.backend, str(comm.device), exchanges=False, lane=comm.lane)
        _groups(program, comm)
        source, names = written(local_program(program, comm.rank, spelling, checked), comm)
        exec(compile(source, f"<fdtensor {program.name}>", "exec"), names)
        found = known[checked] = names["program"]
    return found


def _groups(program: Program, comm: Any) -> None:
    """Makes the process groups whose names the collectives of a program have."""
    coord = program.mesh.coord(comm.rank)
    assert coord is not None
    for step in program.collectives:
        axes = step.collective.link()
        if axes:
            comm.around.group(tuple(sorted(program.mesh.coset(axes, coord))))


def run_locally(program: Program, values: Sequence[Any], comm: Any) -> Sequence[Any]:
    """The outputs of a program, without checks and without autograd."""
    if comm.rank is None:
        return run_lines(program, values, comm)
    if not inside(comm, program.mesh):
        return [empty(type, comm.rank, comm.device) for type in program.out_types]
    constants = [t for _, t in program.constants]
    with below_autograd(), without_autocast():
        return compiled(program, comm)(*values, *constants)


def runner_of(program: Program, comm: Any) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """The work of `run_locally` for a program on a Comm, prepared once."""
    if comm.rank is None or not inside(comm, program.mesh):
        return comm.watched(program, functools.partial(run_locally, program, comm=comm))
    function = as_traced(compiled(program, comm))
    constants = [tensor for _, tensor in program.constants]
    if len(program.eqns) < 3 and not constants:
        return comm.watched(program, lambda values: function(*values))

    def below(values: Sequence[Any]) -> Sequence[Any]:
        with below_autograd():  # a third faster where torch would look for derivatives
            return function(*values, *constants)

    return comm.watched(program, below)


def as_traced(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function of local tensors, run without the casts that its program says already."""

    def run(*values: Any) -> Any:
        if autocasting():
            with without_autocast():
                return function(*values)
        return function(*values)

    return run


def written(found: LocalProgram, comm: Any) -> tuple[str, dict[str, Any]]:
    """The lines of a rank as the source of one function, and the names that it reads."""
    names: dict[str, Any] = {}
    inputs = set(found.inputs)
    body = []
    for line, dead in zip(found.lines, found.dead, strict=True):
        outs = ", ".join("_" if v is None else f"v{v.index}" for v in line.outs)
        value = _expression(line, names, comm)
        if len(line.outs) > 1 or _several(line.op):
            outs = f"({outs},)"
            if has_schema(line.op) and not _plain_tuple(line):
                value = f"{_named(tensors_of, 'tensors_of', names)}({value})"
        body.append(f"    {outs} = {value}" if outs else f"    {value}")
        gone = [f"v{v.index}" for v in dead if v not in inputs]
        gone += ["_"] if None in line.outs else []
        if gone:
            body.append(f"    del {', '.join(gone)}")
    parameters = ", ".join(f"v{v.index}" for v in found.inputs)
    results = "".join(f"v{v.index}, " for v in found.outs)
    return "\n".join([f"def program({parameters}):", *body, f"    return ({results})"]), names


def _plain_tuple(line: Line) -> bool:
    """Whether an op returns just its tensors, without numbers or None among them."""
    kinds = [str(r.type) for r in schema_of(line.op).returns]
    return kinds == ["List[Tensor]"] or (set(kinds) == {"Tensor"} and len(kinds) == len(line.outs))


def _several(op: Any) -> bool:
    """Whether an op returns a list even of one tensor."""
    if not has_schema(op):
        return False
    returns = schema_of(op).returns
    return len(returns) > 1 or any(str(r.type) != "Tensor" for r in returns)


def _expression(line: Line, names: dict[str, Any], comm: Any) -> str:
    if isinstance(line.op, Together):
        steps = _named(line.op.steps, "steps", names)
        together = _named(comm.perform_together, "perform_together", names)
        return f"{together}({steps}, [{', '.join(f'v{v.index}' for v in line.args)}])"
    if isinstance(line.op, Step):
        step = _named(line.op, "step", names)
        return f"{_named(comm.perform, 'perform', names)}({step}, v{line.args[0].index})"
    if isinstance(line.op, Begun):
        return _begun(line, names, comm)
    if line.op is ended:
        return f"v{line.args[0].index}()"
    if isinstance(line.op, LineCheck):
        return f"{_named(line.op, 'check', names)}(v{line.args[0].index})"
    if line.op is constant:
        return _named(line.args[0], "constant", names)
    target = _named(_fast(line.op), _name_of(line.op), names)
    args = [_source(a, names) for a in line.args]
    args += [f"{k}={_source(v, names)}" for k, v in line.kwargs]
    return f"{target}({', '.join(args)})"


def _begun(line: Line, names: dict[str, Any], comm: Any) -> str:
    """The expression that begins an exchange."""
    op = line.op.op
    if isinstance(op, Together):
        steps, begin = _named(op.steps, "steps", names), _named(comm.begin_together, "begin", names)
        return f"{begin}({steps}, [{', '.join(f'v{v.index}' for v in line.args)}])"
    step, begin = _named(op, "step", names), _named(comm.begin, "begin", names)
    return f"{begin}({step}, v{line.args[0].index})"


_PLAIN = {
    "mm", "bmm", "addmm", "add", "sub", "mul", "div", "relu", "t", "transpose", "permute", "exp",
    "log", "sqrt", "rsqrt", "tanh", "sigmoid", "neg", "sum", "mean", "unsqueeze", "reshape", "cat",
    "split", "where", "clone", "select", "pow", "addcmul", "addcdiv", "lerp", "amax", "baddbmm",
}  # fmt: skip


def _fast(op: Any) -> Callable[..., Any]:
    """A function that does what the overload does, called half a microsecond faster."""
    if op in SHARED:
        return SHARED[op]
    if op in BY_HAND:
        return op
    if op.namespace == "aten" and packet_name(op) in _PLAIN and overload_name(op) != "dtype":
        return getattr(torch, packet_name(op))
    return op


def _name_of(op: Any) -> str:
    return op.__name__ if op in BY_HAND else packet_name(op)


def _named(value: Any, hint: str, names: dict[str, Any]) -> str:
    for name, known in names.items():
        if known is value:
            return name
    name = hint if hint not in names else f"{hint}_{len(names)}"
    names[name] = value
    return name


def _source(value: Any, names: dict[str, Any]) -> str:
    match value:
        case Var():
            return f"v{value.index}"
        case tuple():
            return f"[{', '.join(_source(v, names) for v in value)}]"
        case bool() | int() | str() | None:
            return repr(value)
        case float() if isfinite(value):
            return repr(value)
        case _:
            return _named(value, "value", names)
