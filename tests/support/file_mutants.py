"""Mutants of files: what a bad disk, a crash or an attacker would leave of them.

What is damaged by chance has to be noticed; what is forged may say something else, but not run.
"""

from __future__ import annotations

import json
import pickle
import random
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence

import attrs

__all__ = ["FileMutant", "damaged", "file_mutants", "forged"]

NUMBERS = (0, 1, 2, 3, 255, 256, 65535, 2**31 - 1, 2**31, 2**40, 2**62, 2**63 - 1)


@attrs.frozen
class FileMutant:
    """The new bytes of one file, and how they came about."""

    name: str
    data: bytes
    how: str


def file_mutants(
    files: Mapping[str, bytes],
    kinds: Sequence[Callable[[bytes, random.Random], bytes]],
    count: int,
    seed: int,
) -> Iterator[FileMutant]:
    """`count` mutants, each of one of the files by one of the kinds, none that is the file."""
    chance, names = random.Random(seed), sorted(files)
    while count:
        name, kind = chance.choice(names), chance.choice(kinds)
        data = kind(files[name], chance)
        if data != files[name]:
            count -= 1
            yield FileMutant(name, data, kind.__name__)


# --- by chance -------------------------------------------------------------------------------


def one_bit(data: bytes, chance: random.Random) -> bytes:
    return _flipped(data, chance, 1)


def some_bits(data: bytes, chance: random.Random) -> bytes:
    return _flipped(data, chance, chance.randint(2, 6))


def _flipped(data: bytes, chance: random.Random, count: int) -> bytes:
    made = bytearray(data)
    for _ in range(count):
        made[chance.randrange(len(made))] ^= 1 << chance.randrange(8)
    return bytes(made)


def cut_off(data: bytes, chance: random.Random) -> bytes:
    return data[: chance.randrange(len(data))]


def longer(data: bytes, chance: random.Random) -> bytes:
    return data + chance.randbytes(chance.choice((1, 8, 100)))


def zeros(data: bytes, chance: random.Random) -> bytes:
    return _replaced(data, chance, lambda part: bytes(len(part)))


def noise(data: bytes, chance: random.Random) -> bytes:
    return _replaced(data, chance, lambda part: chance.randbytes(len(part)))


def left_out(data: bytes, chance: random.Random) -> bytes:
    return _replaced(data, chance, lambda part: b"")


def twice(data: bytes, chance: random.Random) -> bytes:
    return _replaced(data, chance, lambda part: part + part)


def from_elsewhere(data: bytes, chance: random.Random) -> bytes:
    start = chance.randrange(len(data))
    return _replaced(data, chance, lambda part: data[start : start + len(part)])


def _replaced(data: bytes, chance: random.Random, by: Callable[[bytes], bytes]) -> bytes:
    start = chance.randrange(len(data))
    stop = min(len(data), start + chance.choice((1, 2, 4, 16, 64, 512)))
    return data[:start] + by(data[start:stop]) + data[stop:]


damaged = (
    *(one_bit, one_bit, some_bits, cut_off, longer, zeros),
    *(noise, left_out, twice, from_elsewhere),
)
"""What happens to files."""


# --- on purpose ------------------------------------------------------------------------------


@attrs.frozen
class Runs:
    """An object whose pickle calls a function."""

    module: str
    name: str
    args: tuple[object, ...]

    def pickled(self, chance: random.Random) -> bytes:
        """The opcodes that call it, and drop what it gives."""
        args = pickle.dumps(self.args, protocol=2)[2:-1].replace(b"q\0", b"").replace(b"q\1", b"")
        if chance.random() < 0.5:
            return f"c{self.module}\n{self.name}\n".encode() + args + b"R0"
        named = b"".join(b"\x8c" + bytes([len(t)]) + t.encode() for t in (self.module, self.name))
        return named + b"\x93" + args + chance.choice((b"R0", b"\x810"))


def payloads(canary: str) -> tuple[Runs, ...]:
    """Calls that would leave a file, take much memory or time, or read what is none of theirs."""
    return (
        Runs("os", "system", (f"touch {canary}",)),
        Runs("posix", "system", (f"touch {canary}",)),
        Runs("builtins", "eval", (f"open({canary!r}, 'w')",)),
        Runs("builtins", "open", (canary, "w")),
        Runs("__builtin__", "exec", (f"open({canary!r}, 'w')",)),
        Runs("subprocess", "Popen", (("touch", canary),)),
        Runs("builtins", "bytearray", (10**12,)),
        Runs("builtins", "getattr", ("", "__class__")),
        Runs("torch", "zeros", (10**12,)),
        Runs("torch.storage", "UntypedStorage", (10**12,)),
        Runs("torch._utils", "_rebuild_tensor_v2", (("storage",), 0, (10**6,), (1,), False, {})),
        Runs("torch", "load", (canary,)),
        Runs("torch", "Size", ((10**12, 10**12),)),
        Runs("functools", "partial", ()),
        Runs("copyreg", "_reconstructor", ("", "", "")),
    )


