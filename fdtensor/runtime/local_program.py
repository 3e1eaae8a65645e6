"""`local_program`: what one rank runs for a program, as lines of aten calls and steps."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import attrs
import torch

from fdtensor.layouts.torch_private import functional_collectives, has_schema, schema_of
from fdtensor.ops.graph import Graph, Var, substituted
from fdtensor.ops.line_checks import LineCheck
from fdtensor.ops.lowering import lowered
from fdtensor.ops.rules.attention import BACKWARDS, SEEDS
from fdtensor.ops.value_checks import BOUNDED
from fdtensor.plans.collectives import Exchange
from fdtensor.programs.program import Eqn, Program

__all__ = [
    "AFTER",
    "BEFORE",
    "BY_HAND",
    "Line",
    "LineCheck",
    "LocalProgram",
    "Spelling",
    "constant",
    "local_program",
    "of_ops",
]

aten = torch.ops.aten


@attrs.frozen(eq=False)
class Line:
    """One call on the blocks of a rank, or one step; values are numbered for the rank."""

    op: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    outs: tuple[Var | None, ...]
    eqn: int
    """The line of the program that it belongs to."""


BEFORE, AFTER = -2, -1
"""In place of the number of a line: what comes before the first one and after the last."""


@attrs.frozen(eq=False)
class LocalProgram:
    """The lines of a rank: `outs` from `inputs`, with what is read last at each line."""

    inputs: tuple[Var, ...]
    lines: tuple[Line, ...]
    outs: tuple[Var, ...]
    dead: tuple[tuple[Var, ...], ...]
    """The values that nobody reads after each line."""


@attrs.frozen
class Spelling:
    """How steps become lines: as functional collectives of a backend and local ops."""

    backend: str
    device: str
    exchanges: bool
    """Whether exchanges too: a Comm has better ways to run them."""


@functools.lru_cache(maxsize=512)
def local_program(
    program: Program, rank: int, spelling: Spelling | None = None, checked: bool = False
) -> LocalProgram:
    """The lines that `rank`, of the program's mesh, runs; inputs first, then constants.

    Steps stay steps without a `spelling`. Where it is to be `checked`, each value is compared with
    its type.
    """
    return _Writer(program, rank, spelling, checked).written()


class _Writer:
    """The lines of a rank as they are written."""

    def __init__(
        self, program: Program, rank: int, spelling: Spelling | None, checked: bool
    ) -> None:
        self.program, self.rank, self.spelling, self.checked = program, rank, spelling, checked
        coord = program.mesh.coord(rank)
        assert coord is not None
        self.coord = coord
        self.device = "cpu" if spelling is None else spelling.device
        self.count = 0
        self.lines: list[Line] = []
        self.names: dict[Var, Var] = {}

    def new(self) -> Var:
        self.count += 1
        return Var(self.count - 1)

    def written(self) -> LocalProgram:
        program = self.program
        given = (*program.inputs, *(v for v, _ in program.constants))
        inputs = tuple(self.new() for _ in given)
        self.names.update(zip(given, inputs, strict=True))
        self._check(given, "an input", BEFORE)
        for number, eqn in enumerate(program.eqns):
            if eqn.steps:
                self._step(eqn, number)
            else:
                ins = [program.type_of(v) for v in eqn.ins]
                outs = [None if v is None else program.type_of(v) for v in eqn.outs]
                self._graph(lowered(eqn.call, ins, outs, self.coord, self.device), eqn, number)
            self._check(eqn.outs, str(eqn.op), number, contiguous=bool(eqn.steps))
        outs = tuple(self.names[v] for v in program.outs)
        lines, outs = _owned(self.lines, inputs, outs, self.new)
        lines = _waiting_late(lines)
        return LocalProgram(inputs, tuple(lines), outs, _dead(lines, outs))

    def _check(
        self, values: Sequence[Var | None], line: str, number: int, contiguous: bool = False
    ) -> None:
        for v in values if self.checked else ():
            if v is not None:
                type = self.program.type_of(v)
                check = LineCheck(self.program.name, line, type, self.rank, contiguous)
                self.lines.append(Line(check, (self.names[v],), (), (), number))

    def _step(self, eqn: Eqn, number: int) -> None:
        spelling, steps = self.spelling, eqn.steps
        exchange = isinstance(steps[0].collective, Exchange)
        if spelling is None or (exchange and not spelling.exchanges):
            made = tuple(self.new() for _ in steps)
            given = tuple(self.names[v] for v in eqn.ins)
            self.lines.append(Line(eqn.op, given, (), made, number))
            self.names.update(zip(eqn.outs, made, strict=True))  # type: ignore[arg-type]
            return
        from fdtensor.runtime.funcol_lowering import lower_steps

        graph = lower_steps(steps, self.rank, spelling.backend, spelling.device)
        self._graph(graph, eqn, number, contiguous=eqn.is_collective)

    def _contiguous(self, v: Var, number: int, op: Any = None) -> Var:
        """The value in contiguous memory, or as the op asks for it."""
        way = in_rows if op in IN_ROWS else from_start if op in CANONICAL else _CONTIGUOUS
        made = self.new()
        self.lines.append(Line(way, (v,), (), (made,), number))
        return made

    def _graph(self, graph: Graph, eqn: Eqn, number: int, contiguous: bool = False) -> None:
        """Lines for a graph from the inputs of an eqn to its outputs."""
        local = dict(zip(graph.inputs, (self.names[v] for v in eqn.ins), strict=True))
        if contiguous:  # a collective wants its operand so, and a graph is of contiguous blocks
            local = {v: self._contiguous(u, number) for v, u in local.items()}
        for v, tensor in graph.constants:
            local[v] = self.new()
            self.lines.append(Line(constant, (tensor,), (), (local[v],), number))
        views = {v for call in graph.calls if call.op in RESHAPES for v in call.outs}
        for call in graph.calls:
            args, kwargs = substituted((call.args, call.kwargs), local.__getitem__)
            strict = next((t[call.op] for t in STRICT if call.op in t), ())
            if call.op.namespace == WAIT.namespace and not views.isdisjoint(call.ins):
                strict = (0,)  # what was traced as a copy may be a view here
            if strict:
                wanted = [v for i, v in enumerate(call.ins) if i in strict]
                blocks = {local[v]: self._contiguous(local[v], number, call.op) for v in wanted}
                of = {v: v for v in _read((*args, *(v for _, v in kwargs)))} | blocks
                args, kwargs = substituted((args, kwargs), of.__getitem__)
            outs = tuple(None if v is None else self.new() for v in call.outs)
            local.update(
                (v, m)
                for v, m in zip(call.outs, outs, strict=True)
                if v is not None and m is not None
            )
            op = aten.reshape.default if call.op in RESHAPES else call.op
            self.lines.append(Line(op, args, kwargs, outs, number))
        read = [v for v in eqn.outs if v is not None]
        self.names.update(zip(read, (local[v] for v in graph.outs), strict=True))


def of_ops(line: Line) -> Line:
    """The line as a graph may have it: an op that does at least what is called by hand."""
    if line.op is in_rows:
        return attrs.evolve(line, op=aten.contiguous.default)
    if line.op is from_start:
        kept = ("memory_format", torch.contiguous_format)
        return attrs.evolve(line, op=aten.clone.default, kwargs=(kept,))
    return line


def _waiting_late(lines: list[Line]) -> list[Line]:
    """The lines with each wait for a collective just before its result is read."""
    waits: dict[Var, Line] = {}
    out: list[Line] = []
    for line in lines:
        if line.op is WAIT:
            waits[line.outs[0]] = line  # type: ignore[index]
            continue
        for v in _read((*line.args, *(v for _, v in line.kwargs))):
            if v in waits:
                out.append(waits.pop(v))
        out.append(line)
    return [*out, *waits.values()]


def constant(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def in_rows(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with the elements of its last dim side by side."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def from_start(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in memory that begins with it, with the very strides of its shape."""
    strides, step = [], 1
    for size in reversed(tensor.shape):
        strides.append(step)
        step *= max(1, size)
    # to be contiguous is not enough: a dim of one index may have any stride
    if tensor.storage_offset() or tensor.stride() != tuple(strides[::-1]):
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor


BY_HAND = (in_rows, from_start)
"""What lines call beside ops: of the same values, in memory as an op wants it."""

_CONTIGUOUS = aten.contiguous.default


def _owned(lines: list[Line], inputs: Any, outs: Any, new: Any) -> tuple[list[Line], Any]:
    """Copies the outputs that share memory with an input, a constant or another output."""
    root: dict[Var, Var] = {v: v for v in inputs}
    for line in lines:
        shares = line.op in _MAY_SHARE or _views(line.op)
        source = next((a for a in line.args if isinstance(a, Var)), None)
        for v in line.outs:
            if v is not None:
                root[v] = root[source] if shares and source is not None else v
        if line.op is constant:
            root.update((v, inputs[0] if inputs else v) for v in line.outs if v is not None)
    taken = set(inputs)
    copied = []
    for v in outs:
        if root[v] in taken:
            made = new()
            lines.append(Line(aten.clone.default, (v,), (), (made,), AFTER))
            v = made
        else:
            taken.add(root[v])
        copied.append(v)
    return lines, tuple(copied)


CONTIGUOUS = {
    aten.nll_loss2d_backward.default: (0, 1, 2, 3, 4),
    aten.native_group_norm.default: (0, 1, 2),
    aten.native_layer_norm_backward.default: (2, 3),
    aten.adaptive_max_pool3d_backward.default: (2,),
    aten._linalg_det.default: (0,),
    aten._linalg_slogdet.default: (0,),
    aten._linalg_solve_ex.default: (0,),
    aten._embedding_bag.default: (0, 1, 2, 3),
    aten._embedding_bag_forward_only.default: (0, 1, 2, 3),
    aten._embedding_bag_backward.default: (1, 2, 3),
    aten._embedding_bag_per_sample_weights_backward.default: (2, 3, 4),
    aten._pdist_forward.default: (0,),
    aten._pdist_backward.default: (1, 2),
}
"""Ops that refuse strided tensors, or read them wrongly, with which of their operands.

`python -m tests.operators --form any` looks for them.
"""

