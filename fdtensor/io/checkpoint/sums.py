"""`Sums`: the checksums that `save_safetensors` puts in the header of a file.

They are in its metadata, which others ignore: one over the names, shapes and dtypes, and of each
tensor one of every mebibyte, so that a rank can check the part that it reads.
"""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs
import torch

from fdtensor.io.checkpoint.folder import opened
from fdtensor.io.checkpoint.stored import Stored
from fdtensor.layouts.blocks import Box
from fdtensor.layouts.errors import CheckpointError

__all__ = ["KEY", "Sums", "json_of", "offsets", "sums_in"]

KEY = "fdtensor"
"""What others ignore in the metadata of a header."""
REGION = 1 << 20

_MARKS = (KEY, '"crc32": ', '"header": ', '"save": ')
"""Each of these tells that there were checksums, if others are damaged."""


@attrs.frozen
class Sums:
    """The checksums of a file's tensors, by name; `save` is that of all files of one save."""

    save: str
    crc32: Mapping[str, list[int]]

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor], save: str) -> Sums:
        """Those of tensors."""
        return cls(save, {name: _sums(_bytes(tensor)) for name, tensor in tensors.items()})

    def text(self, stored: Mapping[str, Stored]) -> str:
        """What the header says of them."""
        return json.dumps({"crc32": self.crc32, "header": self.digest(stored), "save": self.save})

    def digest(self, stored: Mapping[str, Stored]) -> str:
        """The checksum of the header, whose tensors are these."""
        facts = [self.save, sorted((name, str(x), self.crc32[name]) for name, x in stored.items())]
        return hashlib.blake2b(repr(facts).encode(), digest_size=16).hexdigest()

    def check(
        self, file: Path, name: str, stored: Stored, boxes: list[Box], ends: tuple[int, int]
    ) -> None:
        """Raises `CheckpointError` where a part of a tensor that has these blocks is damaged.

        The bytes of the tensor are between these `ends` in the file.
        """
        spans = [span for box in boxes if (span := _span(box, stored)) is not None]
        if not spans:
            return
        low, high = min(a for a, _ in spans), max(b for _, b in spans)
        start, stop = ends
        with opened(file) as source:
            for i in range(low // REGION, -(-high // REGION)):
                source.seek(start + i * REGION)
                data = source.read(min(REGION, stop - start - i * REGION))
                if zlib.crc32(data) != self.crc32[name][i]:
                    raise CheckpointError(
                        f"{name} in {str(file)!r} is damaged: its checksum is not that of what was "
                        "written.",
                        hint="Get the file again.",
                    )


def sums_in(
    metadata: Mapping[str, str] | None, stored: Mapping[str, Stored], file: Path
) -> Sums | None:
    """The checksums in the header of a file, which fit the rest of it; None where it has none."""
    texts = [text for key, text in (metadata or {}).items() if any(m in key + text for m in _MARKS)]
    if not texts:
        return None
    sums = None
    with suppress(ValueError, KeyError, TypeError):
        told = json_of(texts[0])
        claimed = Sums(str(told["save"]), dict(told["crc32"]))
        sums = claimed if claimed.digest(stored) == told["header"] else None
    if sums is None:
        raise CheckpointError(
            f"the header of {str(file)!r} is damaged: it is not what its checksum says.",
            hint="Get the file again.",
        )
    return sums


def json_of(text: str) -> dict[str, Any]:
    """The object that a JSON text has. Raises ValueError for one of many small containers."""
    if text.count("[") + text.count("{") > 1000 + len(text) // 8:  # a tensor takes 8 at least
        raise ValueError("it has too many lists and objects for its size")
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    if type(value) is not dict:
        raise ValueError("it is no object")
    return value


def _sums(data: memoryview) -> list[int]:
    return [zlib.crc32(data[i : i + REGION]) for i in range(0, len(data), REGION)]


def _bytes(tensor: torch.Tensor) -> memoryview:
    if not tensor.numel():
        return memoryview(b"")
    return memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _span(box: Box, stored: Stored) -> tuple[int, int] | None:
    """Where the first byte of a block is in the tensor, and where the last one ends."""
    if not all(box):
        return None
    first = last = 0
    for intervals, size in zip(box, stored.shape, strict=True):
        first, last = first * size + intervals[0][0], last * size + intervals[-1][1] - 1
    return first * stored.dtype.itemsize, (last + 1) * stored.dtype.itemsize


def offsets(file: Path) -> dict[str, tuple[int, int]]:
    """Where the bytes of each tensor are in a file whose header is known to be right."""
    with opened(file) as source:
        (size,) = struct.unpack("<Q", source.read(8))
        header = json.loads(source.read(size))
    return {
        name: (8 + size + facts["data_offsets"][0], 8 + size + facts["data_offsets"][1])
        for name, facts in header.items()
        if name != "__metadata__"
    }
