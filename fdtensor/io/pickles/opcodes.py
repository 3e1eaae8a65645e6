"""`unpickled`: the value of a pickle. The opcodes are those that protocols 2 to 5 write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fdtensor.io.pickles.literals  # noqa: F401  (its opcodes)
from fdtensor.io.pickles.machine import BASE, TIMES, Machine, Names, opcode
from fdtensor.layouts.errors import CheckpointError

__all__ = ["unpickled"]

HINT = "It is damaged, or was never a checkpoint."


def unpickled(
    data: Any,
    names: Names,
    *,
    what: str,
    size: int,
    hint: str = HINT,
    storage: Callable[[Any], Any] | None = None,
) -> tuple[Any, int]:
    """The value of the pickle that `data` begins with, and where it ends.

    `names` is the table of what it may use. Its memory is at most
    ten times `size`, the bytes of the file that it is in, and 4 MiB. Raises `CheckpointError`
    for whatever else it asks for, in which `what` says what is read.
    """

    def refuse(name: str) -> CheckpointError:
        return CheckpointError(f"{what} asks for {name}, which it may not have.", hint=hint)

    machine = Machine(memoryview(data), names, refuse, storage, TIMES * size + BASE)
    try:
        return machine.run()
    except CheckpointError:
        raise
    except Exception as error:  # makers of types that were opted in may raise anything
        told = str(error) if type(error) is ValueError else repr(error)
        raise CheckpointError(f"{what} cannot be read: {told[:300]}.", hint=HINT) from error


# --- the frame of a pickle -------------------------------------------------------------------


@opcode(0x80)
def _proto(m: Machine) -> None:
    if m.take(1)[0] not in (2, 3, 4, 5):
        raise ValueError("its protocol is none of 2 to 5")


@opcode(0x95)
def _frame(m: Machine) -> None:
    if m.number("<Q", 8) > len(m.data) - m.position:
        raise ValueError("it is cut off")


@opcode(ord("("))
def _mark(m: Machine) -> None:
    m.spend(9)
    m.marks.append(len(m.stack))


@opcode(ord("0"))
def _pop(m: Machine) -> None:
    m.pop()


@opcode(ord("1"))
def _pop_mark(m: Machine) -> None:
    m.items()


@opcode(ord("2"))
def _dup(m: Machine) -> None:
    m.push(m.stack[-1])


# --- memory and objects ----------------------------------------------------------------------


@opcode(ord("q"))
def _put(m: Machine) -> None:
    m.put(m.take(1)[0])


@opcode(ord("r"))
def _long_put(m: Machine) -> None:
    m.put(m.number("<I", 4))


@opcode(0x94)
def _memoize(m: Machine) -> None:
    m.put(len(m.memo))


@opcode(ord("h"))
def _get(m: Machine) -> None:
    m.push(m.memo[m.take(1)[0]])


@opcode(ord("j"))
def _long_get(m: Machine) -> None:
    m.push(m.memo[m.number("<I", 4)])


@opcode(ord("c"))
def _global(m: Machine) -> None:
    m.push(m.named(m.line(), m.line()))


@opcode(0x93)
def _stack_global(m: Machine) -> None:
    name, module = m.pop(), m.pop()
    if type(name) is not str or type(module) is not str:
        raise ValueError("a name is no text")
    m.push(m.named(module, name))


@opcode(ord("R"))
def _reduce(m: Machine) -> None:
    args = m.pop()
    m.push(m.call(m.pop(), args, False))


@opcode(0x81)
def _new(m: Machine) -> None:
    args = m.pop()
    m.push(m.call(m.pop(), args, True))


@opcode(ord("b"))
def _build(m: Machine) -> None:
    state = m.pop()
    m.build(m.stack[-1], state)


@opcode(ord("Q"))
def _persistent(m: Machine) -> None:
    if m.storage is None:
        raise ValueError("it refers to storage, and has none")
    m.push(m.storage(m.pop()))
