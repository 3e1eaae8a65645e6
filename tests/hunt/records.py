"""`Program`: a random function as data, with what it takes and how it is run.

Its lines are Python statements, so that what runs is what a script of it prints.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Literal

import attrs
import torch

from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh

__all__ = [
    "Input",
    "Line",
    "Program",
    "Setting",
    "compiled",
    "line_at",
    "names_in",
    "reachable",
    "source",
]

NAME = re.compile(r"\bv\d+\b")


def names_in(text: str) -> tuple[str, ...]:
    """The values that a piece of source names, in order."""
    return tuple(dict.fromkeys(NAME.findall(text)))


@attrs.frozen
class Input:
    """A tensor that a program takes."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    fill: str
    """What its values are like; see `values.filled`."""
    seed: int
    form: str
    """How each rank stores its block; see `values.stored`."""
    layout: Layout


@attrs.frozen
class Line:
    """A statement: it binds new values, or writes into one in place."""

    op: str
    """Its name in the table of ops."""
    text: str
    binds: tuple[str, ...]
    writes: tuple[str, ...]
    rounds: bool
    """Whether its result depends on the order of sums or the like."""
    data: bool = False
    """Whether shapes, or what runs, depend on values."""
    fails: bool = False
    """Whether torch raises."""

    @property
    def reads(self) -> tuple[str, ...]:
        """The values that it needs, those that it writes into among them."""
        return tuple(n for n in names_in(self.text) if n not in self.binds)


@attrs.frozen
class Setting:
    """How a program is run."""

    way: str = "spmd"
    """See `ways.WAYS`."""
    moments: tuple[str, ...] = ("plain",)
    """What the caller has switched on at each call of the same function; see `moments`."""
    out_layouts: tuple[Layout | None, ...] | None = None
    """Those of the results, by the place in `outs`."""
    on_missing_rule: Literal["replicate", "error"] = "replicate"
    pins: tuple[tuple[str, Layout], ...] = ()
    """Values whose layout is pinned as they are made, or in calls of single lines asked for."""


@attrs.frozen
class Program:
    """A function of tensors: its inputs, lines, results, and the setting of a run."""

    mesh: Mesh
    inputs: tuple[Input, ...]
    lines: tuple[Line, ...]
    outs: tuple[str, ...]
    setting: Setting = Setting()

    @property
    def names(self) -> tuple[str, ...]:
        """Those of the inputs."""
        return tuple(i.name for i in self.inputs)

    @property
    def fails(self) -> bool:
        """Whether torch raises."""
        return any(line.fails for line in self.lines)

    @property
    def data(self) -> bool:
        """Whether what runs depends on values."""
        return any(line.data for line in self.lines)


def source(
    inputs: Sequence[str],
    lines: Sequence[Line],
    outs: Sequence[str],
    seen: bool = False,
    pinned: Sequence[str] = (),
) -> str:
    """The function as text.

    Where `seen`, each value is handed to `see` as it is made; those that are `pinned` are
    constrained to the layout of the name `pin_v3`.
    """
    body = []
    for line in lines:
        body.append(line.text)
        body += [f"{n} = constrain({n}, pin_{n})" for n in line.binds if n in pinned]
        if seen:
            body += [f"{name} = see({name}, {line.rounds})" for name in line.binds]
            body += [f"see_({name}, {line.rounds})" for name in line.writes]
    body.append(f"return ({''.join(f'{name}, ' for name in outs)})")
    head = f"def f({', '.join(inputs)}):"
    return "\n    ".join([head, *body])


def compiled(text: str, **names: Any) -> Callable[..., Any]:
    """The function `f` of a source."""
    space: dict[str, Any] = {
        "torch": torch,
        "F": torch.nn.functional,
        "inf": float("inf"),
        "nan": float("nan"),
        **names,
    }
    exec(compile(text, "<program>", "exec"), space)
    return space["f"]


def line_at(error: BaseException) -> int | None:
    """The number of the line of a compiled function that raised, counted from 0."""
    step, place = error.__traceback__, 0
    while step is not None:
        if step.tb_frame.f_code.co_filename == "<program>":
            place = step.tb_lineno
        step = step.tb_next
    cause = error.__cause__ or error.__context__
    if not place and cause is not None:
        return line_at(cause)
    return place - 2 if place >= 2 else None


def reachable(lines: Sequence[Line], known: Sequence[str]) -> tuple[Line, ...]:
    """The lines whose operands exist, in order."""
    names = set(known)
    kept = []
    for line in lines:
        if names.issuperset(line.reads):
            kept.append(line)
            names.update(line.binds)
    return tuple(kept)
