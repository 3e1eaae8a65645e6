"""`on_whole_operands`: the calls of a graph whose bits depend on how operands are cut.

A kernel need not give a block the bits that it gives that block of the whole: sums are added in
another order, and rounding differs between the vectors and the rest of a loop. With the option
`deterministic`, calls run on whole operands but for those of which IEEE 754 says the bits. These
lose what strides the whole would have; so they come first, on what the caller gives, or last.
"""

from __future__ import annotations

from collections.abc import Iterable

from fdtensor.layouts.placement import Replicate
from fdtensor.layouts.remembered import while_alive
from fdtensor.layouts.torch_private import packet_name
from fdtensor.ops.graph import Call, Full, Graph, Var
from fdtensor.ops.notation.core import Row
from fdtensor.programs.nodes import Option

__all__ = ["EXACT", "on_whole", "on_whole_operands"]

EXACT = """
abs add bitwise_and bitwise_not bitwise_or bitwise_xor ceil clamp clamp_max clamp_min clone copy
detach div eq fill floor full_like ge gt isinf isnan le logical_and logical_not logical_or
logical_xor lt masked_fill maximum minimum mul ne neg ones_like reciprocal relu round sgn sign sqrt
sub threshold_backward trunc where zeros_like _to_copy
"""
"""Elementwise ops of which each result is rounded once, from its own operands alone."""

_EXACT = frozenset(EXACT.split())


def on_whole(call: Call) -> Option:
    """The option of a call that runs on whole operands."""
    whole = Replicate()
    row = Row((whole,) * len(call.ins), (whole,) * len(call.outs))
    return Option(row.ins, row.outs, 0.0, row)


@while_alive(64)
def on_whole_operands(graph: Graph) -> frozenset[int]:
    """The numbers of the calls that run on whole operands where results are deterministic."""
    exact = [_is_exact(call, graph.types) for call in graph.calls]
    given = {*graph.inputs, *(v for v, _ in graph.constants)}
    first: set[int] = set()
    for i, call in enumerate(graph.calls):
        if exact[i] and given.issuperset(call.ins):
            first.add(i)
            given.update(v for v in call.outs if v is not None)
    read: set[Var] = set()
    last: set[int] = set()
    for i in reversed(range(len(graph.calls))):
        call = graph.calls[i]
        if exact[i] and read.isdisjoint(v for v in call.outs if v is not None):
            last.add(i)
        else:
            read.update(call.ins)
    integers = {i for i, call in enumerate(graph.calls) if _is_of_integers(call, graph.types)}
    return frozenset(range(len(graph.calls))) - first - last - integers


def _is_exact(call: Call, types: tuple[Full, ...]) -> bool:
    """Whether IEEE 754 says the bits of an elementwise call."""
    if call.op.namespace != "aten" or packet_name(call.op) not in _EXACT:
        return False
    arguments = (*call.args[2:], *(v for _, v in call.kwargs))
    scaled = packet_name(call.op) in ("add", "sub") and any(
        not isinstance(a, bool) and isinstance(a, (int, float)) and a != 1 for a in arguments
    )
    complex_ = any(t.dtype.is_complex for t in _types(call, types))
    return not scaled and not complex_


def _is_of_integers(call: Call, types: tuple[Full, ...]) -> bool:
    """Whether a call is one of integers alone, which are never rounded."""
    return not any(t.dtype.is_floating_point or t.dtype.is_complex for t in _types(call, types))


def _types(call: Call, types: tuple[Full, ...]) -> Iterable[Full]:
    return [types[v.index] for v in (*call.ins, *call.outs) if v is not None]
