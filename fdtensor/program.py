"""`Program`: a function of distributed tensors as local ops and collectives, every value typed."""

from __future__ import annotations

import functools
import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import attrs
import torch

from fdtensor.collective import Collective, Step, is_local
from fdtensor.cost import CostModel, seconds
from fdtensor.errors import TraceError
from fdtensor.graph import Call, Var, argument_text, is_view, tensors_in
from fdtensor.layout import TensorType
from fdtensor.mesh import Mesh
from fdtensor.plan_text import bytes_text, time_text
from fdtensor.record import Record
from fdtensor.text import Text
from fdtensor.traffic import most_received, received_at

__all__ = ["Eqn", "Program", "Together", "is_view_line", "last_uses", "op_name"]


@attrs.frozen(eq=False)
class Together(Record):
    """Steps of one kind, over the same axes, whose data travels as one."""

    steps: tuple[Step, ...]

    @property
    def collective(self) -> Collective:
        """The operation that they share, with the dims of the first."""
        return self.steps[0].collective

    def __str__(self) -> str:
        return str(self.collective)


@attrs.frozen(cache_hash=True)
class Eqn:
    """One line of a program: an aten op on blocks, one step of a plan, or several together.

    `args` and `kwargs` are those of the op on full tensors, with a `Var` for each tensor; what
    they hold of sizes is rewritten for the block of each rank when the line runs.
    """

    op: torch._ops.OpOverload | Step | Together
    args: tuple[Any, ...] = attrs.field(eq=repr)  # 1, 1.0 and True are not the same argument
    kwargs: tuple[tuple[str, Any], ...] = attrs.field(eq=repr)
    outs: tuple[Var | None, ...]
    note: str = ""

    @property
    def ins(self) -> tuple[Var, ...]:
        """The values that it reads, in order."""
        return tuple(tensors_in((self.args, self.kwargs)))

    @property
    def steps(self) -> tuple[Step, ...]:
        """The steps that it takes, one for each of its values; none for an op."""
        if isinstance(self.op, Step):
            return (self.op,)
        return self.op.steps if isinstance(self.op, Together) else ()

    @property
    def is_collective(self) -> bool:
        """Whether it sends anything."""
        return not all(map(is_local, self.steps))

    @property
    def call(self) -> Call:
        """The op on full tensors."""
        assert not isinstance(self.op, (Step, Together))
        return Call(self.op, self.args, self.kwargs, self.outs)


@attrs.frozen(cache_hash=True, repr=False)
class Program:
    """A traced function on a mesh: `outs` after `eqns`, from `inputs` and `constants`.

    `types` has the type of each value, by its index. Bytes are per rank, of the busiest one.
    Raises `TraceError` where the types of a line do not fit together.
    """

    name: str
    mesh: Mesh
    inputs: tuple[Var, ...]
    constants: tuple[tuple[Var, Any], ...] = attrs.field(
        eq=lambda pairs: [(v, id(t)) for v, t in pairs], hash=False
    )
    """Tensors that the function closes over: replicated, read afresh by every run."""
    eqns: tuple[Eqn, ...]
    outs: tuple[Var, ...]
    types: tuple[TensorType, ...]
    cost: CostModel
    origin: Any = attrs.field(eq=False, default=None)
    """What the layouts were chosen from, for `explain`."""

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

    @property
    def collectives(self) -> tuple[Step | Together, ...]:
        """What sends something, in order; steps that travel together count as one."""
        return tuple([e.op for e in self.eqns if e.is_collective])  # type: ignore[misc]

    @property
    def steps(self) -> tuple[Step, ...]:
        """The steps of plans that it takes, local ones too."""
        return tuple([step for eqn in self.eqns for step in eqn.steps])

    @property
    def received_bytes(self) -> int:
        """The bytes that the busiest rank receives."""
        return most_received(self.steps)

    def received_bytes_at(self, rank: int) -> int:
        """The bytes that `rank` receives."""
        return sum(received_at(step, rank) for step in self.steps if not is_local(step))

    @property
    def peak_bytes(self) -> int:
        """The most bytes of values that any rank holds at once, inputs included."""
        return max(self.peak_bytes_at(rank) for rank in _corners(self.mesh))

    def peak_bytes_at(self, rank: int) -> int:
        """The most bytes of values that `rank` holds at once; a view counts as a value."""
        return _peak(self, rank)

    @property
    def seconds(self) -> float:
        """The seconds that the cost model gives for the steps."""
        return sum(seconds(step, self.cost) for step in self.steps)

    @property
    def digest(self) -> str:
        """A hexadecimal fingerprint: equal programs have the same one on every rank."""
        return _digest(self)

    def summary(self) -> str:
        """The collectives by kind, with how many there are and their bytes."""
        return _summary(self)

    def explain(self, value: str | None = None) -> str:
        """Why each value has its layout, and what the others would cost; or of one, by its name."""
        from fdtensor.explanation import explained

        return Text(explained(self, value))

    def to_fx(self, rank: int) -> torch.fx.GraphModule:
        """What `rank` runs, as a plain module of local ops and functional collectives."""
        from fdtensor.export import to_fx

        return to_fx(self, rank)

    def __str__(self) -> str:
        return _text(self)

    def __repr__(self) -> str:
        return f"<Program {self.name} on {self.mesh!r}: {_lines(self)}, {self.digest[:8]}>"

    def _repr_html_(self) -> str:
        from fdtensor.pictures import picture_of

        return picture_of(self).html


