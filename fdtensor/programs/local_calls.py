"""`held_beside`: what the calls that a rank makes for one line hold beside what it reads and gives.

Such are the results of an op that nothing reads, and what a rule computes on its way, as the
windows of a pooling. Not the float32 copies of halves from which a CPU multiplies pending terms: an
accelerator makes none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

from fdtensor.layouts.remembered import while_alive
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.layouts.torch_private import has_schema
from fdtensor.ops.graph import Call, Graph, Var, gives_view, is_view
from fdtensor.ops.loop_ops import LOOP_OPS
from fdtensor.ops.lowering import lowered, results_of
from fdtensor.ops.notation.core import rule_of
from fdtensor.ops.notation.reshape import RESHAPES
from fdtensor.ops.precision import WIDE
from fdtensor.ops.rows import CallKey
from fdtensor.programs.eqn import Eqn

__all__ = ["held_beside", "takes_several"]


def held_beside(eqn: Eqn, types: Sequence[TensorType], rank: int, freed: tuple[bool, ...]) -> int:
    """The bytes that a rank holds more than what a line reads and gives, at the most.

    It is a line that `takes_several`; `types` are those of all values, and `freed` says for each
    that the line reads whether it goes with its last reader.
    """
    outs = [None if v is None else types[v.index] for v in eqn.outs]
    ins = [types[v.index] for v in eqn.ins]
    mesh = next(t.mesh for t in (*ins, *outs) if t is not None)
    coord = mesh.coord(rank)
    return 0 if coord is None else _beside(lowered(eqn.call, ins, outs, coord), freed)


def takes_several(eqn: Eqn) -> bool:
    """Whether more than what a line reads and gives may be there while a rank computes it."""
    if eqn.steps or eqn.op in LOOP_OPS or not has_schema(eqn.op):
        return False
    if eqn.op in WIDE.values():  # the CPU alone copies their operands
        return False
    rule = rule_of(eqn.op)
    return None in eqn.outs or (rule is not None and rule.local is not None)


@while_alive(16384)
def _beside(graph: Graph, freed: tuple[bool, ...]) -> int:
    """As `held_beside`, of the calls of a rank."""
    memory = _memories(graph)
    constants = {v for v, _ in graph.constants}  # which are there before and after
    results = {memory[v] for v in graph.outs}.difference(graph.inputs, constants)
    kept = constants | {memory[v] for v in graph.outs}
    kept |= {v for v, free in zip(graph.inputs, freed, strict=True) if not free}
    last = {memory[v]: i for i, call in enumerate(graph.calls) for v in (*call.ins, *_read(call))}

    def nbytes(values: Iterable[Var]) -> int:
        return sum(graph.types[v.index].nbytes for v in values)

    held = nbytes(graph.inputs)
    most = counted = held + nbytes(results)
    for i, call in enumerate(graph.calls):
        held += nbytes(v for v in _read(call) if memory[v] is v)
        most = max(most, held + _unread_bytes(call, graph))
        touched = {memory[v] for v in (*call.ins, *_read(call))}
        held -= nbytes(v for v in touched - kept if last[v] == i)
    return most - counted


def _read(call: Call) -> list[Var]:
    return [v for v in call.outs if v is not None]


def _memories(graph: Graph) -> dict[Var, Var]:
    """For each value the one whose memory it is in: itself, or what it is a view of."""
    memory = {v: v for v in chain(graph.inputs, (v for v, _ in graph.constants))}
    for call in graph.calls:
        shares = call.op in RESHAPES or is_view(call)
        memory.update((v, memory[call.ins[0]] if shares else v) for v in _read(call))
    return memory


def _unread_bytes(call: Call, graph: Graph) -> int:
    """The bytes of the results of a call that nothing reads."""
    if None not in call.outs or gives_view(call.op):
        return 0

    results = results_of(CallKey.of(call), tuple([graph.types[v.index] for v in call.ins]))
    return sum(full.nbytes for v, full in zip(call.outs, results, strict=True) if v is None)
