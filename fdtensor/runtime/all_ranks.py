"""`run_lines`: all ranks of a mesh, in this process, go through the lines of a program together.

Of the ranks whose operands of a line are the very same tensors one runs it for all, so that what
is replicated is computed once, and held once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import torch

from fdtensor.layouts.tensor_type import TensorType
from fdtensor.layouts.torch_private import count_dispatch_modes
from fdtensor.ops.ambient import without_autocast
from fdtensor.ops.graph import Var
from fdtensor.ops.line_checks import debugging
from fdtensor.ops.rank_dims import SAME
from fdtensor.programs.eqn import Eqn
from fdtensor.programs.loops import Loop, loops_of
from fdtensor.programs.program import Program
from fdtensor.runtime.alike import replicas
from fdtensor.runtime.copies import compare_copies, last_result
from fdtensor.runtime.lines import AFTER, BEFORE, Ask, LocalProgram
from fdtensor.runtime.local_program import local_programs
from fdtensor.runtime.replication import storage_of
from fdtensor.runtime.simulator import unshared
from fdtensor.runtime.source import LineFunction, line_functions

__all__ = ["run_lines"]

Env = dict[Var, Any]
"""The values of a rank."""


def run_lines(program: Program, values: Sequence[Any], comm: Any) -> list[Any]:
    """The outputs of a program on a Comm of all ranks, whose values are tuples of tensors."""
    mesh = program.mesh
    locals_ = local_programs(program, debugging())
    constants = [(t.detach(),) * mesh.size for _, t in program.constants]
    pairs = zip(values, program.in_types, strict=True)
    values = [_held_once([block.detach() for block in value], type) for value, type in pairs]
    given = list(zip(*values, *constants, strict=True)) or [()] * mesh.size
    envs: list[Env] = [
        dict(zip(p.inputs, v, strict=True)) for p, v in zip(locals_, given, strict=True)
    ]
    with without_autocast():
        _Ranks(program, locals_, envs, comm).run()
    outs = [[env[v] for v in p.outs] for p, env in zip(locals_, envs, strict=True)]
    return unshared([tuple(blocks) for blocks in zip(*outs, strict=True)])


def _held_once(blocks: list[torch.Tensor], type: TensorType) -> list[torch.Tensor]:
    """The blocks of ranks, where replicas with the same bits are one tensor."""
    if count_dispatch_modes() or blocks[0].device.type == "meta":
        return blocks
    for ranks in replicas(type):
        first, *others = [type.mesh.position(rank) or 0 for rank in ranks]
        for other in others:
            if _same_bits(blocks[first], blocks[other]):
                blocks[other] = blocks[first]
    return blocks


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether dense tensors have the same bits in the same order; False for other kinds."""
    if a.layout != torch.strided or a.stride() != b.stride() or a.is_conj() or b.is_conj():
        return False
    if a.is_neg() or b.is_neg():
        return False
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    bits = _BITS[a.dtype.itemsize]
    return torch.equal(a.view(bits), b.view(bits))


@attrs.define(eq=False)
class _Group:
    """Ranks that run the same lines."""

    local: LocalProgram
    functions: Sequence[LineFunction]
    places: list[int]
    """Where the ranks are in the order of the mesh."""
    envs: list[Env]
    place: int = 0
    """The number of the line that is next."""


