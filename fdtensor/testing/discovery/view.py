"""`View`: a case as the generator of its rule sees it, with arguments by name."""

from __future__ import annotations

import functools
import inspect
import itertools
import keyword
from collections.abc import Sequence
from inspect import Parameter
from typing import Any

import attrs

from fdtensor.layouts.placement import Partial, Placement, Replicate, Shard
from fdtensor.layouts.torch_private import OpOverload, schema_of
from fdtensor.ops.graph import Var, substituted
from fdtensor.testing.discovery.sample import Sample
from fdtensor.testing.discovery.search import Found

__all__ = ["View", "parameters", "shown_text", "signature", "view_of"]


@attrs.frozen(eq=False)
class View:
    """A case as the rule sees it: its arguments by name, and the families of its rows."""

    sample: Sample
    args: dict[str, Any]
    operands: tuple[str, ...]
    """The names of the operands."""
    families: dict[Any, dict[tuple[int, ...], Found]]
    """The rows by their marks, each by its dims."""

    def value(self, text: str, d: int = 0) -> Any:
        """The value of an expression for this case."""
        return eval(text, {"d": d, **self.args})


def view_of(op: Any, case: Any) -> View:
    """The view of a case that the rule has."""
    sample: Sample = case.samples[0]
    names = parameters(op, sample)
    formal = list(zip(names[: len(_formal(op))], _formal(op), strict=True))
    args: dict[str, Any] = {
        name: tuple(default) if isinstance(default, list) else default
        for name, (_, _, default) in formal
        if default is not Parameter.empty
    }
    renamed = {original: name for name, (original, _, _) in formal}
    positional = names[: len(sample.call.args)]
    arguments: dict[str, Any] = dict(zip(positional, sample.call.args, strict=True))
    arguments |= {renamed.get(k, k): v for k, v in sample.call.kwargs}
    operands: dict[int, str] = {}
    for name, value in arguments.items():
        args[name] = substituted(value, lambda v: sample.ins[v.index])
        if isinstance(value, Var):
            operands[value.index] = name
        elif isinstance(value, tuple):
            for i, v in enumerate(value):
                if isinstance(v, Var):
                    operands[v.index] = f"{name}[{i}]"
    families: dict[Any, dict[tuple[int, ...], Found]] = {}
    called = tuple(operands[i] for i in range(len(operands)))
    for f in case.found:
        marks, dims = _marks(called, f, names)
        families.setdefault(marks, {})[dims] = f
    return View(sample, {n: args[n] for n in (*names, *args) if n in args}, called, families)


def _marks(operands: Sequence[str], found: Found, names: Sequence[str]) -> tuple[Any, Any]:
    """A row without its dims, and its dims.

    A row without dims has marks of the operands, marks of the outputs, and the argument that is
    the shape of an output. A list whose tensors are placed alike is one mark.
    """
    lists: dict[str, list[tuple[str, Placement]]] = {}
    for name, p in zip(operands, found.row.ins, strict=True):
        lists.setdefault(name.partition("[")[0], []).append((name, p))
    ins: list[tuple[str, Placement]] = []
    for name, members in lists.items():
        alike = len({p for _, p in members}) == 1 and dict(members).keys() != {name}
        ins += [(f"*{name}", dict(members).popitem()[1])] if alike else members
    outs = found.row.outs
    repeated = len(outs) > 4 and len(set(outs)) == 1
    after = [("*", next(iter(outs)))] if repeated else [(str(i), p) for i, p in enumerate(outs)]
    dims = tuple(p.dim for _, p in (*ins, *after) if isinstance(p, Shard))
    shape, number = "", ""
    if found.attempt.resized is not None:
        (place, output), _ = found.attempt.resized
        shape, number = names[place] if isinstance(place, int) else place, str(output)
    marks = [tuple((n, kind_of(p)) for n, p in placed) for placed in (ins, after)]
    return (*marks, (shape, number)), dims


def kind_of(p: Placement) -> str:
    """The placement without its dim, as a rule writes it."""
    match p:
        case Shard():
            return "S"
        case Replicate():
            return "R"
        case Partial("sum"):
            return "P"
        case Partial(op):
            return f'Partial("{op}")'
    return repr(p)


@functools.cache
def _formal(op: Any) -> tuple[tuple[str, bool, Any], ...]:
    """The parameters of an op: name, whether by keyword only, default."""
    if isinstance(op, OpOverload):
        return tuple(
            (
                a.name,
                a.kwarg_only,
                a.default_value if a.has_default_value() else Parameter.empty,
            )
            for a in schema_of(op).arguments
        )
    try:
        parameters = inspect.signature(op).parameters.values()
    except (TypeError, ValueError):
        return ()
    plain = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    return tuple(
        (p.name, p.kind is Parameter.KEYWORD_ONLY, p.default)
        for p in parameters
        if p.kind not in plain
    )


def parameters(op: Any, sample: Sample) -> list[str]:
    """The names of its parameters in the rule; more where it is called with more."""
    names = [name for name, _, _ in _formal(op)]
    more = range(len(sample.call.args) - sum(not by_name for _, by_name, _ in _formal(op)))
    names += [f"arg{i}" for i in more]
    other = next(x for x in ("x", "input", "tensor") if x not in names)
    return [other if n == "self" else f"{n}_" if keyword.iskeyword(n) else n for n in names]


def signature(op: Any, sample: Sample) -> str:
    formal = _formal(op)
    names = parameters(op, sample)
    parts = []
    for name, (_, by_name, default) in itertools.zip_longest(
        names, formal, fillvalue=("", False, Parameter.empty)
    ):
        if by_name and "*" not in parts:
            parts.append("*")
        plain = default is None or isinstance(default, (bool, int, float, str, tuple, list))
        shown = tuple(default) if isinstance(default, list) else default
        text = "" if default is Parameter.empty else f"={shown!r}" if plain else "=None"
        parts.append(f"{name}{text}")
    return ", ".join(parts)


def shown_text(sample: Sample) -> str:
    """The arguments of a sample: tensors as shapes."""

    def text(value: Any) -> str:
        if isinstance(value, Var):
            return str(list(sample.ins[value.index].shape))
        return f"({', '.join(map(text, value))})" if isinstance(value, tuple) else str(value)

    texts = [*map(text, sample.call.args), *(f"{k}={text(v)}" for k, v in sample.call.kwargs)]
    return f"({', '.join(texts)})"
