"""`Machine`: what runs a pickle: its stack, its table of names, and its account of memory."""

from __future__ import annotations

import struct
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from fdtensor.layouts.errors import CheckpointError

__all__ = [
    "BASE",
    "DICT",
    "LIST",
    "SET",
    "TIMES",
    "TUPLE",
    "Known",
    "Machine",
    "Names",
    "check_key",
    "name_of",
    "opcode",
]

TIMES = 10
"""A value takes at most so many times the bytes of the file that holds it, and `BASE` more."""

BASE = 4 << 20

TUPLE, LIST, DICT, SET = 40, 56, 64, 216
"""The bytes of empty containers."""

_SLOT, _ITEM, _FIRST, _OBJECT = 9, 45, 120, 56
"""Those of a place on the stack, of an entry of a dict or set, of the first one, of an object."""

_KEYS = 1000
"""How many parts a key of a dict may have: hashing one visits all, shared ones again and again."""

_MAPPINGS = (dict, OrderedDict, defaultdict, Counter)


@attrs.frozen(eq=False)
class Known:
    """What a pickle may name: a class, a function or a constant, and what may be done with it."""

    thing: Any
    call: Callable[..., Any] | None = None
    """What makes an object of arguments, as a function does."""
    new: Callable[..., Any] | None = None
    """What makes one whose state follows."""
    build: Callable[[Any, Any], None] | None = None
    """What puts the state in."""


class Names:
    """A table of what a pickle may name."""

    def __init__(self, table: Mapping[str, Known]) -> None:
        self.by_name = dict(table)
        self.by_id = {id(known.thing): known for known in table.values()}

    def with_more(self, table: Mapping[str, Known]) -> Names:
        """The table with more names."""
        return Names({**table, **self.by_name}) if table else self

    def of(self, thing: Any) -> Known | None:
        """The entry of a class or a function."""
        return self.by_id.get(id(thing))