class _Ranks:
    """All ranks on their way through the lines of a program, together."""

    def __init__(
        self, program: Program, locals_: Sequence[LocalProgram], envs: Sequence[Env], comm: Any
    ) -> None:
        self.program, self.envs, self.comm = program, envs, comm
        of: dict[LocalProgram, list[int]] = {}
        for i, local in enumerate(locals_):
            of.setdefault(local, []).append(i)
        self.groups = [
            _Group(local, line_functions(local), places, [envs[i] for i in places])
            for local, places in of.items()
        ]
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
                number = loop.start
                for group, place in zip(self.groups, again[loop], strict=True):
                    group.place = place
            elif number in starts and starts[number] not in again:
                again[starts[number]] = [group.place for group in self.groups]
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
        first = self.groups[0]
        return bool(first.envs[0][first.local.lines[first.place].args[0]])

    def _skip_to(self, number: int) -> None:
        """Goes past the lines of each group that belong to earlier lines of the program."""
        for group in self.groups:
            lines = group.local.lines
            while group.place < len(lines) and 0 <= lines[group.place].eqn < number:
                group.place += 1

    def _rest(self, number: int) -> None:
        """The lines of each group that belong to this line of the program."""
        for group in self.groups:
            for _ in _those_of(group, number):
                self._call(group)
                _pass(group)

    def _line(self, number: int) -> None:
        """The lines of each group for a line of the program, if its predicates hold."""
        eqn, first = self.program.eqns[number], self.groups[0]
        for group in self.groups:  # by which a loop goes on, whatever runs in it
            lines = group.local.lines
            while group.place < len(lines) and isinstance(lines[group.place].op, Ask):
                _pass(group)
        asked = first.local.conditions.get(number, ()) if self.branches else ()
        if not all(bool(first.envs[0][v]) == holds for v, holds in asked):
            self._leave_out(number)
            return
        if eqn.steps:
            self._steps(eqn)
        before = [group.place for group in self.groups]
        self._rest(number)
        if eqn.op is SAME and self.comm.check != "never":
            results: dict[int, Any] = {}
            for group, start in zip(self.groups, before, strict=True):
                own = group.local.lines[start : group.place]
                pairs = zip(group.places, group.envs, strict=True)
                results.update((i, last_result(env, own)) for i, env in pairs)
            compare_copies(self.program, eqn, [results[i] for i in sorted(results)])

    def _steps(self, eqn: Eqn) -> None:
        """The steps of a line, for all ranks at once."""
        lines = {i: g.local.lines[g.place] for g in self.groups for i in g.places}
        before = [
            tuple([env[lines[i].args[k]] for i, env in enumerate(self.envs)])
            for k in range(len(eqn.steps))
        ]
        after = self.comm.perform_together(eqn.steps, before)
        for i, env in enumerate(self.envs):
            pairs = zip(lines[i].outs, after, strict=True)
            env.update((v, blocks[i]) for v, blocks in pairs if v is not None)
        del before, after
        for group in self.groups:
            _pass(group)

    def _leave_out(self, number: int) -> None:
        """Goes past a line that does not run: what it would give is None."""
        for group in self.groups:
            for line in _those_of(group, number):
                for env in group.envs:
                    env.update((v, None) for v in line.outs if v is not None)
                _pass(group)

    def _call(self, group: _Group) -> None:
        """The next line of a group, once for all ranks with the same operands."""
        function, outs = group.functions[group.place], group.local.lines[group.place].outs
        if function.overwrites:
            self._separate(group, function.overwrites)
        done: dict[tuple[int, ...], tuple[Any, Any]] = {}
        for env in group.envs:
            operands = [env[v] for v in function.reads]
            key = tuple([id(operand) for operand in operands])
            if key not in done:  # with the operands, so that their numbers stay theirs
                done[key] = function.call(*operands), operands
            # a kernel may give more than its fake: the gradient of a grid that was not asked for
            for v, tensor in zip(outs, done[key][0], strict=False):
                if v is not None:
                    env[v] = tensor

    def _separate(self, group: _Group, overwritten: Sequence[Var]) -> None:
        """Copies what is about to be overwritten and is shared with another rank."""
        holders = Counter(
            storage
            for env in self.envs
            for storage in {storage_of(t) for t in env.values() if isinstance(t, torch.Tensor)}
        )
        for env in group.envs:
            for v in overwritten:
                if holders[storage_of(env[v])] > 1:
                    env[v] = env[v].clone()


def _those_of(group: _Group, number: int) -> Iterator[Any]:
    """The next lines of a group that belong to this line of the program."""
    lines = group.local.lines
    while group.place < len(lines) and lines[group.place].eqn == number:
        yield lines[group.place]


def _pass(group: _Group) -> None:
    """Goes past a line, after which what nobody reads is dropped."""
    for v in group.local.dead[group.place]:
        for env in group.envs:
            del env[v]
    group.place += 1
