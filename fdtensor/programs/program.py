"""`Program`: a function of distributed tensors as local ops and collectives, every value typed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import attrs
import torch

from fdtensor.layouts.display import display
from fdtensor.layouts.errors import FdtensorError, TraceError
from fdtensor.layouts.json_fields import Malformed, parsed, shown
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.remembered import while_alive
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.layouts.text import Text
from fdtensor.layouts.tree import flatten, unflatten
from fdtensor.ops.graph import Var
from fdtensor.ops.sources import Source
from fdtensor.plans.collectives import Step, is_local
from fdtensor.plans.cost import CostModel, seconds
from fdtensor.plans.traffic import most_received, received_at
from fdtensor.programs.check import check_program
from fdtensor.programs.eqn import Eqn, Together, is_view_line
from fdtensor.programs.json import decode, encode
from fdtensor.programs.loops import times
from fdtensor.programs.memory import bytes_held, lines_of
from fdtensor.programs.sources import source_of
from fdtensor.programs.text import line_count, op_name, summary, text_of

__all__ = ["Eqn", "Program", "Together", "is_view_line", "last_uses", "op_name"]


@attrs.frozen(cache_hash=True, repr=False)
class Program:
    """A traced function on a mesh: `outs` after `eqns`, from `inputs` and `constants`.

    `types` has the type of each value, by its index. Bytes are per rank, of the busiest one.
    Raises `TraceError` where the types of a line do not fit together.

    >>> mesh = Mesh(x=2)
    >>> x = TensorType((4, 6), torch.float32, mesh.layout(None, "x"))
    >>> program = trace(lambda x: x.sum(1), x, out_layouts=mesh.layout())
    >>> print(program)
    <lambda> on Mesh(x=2)
      in   a:f32[4,6@x]
      b:f32[4]{sum:x} = sum.dim_IntList a [1]
      c:f32[4]        = exchange[axis=x reduce_op=sum way=peer_to_peer] b  16 B
      out  c
    1 collective, 16 B received per rank
    >>> program.received_bytes
    16
    """

    name: str
    mesh: Mesh
    inputs: tuple[Var, ...]
    constants: tuple[tuple[Var, torch.Tensor], ...] = attrs.field(
        eq=lambda pairs: [(v, id(t)) for v, t in pairs], hash=False
    )
    """Tensors that the function closes over: replicated, read afresh by every run."""
    eqns: tuple[Eqn, ...]
    outs: tuple[Var, ...]
    types: tuple[TensorType, ...]
    cost: CostModel
    origin: Any = attrs.field(eq=False, default=None)
    """The graph and the choices that the layouts follow from, for `explain`."""

    def __attrs_post_init__(self) -> None:
        _check(self)

    def type_of(self, v: Var) -> TensorType:
        """The type of a value."""
        return self.types[v.index]

    @property
    def in_types(self) -> tuple[TensorType, ...]:
        """The types of the inputs."""
        return tuple([self.types[v.index] for v in self.inputs])

    @property
    def out_types(self) -> tuple[TensorType, ...]:
        """The types of the outputs."""
        return tuple([self.types[v.index] for v in self.outs])

    def layouts_of(self, argument: int | str) -> Any:
        """The layouts of an argument, by its position or name: a pytree of its structure.

        None stands for leaves that are no tensors. Raises `TraceError` where there is no such
        argument, and for a program that was loaded.
        """
        if self.origin is None or self.origin.arguments is None:
            raise TraceError(
                f"{self.name} does not have the structure of its arguments.",
                hint="Ask the program that trace returned, or read in_types: one for each tensor.",
            )
        numbers, spec = flatten(self.origin.arguments.of(argument, "layouts_of asks for"))
        layouts = [type.layout for type in self.in_types]
        return unflatten(spec, [layouts[n] for n in numbers])

    @property
    def collectives(self) -> tuple[Step | Together, ...]:
        """The steps that send data, in order; steps that travel together count as one."""
        return tuple([e.op for e in self.eqns if e.is_collective])  # type: ignore[misc]

    @property
    def steps(self) -> tuple[Step, ...]:
        """The steps of plans that it takes, local ones too."""
        return tuple([step for eqn in self.eqns for step in eqn.steps])

    @property
    def received_bytes(self) -> int:
        """The bytes that the busiest rank receives."""
        return most_received(self.steps, [n for _, n in _taken(self)])

    def received_bytes_at(self, rank: int) -> int:
        """The bytes that `rank` receives."""
        return sum(n * received_at(step, rank) for step, n in _taken(self) if not is_local(step))

    @property
    def peak_bytes(self) -> int:
        """The most bytes that any rank holds at once: inputs, values, and buffers of messages."""
        return _peak(self, self.busiest_ranks)

    def peak_bytes_at(self, rank: int) -> int:
        """The most bytes that `rank` holds at once; a view is in the memory of its operand."""
        return _peak(self, (rank,))

    @property
    def busiest_ranks(self) -> tuple[int, ...]:
        """The ranks of which one holds the most: the first and last of a mesh of more than 64."""
        return _corners(self.mesh)

    @property
    def seconds(self) -> float:
        """The seconds that the cost model gives for the steps."""
        return sum(n * seconds(step, self.cost) for step, n in _taken(self))

    @property
    def digest(self) -> str:
        """A hexadecimal fingerprint: equal programs have the same one on every rank."""
        return _digest(self)

    def summary(self) -> str:
        """The collectives by kind with their bytes, and what each module of a model amounts to.

        Layers that are alike count together: `layers.*.mlp x12`.
        """
        return summary(self)

    def source(self, value: Var | str) -> Source:
        """The module and the line of the user that the line of a value comes from.

        Of an input, and of a program that was read from JSON, it is empty. Raises `TraceError`
        where there is no such value.
        """
        return source_of(self, value)

    def explain(self, value: str | None = None) -> str:
        """Why each value, or the one of this name, has its layout, and what others would cost."""
        return Text(display("explanation", self, value))

    def to_fx(self, rank: int) -> torch.fx.GraphModule:
        """The module that `rank` runs, of local ops and functional collectives."""
        return display("graph_module", self, rank)

    def verify(self) -> None:
        """Raises `TraceError` where the types of a line do not follow from its op or its steps.

        Each op is run once on tensors without memory, its types must follow from rows of its rule
        on all axes, and steps must be those between their types, as in `Plan.verify`. It takes
        about a millisecond for each kind of line.
        """
        check_program(self)

    def to_json(self) -> str:
        """The program as JSON text; `Program.from_json` gives one back that has the same digest.

        Closed-over tensors are written with their present values, 1 MiB of them at most. The
        choices that `explain` reads are left out. Raises `TraceError` for larger constants.
        """
        return json.dumps(encode(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Program:
        """The program that `to_json` wrote, verified; raises `TraceError` for every other text.

        The text need not be trusted: it names ops, of torch or with a rule, and nothing in it is
        run or imported. A text of more than 2**25 characters is refused. The program closes over
        tensors of its own.
        """
        try:
            program = cls(*decode(parsed(text)))
        except (Malformed, FdtensorError) as error:
            raise TraceError(
                f"this text is not a program: {str(error).splitlines()[0].removesuffix('.')}.",
                text=shown(text),
                hint="Give what Program.to_json returned.",
            ) from error
        program.verify()
        return program

    def __copy__(self) -> Program:
        return self

    def __deepcopy__(self, memo: object) -> Program:
        return self

    def __str__(self) -> str:
        return text_of(self)

    def __repr__(self) -> str:
        return f"<Program {self.name} on {self.mesh!r}: {line_count(self)}, {self.digest[:8]}>"

    def _repr_html_(self) -> str:
        return display("html", self)


def _taken(program: Program) -> list[tuple[Step, int]]:
    """The steps of a program, each with the number of times that it is taken."""
    pairs = zip(program.eqns, times(program), strict=True)
    return [(step, n) for eqn, n in pairs for step in eqn.steps]


def _check(program: Program) -> None:
    """Raises `TraceError` where a line reads a value too early, or steps do not line up."""
    sources = (*program.inputs, *(v for v, _ in program.constants))
    known: set[Var] = set()
    _define(program, sources, "it takes", known)
    for i, eqn in enumerate(program.eqns):
        for v in eqn.ins:
            if v not in known:
                raise _wrong(
                    f"line {i} of {program.name} reads {v}, which no line before it makes.",
                    line=eqn.op,
                )
        if eqn.steps:
            _check_steps(program, i, eqn)
        _define(program, [v for v in eqn.outs if v is not None], f"line {i} makes", known)
    for v in program.outs:
        if v not in known:
            raise _wrong(f"{program.name} returns {v}, which no line makes.")


def _define(program: Program, values: Sequence[Var], where: str, known: set[Var]) -> None:
    """Adds new values to `known`."""
    for v in values:
        if v in known or not 0 <= v.index < len(program.types):
            why = "is made twice" if v in known else "has no type"
            raise _wrong(f"{v} of {program.name} {why}.", which=f"{where} {v}")
        known.add(v)


def _check_steps(program: Program, i: int, eqn: Eqn) -> None:
    """Raises `TraceError` where the steps of line `i` are not between the values that it names."""
    if len(eqn.ins) != len(eqn.steps) or len(eqn.outs) != len(eqn.steps) or None in eqn.outs:
        raise _wrong(f"line {i} of {program.name} has not one value for each of its steps.")
    for step, before, after in zip(eqn.steps, eqn.ins, eqn.outs, strict=True):
        types = program.type_of(before), after and program.type_of(after)
        if types != (step.src, step.dst):
            raise _wrong(
                f"line {i} of {program.name} does not line up with its types.",
                step=f"{step.src} -> {step.dst}",
                values=f"{types[0]} -> {types[1]}",
            )


def _wrong(sentence: str, **facts: object) -> TraceError:
    return TraceError(sentence, **facts, hint="Build programs by trace or by transforms.")


def last_uses(program: Program) -> list[list[Var]]:
    """The values that no line reads after each line: not inputs, constants and outputs."""
    kept = {*program.outs, *program.inputs, *(v for v, _ in program.constants)}
    dead: list[list[Var]] = [[] for _ in program.eqns]
    for i in reversed(range(len(program.eqns))):
        eqn = program.eqns[i]
        for v in (*eqn.ins, *(v for v in eqn.outs if v is not None)):
            if v not in kept:
                kept.add(v)
                dead[i].append(v)
    return dead


@while_alive(1024)
def _peak(program: Program, ranks: tuple[int, ...]) -> int:
    return int(bytes_held(lines_of(program, ranks)).max())


def _corners(mesh: Mesh) -> tuple[int, ...]:
    return tuple(mesh.ranks) if mesh.size <= 64 else (mesh.order[0], mesh.order[-1])


@while_alive(1024)
def _digest(program: Program) -> str:
    text = "\n".join(
        [
            text_of(program),
            *(repr(t) for t in program.types),
            repr(program.mesh),
            repr(program.cost),
        ]
    )
    return hashlib.sha256(text.encode()).hexdigest()[:32]
