"""`halves`: a program with its derivative, cut in two where cotangents come in."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from fdtensor.ops.graph import Var
from fdtensor.ops.saved_values import ALIAS
from fdtensor.programs.bundles import bundled
from fdtensor.programs.program import Eqn, Program, is_view_line
from fdtensor.programs.schedule import scheduled

__all__ = ["halves"]


def halves(whole: Program, inputs: int, outs: int) -> tuple[Program, Program, tuple[int, ...]]:
    """The lines that do not depend on cotangents, and the rest; views are taken again, not kept."""
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
    )
    half_program = scheduled(bundled(half_program))
    return attrs.evolve(half_program, origin=None)  # that of the whole is not its own