@attrs.define
class Machine:
    """The state of a run: `data` from `position` on is still to be read."""

    data: memoryview
    names: Names
    refuse: Callable[[str], CheckpointError]
    """The error for a name that the table lacks."""
    storage: Callable[[Any], Any] | None
    """What a persistent id stands for."""
    limit: int
    stack: list[Any] = attrs.field(factory=list)
    marks: list[int] = attrs.field(factory=list)
    memo: list[Any] = attrs.field(factory=list)
    small: list[Any] = attrs.field(factory=list)
    """The numbers below 65,536 that were seen: each is one object, however often it is written."""
    position: int = 0
    spent: int = 0
    """The bytes of all that was made."""

    def run(self) -> tuple[Any, int]:
        """The value, and the position behind the pickle."""
        data = self.data
        while (code := data[self.position]) != STOP:
            self.position += 1
            _ACTIONS[code](self)
        (value,) = self.stack
        return value, self.position + 1

    # --- reading -----------------------------------------------------------------------------

    def take(self, count: int) -> memoryview:
        """The next bytes."""
        start = self.position
        stop = start + count
        if not start <= stop <= len(self.data):
            raise ValueError("it is cut off")
        self.position = stop
        return self.data[start:stop]

    def number(self, format: str, size: int) -> Any:
        """The next number."""
        (value,) = struct.unpack(format, self.take(size))
        return value

    def line(self) -> str:
        """The next text that a newline ends."""
        start = self.position
        line = bytes(self.data[start : start + 1000]).partition(b"\n")
        if not line[1]:
            raise ValueError("a name does not end")
        self.position = start + len(line[0]) + 1
        return line[0].decode()

    # --- the account -------------------------------------------------------------------------

    def spend(self, count: int) -> None:
        """Counts bytes that are about to be taken."""
        self.spent += count
        if self.spent + _SLOT * len(self.stack) > self.limit:
            raise ValueError(f"it asks for more than {self.limit} bytes of memory")

    def push(self, value: Any, count: int = 0) -> None:
        """Puts a new value of so many bytes on the stack."""
        self.spend(count)
        self.stack.append(value)

    def items(self) -> list[Any]:
        """What lies above the last mark, taken off the stack."""
        mark = self.marks.pop()
        count = 8 * (len(self.stack) - mark)
        self.spend(count)
        items = self.stack[mark:]
        del self.stack[mark:]
        self.spent -= count + _SLOT  # both are gone soon, and so is the mark
        return items

    def pop(self) -> Any:
        """The value on top, taken off: nothing below a mark is touched."""
        if self.marks and len(self.stack) <= self.marks[-1]:
            raise ValueError("nothing lies above the mark")
        return self.stack.pop()

    def put(self, index: int) -> None:
        """Remembers the value on top."""
        if index > len(self.memo):
            raise ValueError(f"it remembers value {index} before value {len(self.memo)}")
        self.memo[index : index + 1] = [self.stack[-1]]
        self.spend(8)

    # --- what is made ------------------------------------------------------------------------

    def named(self, module: str, name: str) -> Any:
        """What the table has under a name."""
        full = f"{_RENAMED.get(module, module)}.{name}"
        known = self.names.by_name.get(full)
        if known is None:
            raise self.refuse(full)
        return known.thing

    def put_items(self, target: Any, pairs: list[Any]) -> None:
        """Puts keys and values in a dict."""
        if type(target) not in _MAPPINGS:
            raise ValueError(f"{type(target).__name__} takes no items")
        if len(pairs) % 2:
            raise ValueError("a key has no value")
        self.spend(_FIRST * (not target) + _ITEM * (len(pairs) // 2))
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            check_key(key)
            target[key] = value

    def extend(self, target: Any, items: list[Any]) -> None:
        """Appends to a list."""
        if type(target) is not list:
            raise ValueError(f"{type(target).__name__} cannot be appended to")
        self.spend(8 * len(items))
        target.extend(items)

    def add(self, target: Any, items: list[Any]) -> None:
        """Adds to a set."""
        if type(target) is not set:
            raise ValueError(f"{type(target).__name__} cannot be added to")
        self.spend(_ITEM * len(items))
        for item in items:
            check_key(item)
        target.update(items)

    def call(self, thing: Any, args: Any, new: bool) -> Any:
        """What a class or a function of the table makes of arguments."""
        known = self.names.of(thing)
        make = known and (known.new if new else known.call)
        if make is None or type(args) is not tuple:
            raise ValueError("it calls what cannot be called")
        self.spend(_OBJECT)
        return make(*args)

    def build(self, target: Any, state: Any) -> None:
        """Puts its state in an object."""
        known = self.names.of(type(target))
        if known is None or known.build is None:
            raise ValueError(f"{type(target).__name__} takes no state")
        count = _taken_by(state)
        known.build(target, state)
        self.spent -= count - _taken_by(state)


_RENAMED = {"__builtin__": "builtins", "copy_reg": "copyreg"}
"""The names of modules that old protocols write."""


def name_of(thing: Any) -> str:
    """The name that a pickle has for a class or a function."""
    return f"{thing.__module__}.{thing.__qualname__}"


def _taken_by(state: Any) -> int:
    """The bytes of a state's entries."""
    return _FIRST + _ITEM * len(state) if type(state) is dict and state else 0


def check_key(key: Any) -> None:
    """Raises where hashing a key would take long, or deep recursion."""
    waiting, seen = [(key, 0)], 0
    while waiting:
        part, depth = waiting.pop()
        seen += 1
        if seen > _KEYS or depth > 20:
            raise ValueError("a key of a dict has too many parts")
        if type(part) in (tuple, frozenset):
            waiting += [(inner, depth + 1) for inner in part]


STOP = 0x2E


def _unknown(machine: Machine) -> None:
    code = machine.data[machine.position - 1]
    raise ValueError(f"it has opcode {code:#04x}, which none of these files needs")


_ACTIONS: list[Callable[[Machine], None]] = [_unknown] * 256
"""What each opcode does, by its number."""


def opcode(code: int) -> Callable[[Callable[[Machine], None]], Callable[[Machine], None]]:
    """A decorator: the function is what the opcode does."""

    def put(action: Callable[[Machine], None]) -> Callable[[Machine], None]:
        _ACTIONS[code] = action
        return action

    return put