IN_ROWS = {
    **dict.fromkeys(SEEDS, (0, 1, 2)),
    **dict.fromkeys(BACKWARDS, (0, 1, 2, 3)),
}
"""Kernels that read rows as if their elements lay side by side: those of attention."""

CANONICAL = {
    aten.as_strided.default: (0,),
    aten.as_strided_copy.default: (0,),
    aten.as_strided_scatter.default: (0, 1),
    aten.view_as_complex.default: (0,),
    aten.view.dtype: (0,),
}
"""Ops about memory, which ask for the very strides and the offset that a new tensor has."""

STRICT = (CONTIGUOUS, IN_ROWS, CANONICAL)

RESHAPES = {aten.view.default, aten._unsafe_view.default}
"""Views whose strides a block need not have."""

WAIT = functional_collectives.wait_tensor.default

_MAY_SHARE = {aten.reshape.default, aten.contiguous.default, *BY_HAND, BOUNDED, WAIT}


def _views(op: Any) -> bool:
    if not has_schema(op):
        return False
    return any(r.alias_info is not None for r in schema_of(op).returns)


def _dead(lines: list[Line], outs: Any) -> tuple[tuple[Var, ...], ...]:
    kept = {*outs}
    dead: list[tuple[Var, ...]] = []
    for line in reversed(lines):
        gone = []
        read = [*_read(line.args), *_read(tuple(v for _, v in line.kwargs))]
        for v in (*read, *(v for v in line.outs if v is not None)):
            if v not in kept:
                kept.add(v)
                gone.append(v)
        dead.append(tuple(gone))
    return tuple(reversed(dead))


def _read(tree: Any) -> list[Var]:
    if isinstance(tree, Var):
        return [tree]
    return [v for entry in tree for v in _read(entry)] if isinstance(tree, tuple) else []
