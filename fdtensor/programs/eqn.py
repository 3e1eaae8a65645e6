"""`Eqn`: one line of a program, an op on blocks, a step of a plan or several steps together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from fdtensor.layouts.errors import TraceError
from fdtensor.layouts.record import Record
from fdtensor.layouts.torch_private import OpOverload
from fdtensor.ops.graph import Call, Var, gives_view, op_by_name, substituted, tensors_in
from fdtensor.ops.notation.reshape import RESHAPES
from fdtensor.ops.saved_values import ALIAS
from fdtensor.plans.collectives import Collective, Slice, Step, is_local
from fdtensor.plans.search import same_everywhere

__all__ = ["Eqn", "Together", "is_part_line", "is_said", "is_view_line", "parts", "renamed"]


@attrs.frozen(eq=False)
class Together(Record):
    """Steps of one kind, over the same axes, whose data travels in one message.

    Raises `TraceError` for steps that do not travel together.
    """

    steps: tuple[Step, ...]

    def __attrs_post_init__(self) -> None:
        kinds = {step.collective.bundle(step) for step in self.steps}
        if len(kinds) != 1 or None in kinds:
            raise TraceError(
                "these steps do not travel together.",
                steps="\n".join(map(str, self.steps)),
                hint="Only steps of one kind, over the same axes, may share a line.",
            )

    @property
    def collective(self) -> Collective:
        """The collective of the first step; the others differ in dims alone."""
        return self.steps[0].collective

    def __str__(self) -> str:
        return str(self.collective)


@attrs.frozen(cache_hash=True)
class Eqn:
    """One line of a program: an aten op on blocks, one step of a plan, or several together.

    `args` and `kwargs` are those of the op on full tensors, with a `Var` for each tensor; sizes
    among them become those of the block of each rank when the line runs.
    """

    op: OpOverload | Step | Together
    args: tuple[Any, ...] = attrs.field(eq=repr)  # 1, 1.0 and True are not the same argument
    kwargs: tuple[tuple[str, Any], ...] = attrs.field(eq=repr)
    outs: tuple[Var | None, ...]
    note: str = ""

    ins: tuple[Var, ...] = attrs.field(init=False, eq=False, repr=False)
    """The values that it reads, in order."""

    def __attrs_post_init__(self) -> None:
        ins = tuple(tensors_in((self.args, self.kwargs)))
        object.__setattr__(self, "ins", ins)  # computed once: it is read very often

    @property
    def steps(self) -> tuple[Step, ...]:
        """The steps that it takes, one for each of its values; none for an op."""
        if isinstance(self.op, Step):
            return (self.op,)
        return self.op.steps if isinstance(self.op, Together) else ()

    @property
    def is_collective(self) -> bool:
        """Whether it sends any data."""
        return not all(map(is_local, self.steps))

    @property
    def call(self) -> Call:
        """The op on full tensors."""
        assert not isinstance(self.op, (Step, Together))
        return Call(self.op, self.args, self.kwargs, self.outs)

    __reduce__ = op_by_name


def is_view_line(eqn: Eqn) -> bool:
    """Whether a line is a view: an op that moves no elements, or a step that only says so."""
    if isinstance(eqn.op, Step):
        return is_said(eqn.op)
    if isinstance(eqn.op, Together):
        return False
    return eqn.op in RESHAPES or (len(eqn.ins) == 1 and gives_view(eqn.op))


def renamed(eqn: Eqn, name: Mapping[Var, Var]) -> Eqn:
    """The line with other operands; itself where they are the same."""
    if not any(v in name for v in eqn.ins):
        return eqn
    args, kwargs = substituted((eqn.args, eqn.kwargs), lambda v: name.get(v, v))
    return attrs.evolve(eqn, args=args, kwargs=kwargs)


def is_said(step: Step) -> bool:
    """Whether a step leaves all blocks as they are: layouts differ along axes of one rank alone."""
    kind = step.collective
    is_bare = isinstance(kind, Slice) and not kind.axes and step.src.mesh is step.dst.mesh
    return is_bare and same_everywhere(step.src, step.dst)  # cuts in another order keep a part


def is_part_line(eqn: Eqn) -> bool:
    """Whether a line is a view or a local step, which may come early; no saved value may."""
    if isinstance(eqn.op, Step):
        return is_local(eqn.op)
    return is_view_line(eqn) and eqn.op is not ALIAS


def parts(eqns: Sequence[Eqn]) -> set[int]:
    """The lines whose blocks are views of the old ones when they run, by their numbers.

    Not those that are kept for later, which a view would not free.
    """
    readers: dict[Var, list[Eqn]] = {}
    for eqn in eqns:
        for v in eqn.ins:
            readers.setdefault(v, []).append(eqn)
    return {
        i
        for i, eqn in enumerate(eqns)
        if isinstance(eqn.op, Step)
        and eqn.op.collective.is_part
        and not all(reader.op is ALIAS for v in eqn.outs if v for reader in readers.get(v, ()))
    }
