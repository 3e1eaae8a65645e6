"""The opcodes of plain values: numbers, texts and containers."""

from __future__ import annotations

import sys
from typing import Any

from fdtensor.io.pickles.machine import DICT, LIST, SET, TUPLE, Machine, opcode

__all__: list[str] = []


# --- numbers and texts -----------------------------------------------------------------------


@opcode(ord("N"))
def _none(m: Machine) -> None:
    m.push(None)


@opcode(0x88)
def _true(m: Machine) -> None:
    m.push(True)


@opcode(0x89)
def _false(m: Machine) -> None:
    m.push(False)


@opcode(ord("J"))
def _binint(m: Machine) -> None:
    m.push(m.number("<i", 4), 28)


@opcode(ord("K"))
def _binint1(m: Machine) -> None:
    m.push(m.take(1)[0])


@opcode(ord("M"))
def _binint2(m: Machine) -> None:
    number = m.number("<H", 2)
    if not m.small:
        m.spend(8 << 16)
        m.small.extend([None] * (1 << 16))
    if m.small[number] is None:
        m.spend(28)
        m.small[number] = number
    m.push(m.small[number])


@opcode(0x8A)
def _long1(m: Machine) -> None:
    _push_long(m, m.take(1)[0])


@opcode(0x8B)
def _long4(m: Machine) -> None:
    _push_long(m, m.number("<i", 4))


def _push_long(m: Machine, count: int) -> None:
    data = m.take(count)
    m.push(int.from_bytes(data, "little", signed=True), 28 + 2 * count)


@opcode(ord("G"))
def _float(m: Machine) -> None:
    m.push(m.number(">d", 8), 24)


@opcode(0x8C)
def _short_text(m: Machine) -> None:
    _push_text(m, m.take(1)[0])


@opcode(ord("X"))
def _text(m: Machine) -> None:
    _push_text(m, m.number("<I", 4))


@opcode(0x8D)
def _long_text(m: Machine) -> None:
    _push_text(m, m.number("<Q", 8))


def _push_text(m: Machine, count: int) -> None:
    text = str(m.take(count), "utf-8", "surrogatepass")
    m.push(text, sys.getsizeof(text))


@opcode(ord("C"))
def _short_bytes(m: Machine) -> None:
    _push_bytes(m, m.take(1)[0], bytes)


@opcode(ord("B"))
def _bytes(m: Machine) -> None:
    _push_bytes(m, m.number("<I", 4), bytes)


@opcode(0x8E)
def _long_bytes(m: Machine) -> None:
    _push_bytes(m, m.number("<Q", 8), bytes)


@opcode(0x96)
def _bytearray(m: Machine) -> None:
    _push_bytes(m, m.number("<Q", 8), bytearray)


def _push_bytes(m: Machine, count: int, kind: type) -> None:
    m.push(kind(m.take(count)), 64 + count)


# --- containers ------------------------------------------------------------------------------


@opcode(ord("]"))
def _list(m: Machine) -> None:
    m.push([], LIST)


@opcode(ord("a"))
def _append(m: Machine) -> None:
    value = m.pop()
    m.extend(m.stack[-1], [value])


@opcode(ord("e"))
def _appends(m: Machine) -> None:
    items = m.items()
    m.extend(m.stack[-1], items)


@opcode(ord(")"))
def _empty_tuple(m: Machine) -> None:
    m.push(())


@opcode(ord("t"))
def _tuple(m: Machine) -> None:
    items = m.items()
    m.push(tuple(items), TUPLE + 8 * len(items))


@opcode(0x85)
def _tuple1(m: Machine) -> None:
    m.push((m.pop(),), TUPLE + 8)


@opcode(0x86)
def _tuple2(m: Machine) -> None:
    b, a = m.pop(), m.pop()
    m.push((a, b), TUPLE + 16)


@opcode(0x87)
def _tuple3(m: Machine) -> None:
    c, b, a = m.pop(), m.pop(), m.pop()
    m.push((a, b, c), TUPLE + 24)


@opcode(ord("}"))
def _dict(m: Machine) -> None:
    m.push({}, DICT)


@opcode(ord("s"))
def _set_item(m: Machine) -> None:
    value, key = m.pop(), m.pop()
    m.put_items(m.stack[-1], [key, value])


@opcode(ord("u"))
def _set_items(m: Machine) -> None:
    items = m.items()
    m.put_items(m.stack[-1], items)


@opcode(0x8F)
def _set(m: Machine) -> None:
    m.push(set(), SET)


@opcode(0x90)
def _add_items(m: Machine) -> None:
    items = m.items()
    m.add(m.stack[-1], items)


@opcode(0x91)
def _frozenset(m: Machine) -> None:
    gathered: set[Any] = set()
    m.add(gathered, m.items())
    m.push(frozenset(gathered), SET)
