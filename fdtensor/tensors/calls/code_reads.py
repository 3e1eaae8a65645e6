"""`chains_in`: the names that code reads, each with the attributes that it reads of it."""

from __future__ import annotations

import dis
from collections import Counter
from collections.abc import Mapping, Sequence
from types import CodeType
from typing import Any, Literal

import attrs

from fdtensor.layouts.remembered import remembered

__all__ = ["Chain", "chains_in"]


@attrs.frozen
class Chain:
    """A name that code reads, and attributes that it reads of it one after the other.

    `config.model.width` is `model` and `width` of the global `config`.
    """

    root: Literal["global", "cell", "first", "super"]
    """Whether the name is a global, a variable of a function around, the first argument, or that of
    a function that `super()` gives."""
    name: str
    attributes: tuple[str, ...] = ()


@remembered(4096)
def chains_in(code: CodeType) -> tuple[Chain, ...]:
    """What code reads by itself, and of its first argument; functions inside of it included.

    A local variable that is set once, to what was read so, stands for that.
    """
    first = code.co_varnames[:1] if code.co_argcount else ()
    scope = {name: Chain("first", name) for name in first}
    scope |= {name: Chain("cell", name) for name in code.co_freevars}
    chains = dict.fromkeys(_chains(code, scope))
    if Chain("global", "super") in chains:  # which reads the first argument by itself
        chains |= {Chain("first", name): None for name in first}
    return tuple(chains)


def _chains(code: CodeType, scope: Mapping[str, Chain]) -> list[Chain]:
    """The chains of code in which these names of variables mean something."""
    steps = _steps(code)
    stores = Counter(name for what, name in steps if what == "store")
    known = {name: chain for name, chain in scope.items() if not stores[name]}
    chains: list[Chain] = []
    chain: Chain | None = None
    twice = False  # whether it lies on the stack once more
    for what, name in [*steps, _OTHER]:
        if what == "copy":
            twice = chain is not None
            continue
        if chain is not None:
            if what == "attribute" and twice:
                chain, twice = None, False  # self.count += 1 reads nothing that counts
                continue
            if what == "attribute":
                chain = attrs.evolve(chain, attributes=(*chain.attributes, name))
                continue
            if what == "store" and stores[name] == 1 and name not in scope:
                known[name] = chain
                if twice:
                    twice = False
                    continue
            elif what not in ("set", "super"):
                chains.append(chain)
        if what == "super":
            chains.append(Chain("super", name))
        chain = Chain("global", name) if what == "global" else None
        chain = known.get(name) if what == "variable" else chain
        twice = False
    for part in code.co_consts:
        if isinstance(part, CodeType):
            chains += _chains(part, {n: known[n] for n in part.co_freevars if n in known})
    return chains


_Step = tuple[
    Literal["global", "variable", "attribute", "super", "set", "store", "copy", "other"], str
]


def _steps(code: CodeType) -> Sequence[_Step]:
    """The instructions of code as far as chains go; later versions of Python join some of them."""
    steps: list[_Step] = []
    cells = {*code.co_cellvars, *code.co_freevars}  # to LOAD_FAST one makes an inner function
    for instruction in dis.get_instructions(code):
        name, value = instruction.opname, instruction.argval
        if name in ("LOAD_GLOBAL", "LOAD_NAME"):
            steps.append(("global", value))
        elif name in ("LOAD_ATTR", "LOAD_METHOD"):
            if steps and steps[-1] == _SUPER:
                steps[-1] = ("super", value)
            else:
                steps.append(("attribute", value))
        elif name == "LOAD_SUPER_ATTR":  # after super, the class and the first argument
            steps.append(("super", value))
        elif name in ("PRECALL", "CALL", "CALL_FUNCTION") and steps and steps[-1] == _SUPER:
            continue
        elif name == "STORE_ATTR":
            steps.append(("set", value))
        elif name in ("COPY", "DUP_TOP"):
            steps.append(("copy", ""))
        elif name in ("STORE_FAST_LOAD_FAST", "STORE_FAST_MAYBE_NULL"):
            names = _names(value)
            steps += [("store", names[0]), *[_variable(n) for n in names[1:]]]
        elif name.startswith("LOAD_FAST"):
            steps.extend(_OTHER if n in cells else _variable(n) for n in _names(value))
        elif name in ("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"):
            steps.append(_variable(value))
        elif name.startswith(("STORE_FAST", "STORE_DEREF", "DELETE_FAST", "DELETE_DEREF")):
            steps.extend(("store", n) for n in _names(value))
        elif name not in _SILENT:
            steps.append(_OTHER)
    return steps


_OTHER: _Step = ("other", "")
_SUPER: _Step = ("global", "super")


def _variable(name: str) -> _Step:
    return "variable", name


def _names(value: Any) -> tuple[str, ...]:
    """The names of an instruction: of two that are joined both."""
    return value if isinstance(value, tuple) else (value,)


_SILENT = frozenset(("CACHE", "EXTENDED_ARG", "NOP", "PUSH_NULL", "NOT_TAKEN"))
"""Instructions that leave the last value where it is."""