def _check(program: Program) -> None:
    """Raises `TraceError` where a line reads what is not there, or steps do not line up."""
    known = {*program.inputs, *(v for v, _ in program.constants)}
    for i, eqn in enumerate(program.eqns):
        for v in eqn.ins:
            if v not in known:
                raise TraceError(
                    f"line {i} of {program.name} reads {v}, which no line before it makes.",
                    line=str(eqn.op),
                    hint="Build programs by trace or by transforms.",
                )
        for step, before, after in zip(eqn.steps, eqn.ins, eqn.outs):
            found = program.type_of(before), after and program.type_of(after)
            if found != (step.src, step.dst):
                raise TraceError(
                    f"line {i} of {program.name} does not line up with its types.",
                    step=f"{step.src} -> {step.dst}",
                    values=f"{found[0]} -> {found[1]}",
                    hint="Build programs by trace or by transforms.",
                )
        known.update(v for v in eqn.outs if v is not None)
    for v in program.outs:
        if v not in known:
            raise TraceError(
                f"{program.name} returns {v}, which no line makes.",
                hint="Build programs by trace or by transforms.",
            )


def last_uses(program: Program) -> list[list[Var]]:
    """The values that nobody reads after each line: not the inputs, constants and outputs."""
    kept = {*program.outs, *program.inputs, *(v for v, _ in program.constants)}
    dead: list[list[Var]] = [[] for _ in program.eqns]
    for i in reversed(range(len(program.eqns))):
        eqn = program.eqns[i]
        for v in (*eqn.ins, *(v for v in eqn.outs if v is not None)):
            if v not in kept:
                kept.add(v)
                dead[i].append(v)
    return dead


@functools.lru_cache(maxsize=1024)
def _peak(program: Program, rank: int) -> int:
    size = [type.local_nbytes(rank) for type in program.types]
    held = sum(size[v.index] for v in {*program.inputs, *(v for v, _ in program.constants)})
    most = held
    for eqn, dead in zip(program.eqns, last_uses(program)):
        held += sum(size[v.index] for v in eqn.outs if v is not None)
        most = max(most, held)
        held -= sum(size[v.index] for v in dead)
    return most


def _corners(mesh: Mesh) -> Sequence[int]:
    return mesh.ranks if mesh.size <= 64 else (mesh.order[0], mesh.order[-1])


@functools.lru_cache(maxsize=1024)
def _digest(program: Program) -> str:
    text = "\n".join(
        [_text(program), *(repr(t) for t in program.types), repr(program.mesh), repr(program.cost)]
    )
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _bytes(eqn: Eqn) -> str:
    return bytes_text(most_received(eqn.steps)) if eqn.is_collective else ""


def _lines(program: Program) -> str:
    count = len(program.eqns)
    return f"{count} line{'s' * (count != 1)}"


def _text(program: Program) -> str:
    def typed(v: Var | None) -> str:
        return "_" if v is None else f"{v}:{program.type_of(v)}"

    lines = [f"{program.name} on {program.mesh!r}"]
    lines.append("  in   " + "  ".join(map(typed, program.inputs)))
    if program.constants:
        lines.append("  with " + "  ".join(typed(v) for v, _ in program.constants))
    rows = []
    for eqn in program.eqns:
        left = "  ".join(map(typed, eqn.outs))
        if eqn.steps:
            right, moved = f"{eqn.op.collective} {' '.join(map(str, eqn.ins))}", _bytes(eqn)  # type: ignore[union-attr]
        else:
            arguments = argument_text(eqn.args, eqn.kwargs)
            right, moved = f"{op_name(eqn.op)} {arguments}".rstrip(), ""
        rows.append((left, right, "  ".join(filter(None, [moved, eqn.note]))))
    width = min(48, max((len(left) for left, _, _ in rows), default=0))
    for left, right, moved in rows:
        lines.append(f"  {left:<{width}} = {right}" + (f"  {moved}" if moved else ""))
    lines.append("  out  " + " ".join(map(str, program.outs)))
    return "\n".join([*lines, _total(program)])


def _total(program: Program) -> str:
    count = len(program.collectives)
    plural = "collective" if count == 1 else "collectives"
    return f"{count} {plural}, {bytes_text(program.received_bytes)} received per rank"


def op_name(op: Any) -> str:
    """The name of an op as programs print it: `mm`, `sum.dim_IntList`, `mylib.op`."""
    return str(op).removeprefix("aten.").removesuffix(".default")


def is_view_line(eqn: Eqn) -> bool:
    """Whether a line only says where the same elements are."""
    return not isinstance(eqn.op, (Step, Together)) and is_view(eqn.call)


def _summary(program: Program) -> str:
    counts: Counter[tuple[str, str]] = Counter()
    moved: Counter[tuple[str, str]] = Counter()
    for eqn in program.eqns:
        if eqn.is_collective:
            kind, _, rest = str(eqn.op.collective).partition("[")  # type: ignore[union-attr]
            axes = rest.partition("=")[2].partition(" ")[0].rstrip("]")
            counts[kind, axes] += 1
            moved[kind, axes] += most_received(eqn.steps)
    lines = [f"{program.name} on {program.mesh!r}: {_lines(program)}"]
    for (kind, axes), count in sorted(counts.items()):
        size = bytes_text(moved[kind, axes])
        lines.append(f"  {count:4} {kind:<15} over {axes:<10} {size:>12} received per rank")
    lines.append(
        f"{_total(program)}, peak {bytes_text(program.peak_bytes)}, "
        f"{time_text(program.seconds)} on {program.cost.name}"
    )
    return "\n".join(lines)