def forged(canary: str) -> tuple[Callable[[bytes, random.Random], bytes], ...]:
    """What an attacker does to files: calls spliced in, sizes and places that lie, bombs."""

    def with_a_call(data: bytes, chance: random.Random) -> bytes:
        call = chance.choice(payloads(canary)).pickled(chance)
        head = data.find(b"\x80")
        start = head + 2 if chance.random() < 0.3 else _opcode(data, chance)
        if data[start : start + 1] == b"\x95":
            start += 9
        return data[:start] + call + data[start:]

    return (with_a_call, with_a_call, another_number, another_path, bomb, another_json)


def _opcode(data: bytes, chance: random.Random) -> int:
    """Where an opcode may begin: at those that end a value."""
    places = [i for i, code in enumerate(data) if code in b"Rb)}]\x94\x85\x86\x87"]
    return chance.choice(places) + 1 if places else chance.randrange(len(data))


def another_number(data: bytes, chance: random.Random) -> bytes:
    """A number of a pickle or a zip file is another one."""
    width = {"<B": 1, "<H": 2, "<i": 4, "<I": 4, "<q": 8}
    format = chance.choice(list(width))
    codes = {"<B": b"K", "<H": b"M", "<i": b"J", "<I": b"PK", "<q": b"PK"}
    places = [i for i in range(len(data)) if data.startswith(codes[format], i)]
    if not places:
        return data
    start = chance.choice(places) + 1 + (chance.randrange(60) if format in ("<I", "<q") else 0)
    number = chance.choice(NUMBERS) % (1 << (8 * width[format] - (format in ("<i", "<q"))))
    return data[:start] + struct.pack(format, number) + data[start + width[format] :]


def another_path(data: bytes, chance: random.Random) -> bytes:
    """A name of a file leaves the directory, by as many letters."""
    start = data.find(b"__")
    stop = data.find(b".distcp")
    if start < 0 or stop < start:
        return data
    name, size = data[start : stop + 7], stop + 7 - start
    paths = (
        b"../../../../../../etc/passwd",
        b"/etc/passwd",
        b"/dev/zero",
        b"../",
        b"..",
        b"a/../..",
    )
    path = chance.choice(paths)[:size].ljust(size, chance.choice((b"/", b"x", b"\0")))
    return data.replace(name, path)


def bomb(data: bytes, chance: random.Random) -> bytes:
    """A pickle that grows: many containers, deep ones, or ones that hold others again and again."""
    count = chance.choice((100, 10_000, 300_000))
    bombs = (
        b"]" * count,
        b"}" * count,
        b"\x8f" * count,
        b")" + b"\x85" * count,
        b")" + b"2\x86" * min(count, 10_000) + b"}" + b"2N" + b"s",
        b"N" + b"2" * count + b"t",
        b"(" * count,
        b"\x8b" + struct.pack("<i", 2**31 - 1) + b"\1" * 100,
        b"\x8e" + struct.pack("<Q", 2**40),
        b"\x8d" + struct.pack("<Q", 2**63),
        b"\x96" + struct.pack("<Q", 2**62),
        b"r" + struct.pack("<I", 2**32 - 1),
        b"j" + struct.pack("<I", 2**32 - 1),
        b"}" + b")" + b"2\x86" * 60 + b"Ns",
        b"\x95" + struct.pack("<Q", 2**63),
    )
    start = chance.choice((2, _opcode(data, chance)))
    return data[:start] + chance.choice(bombs) + data[start:]


def another_json(data: bytes, chance: random.Random) -> bytes:
    """A number, or a text, of JSON in a file is another one; a header keeps its size."""
    start = data.find(b"{")
    stop = data.rfind(b"}") + 1
    if start < 0:
        return data
    size = struct.unpack_from("<Q", data)[0] if start == 8 else stop - start
    try:
        tree = json.loads(data[start : start + size])
    except ValueError:
        return data
    entry = tree[chance.choice(list(tree))] if isinstance(tree, dict) and tree else tree
    target = entry if isinstance(entry, dict) and entry else tree
    key = chance.choice(list(target))
    values = (*NUMBERS, -1, 10**30, 1.5, "F32", "../x", "/etc/passwd", None, [], [2**62, 4], {})
    target[key] = chance.choice(values)
    text = json.dumps(tree).encode()
    if start == 8:
        return struct.pack("<Q", len(text)) + text + data[8 + size :]
    return data[:start] + text + data[stop:]
