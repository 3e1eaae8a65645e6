"""`Archive`: the records of a zip file of `torch.save`, which are not compressed, in place."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping

import attrs

from fdtensor.layouts.errors import CheckpointError

__all__ = ["Archive"]

_END, _END64, _LOCATOR, _ENTRY, _LOCAL = b"PK\5\6", b"PK\6\6", b"PK\6\7", b"PK\1\2", b"PK\3\4"
_FULL = 0xFFFFFFFF
"""The size of 32 bits that stands for one of 64 further on."""


@attrs.frozen
class Archive:
    """A buffer and its records: where each starts and stops, and its CRC-32."""

    data: memoryview
    records: Mapping[str, tuple[int, int, int]]
    what: str

    @classmethod
    def of(cls, data: memoryview, what: str) -> Archive:
        """The archive in a buffer. Raises `CheckpointError` for any other zip file."""
        try:
            records = dict(_records(data))
            root = next(name for name in records if name.endswith("/data.pkl"))[:-8]
        except (struct.error, ValueError, StopIteration, UnicodeDecodeError) as error:
            told = f": {error}" if isinstance(error, ValueError) else ""
            raise CheckpointError(
                f"{what} is not what torch.save writes{told}.",
                hint="It is damaged, or was written in another format.",
            ) from None
        inner = {name[len(root) :]: at for name, at in records.items() if name.startswith(root)}
        archive = cls(data, inner, what)
        if inner.get("byteorder") and bytes(archive.record("byteorder")) != b"little":
            raise CheckpointError(
                f"{what} was written on a machine of another byte order.",
                hint="Save it again on one like this.",
            )
        return archive

    def record(self, name: str, check: bool = True) -> memoryview:
        """The bytes of a record; where `check`, they are what the CRC-32 beside them says."""
        if name not in self.records:
            raise CheckpointError(f"{self.what} has no record {name!r}.", hint="It is damaged.")
        start, stop, crc = self.records[name]
        record = self.data[start:stop]
        if check and zlib.crc32(record) != crc:
            raise CheckpointError(
                f"{self.what} is damaged: its record {name!r} is not what was written.",
                hint="Load another checkpoint. (What was written without checksums, by "
                "torch.serialization.set_crc32_options(False), a FileSystemReader of torch reads.)",
            )
        return record


def _records(data: memoryview) -> list[tuple[str, tuple[int, int, int]]]:
    """The records that the directory at the end of the file lists."""
    count, size, start = _directory(data)
    stop = start + size
    if stop > len(data):
        raise ValueError("its directory leaves the file")
    records = []
    for _ in range(count):
        if start + 46 > stop or data[start : start + 4] != _ENTRY:
            raise ValueError("its directory is cut off")
        method, crc, packed, full, name, extra, comment = struct.unpack_from(
            "<10xH4xIIIHHH", data, start
        )
        (local,) = struct.unpack_from("<42xI", data, start)
        text = str(data[start + 46 : start + 46 + name], "utf-8")
        more = data[start + 46 + name : start + 46 + name + extra]
        full, packed, local = _long(more, [full, packed, local])
        if method or packed != full:
            raise ValueError("a record is compressed")
        records.append((text, (*_span(data, local, full), crc)))
        start += 46 + name + extra + comment
    return records


def _directory(data: memoryview) -> tuple[int, int, int]:
    """How many records the directory lists, how long it is and where it starts."""
    end = len(data) - 22
    if end < 0 or data[end : end + 4] != _END:
        raise ValueError("it has no end")
    count, size, start = struct.unpack_from("<10xHII", data, end)
    if end >= 20 and data[end - 20 : end - 16] == _LOCATOR:
        (end64,) = struct.unpack_from("<8xQ", data, end - 20)
        if end64 + 56 > len(data) or data[end64 : end64 + 4] != _END64:
            raise ValueError("its end is not where it says")
        count, size, start = struct.unpack_from("<32xQQQ", data, end64)
    return count, size, start


def _long(extra: memoryview, sizes: list[int]) -> list[int]:
    """The sizes, with those that are too large for 32 bits from the extra field of an entry."""
    while len(extra) >= 4 and _FULL in sizes:
        kind, count = struct.unpack_from("<HH", extra)
        if kind == 1:
            numbers = iter(struct.unpack_from(f"<{count // 8}Q", extra, 4))
            return [next(numbers, _FULL) if size == _FULL else size for size in sizes]
        extra = extra[4 + count :]
    return sizes


def _span(data: memoryview, local: int, size: int) -> tuple[int, int]:
    """Where the bytes of the record whose header is at `local` start and stop."""
    if local + 30 > len(data) or data[local : local + 4] != _LOCAL:
        raise ValueError("a record is not where it says")
    name, extra = struct.unpack_from("<26xHH", data, local)
    start = local + 30 + name + extra
    if start + size > len(data):
        raise ValueError("a record leaves the file")
    return start, start + size
