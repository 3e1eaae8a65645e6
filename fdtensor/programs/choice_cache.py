"""Choices of layouts kept on disk, so that the second run of a script does not choose again.

A file has the placements that were chosen for one graph, as JSON. Its name is a digest of all that
the choice depends on: the graph, the mesh, the cost model, the constraints and the versions. What
is read is data and proposes a choice: it is looked up among the options that the graph has now.
Where it is not among them, it is made anew; of ragged blocks a few are not.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Generator
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from types import NoneType
from typing import IO, Any, cast

import attrs
import torch

from fdtensor.layouts.errors import FdtensorError
from fdtensor.layouts.json_fields import Malformed, parsed
from fdtensor.layouts.kinds import is_list, is_mapping, is_tuple
from fdtensor.ops.graph import Graph
from fdtensor.ops.notation.core import OF_OTHERS, rule_of
from fdtensor.ops.rows import CallKey
from fdtensor.ops.saved_values import CONSTRAIN, SAVED
from fdtensor.programs.choice_text import decode, encode
from fdtensor.programs.choices import Body, Choices
from fdtensor.programs.joint import Joint
from fdtensor.programs.nested import ways_of
from fdtensor.programs.nodes import Option

__all__ = ["agree", "choosing", "keep", "key_of", "may_end", "recalled"]

SWITCH = "FDTENSOR_CACHE"
"""The variable of the environment that names the folder, or is "off"."""

CHOOSING = "torch", "highspy"
"""The packages by which a choice may differ: what records a graph, and what solves."""

MOST_BYTES = 1 << 26
"""What the files may take together; those that were not read for the longest time go first."""

MOST_FILES = 2000
"""How many there may be."""


PATIENCE = 600.0
"""The most seconds that a process waits for another one that makes the same choice."""

POLL = 0.005
"""The seconds between two looks at whether it has."""


class _Unkept(Exception):
    """Something that a choice depends on and no text can tell."""


def key_of(joint: Joint) -> str | None:
    """The name of a choice; None where it depends on what may change unseen, and is not kept."""
    graph, known = joint.graph, (joint.prices.mesh, joint.prices.cost, joint.constraints)
    # pieces of decompositions are aten ops too
    if _folder() is None or any(op == "pointwise" or op.namespace == "aten" for op in OF_OTHERS):
        return None
    try:
        rest = _text((_versions(), *known, dict(joint.boundaries), joint.regather))
        text = f"{rest}\n{_graph_text(graph)}"
    except _Unkept:
        return None
    return hashlib.sha256(text.encode()).hexdigest()


@contextlib.contextmanager
def choosing(key: str) -> Generator[None]:
    """A context for a choice, which one process of a machine makes while the others wait for it.

    Of several ranks on few cores each would choose the same. Who waited looks again at what is
    kept. Nobody waits where files cannot be locked, nor longer than `PATIENCE` seconds.
    """
    folder, file = _folder(), None
    with suppress(OSError):
        assert folder is not None  # a choice without one has no key
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # for reading too, which shared locks of network folders ask for
        file = (folder / f"{key}.lock").open("a+")
    if file is None:
        yield
        return
    with file:
        first = _locked(file, fcntl.LOCK_EX)
        if not first:
            _locked(file, fcntl.LOCK_SH, PATIENCE)
        try:
            yield
        finally:
            if first:
                with suppress(OSError):
                    os.unlink(file.name)


def _locked(file: IO[str], kind: int, seconds: float = 0.0) -> bool:
    """Whether a file is locked by this process, after so many seconds at the most."""
    end = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= end:
                return False
            time.sleep(POLL)
        except OSError:  # a file system without locks
            return kind == fcntl.LOCK_EX
        else:
            return True


def keep(key: str, choices: Choices) -> None:
    """Writes a choice to the folder, or nothing where it cannot be written."""
    folder = _folder()
    if folder is None:
        return
    text = json.dumps(encode(choices), separators=(",", ":"))
    with suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as file:
            file.write(text)
        os.replace(file.name, folder / f"{key}.json")
        _make_room(folder)


def recalled(key: str, joint: Joint) -> Choices | None:
    """The choice of this name, as a proposal for a graph; None where there is none that fits."""
    folder = _folder()
    if folder is None:
        return None
    path = folder / f"{key}.json"
    try:
        if path.stat().st_size > MOST_BYTES:
            return None
        os.utime(path)
        return decode(parsed(path.read_text()), joint.graph, joint.prices.mesh)
    except (OSError, UnicodeDecodeError, Malformed, FdtensorError):
        return None


def may_end(joint: Joint, proposed: Choices) -> bool:
    """Whether results of which nothing is asked may have the layouts that are proposed."""
    graph, constraints = joint.graph, joint.constraints
    for axis, boundary in joint.boundaries.items():
        choice = proposed[axis]
        for k, (v, end, p) in enumerate(zip(graph.outs, boundary.outs, choice.outs, strict=True)):
            tied = constraints.ties.get(k)
            if tied is not None and p != choice.ins[tied]:
                return False
            if end == "free" and not constraints.may_end(graph.types[v.index], p):
                return False
    return True


def agree(joint: Joint, choices: Choices, proposed: Choices) -> bool:
    """Whether choices are just those that were proposed, and the order of axes is one there is."""
    return _has_orders(joint, choices) and all(
        (own.ins, own.outs) == (other.ins, other.outs)
        and [_way(o) for o in own.calls] == [_way(o) for o in other.calls]
        for own, other in zip(choices.values(), [proposed[axis] for axis in choices], strict=True)
    )


def _has_orders(joint: Joint, choices: Choices) -> bool:
    graph, mesh = joint.graph, joint.prices.mesh
    for i, order in enumerate(choices.nested.calls if choices.nested else ()):
        if order == mesh.axes:
            continue
        along = {axis: choices[axis].calls[i] for axis in mesh.axes}
        if order not in [w.order for w in ways_of(graph.calls[i], graph.types, mesh, along, True)]:
            return False
    return True


def _way(option: Option) -> tuple[Any, ...]:
    note = option.note
    return option.key, (note.blocks, note.depth) if isinstance(note, Body) else None


def _folder() -> Path | None:
    named = os.environ.get(SWITCH)
    if named is not None and named.lower() in ("", "0", "off"):
        return None
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(named or os.path.join(base, "fdtensor")) / "choices"


def _make_room(folder: Path) -> None:
    """Removes the files that were not read for the longest time, while there is too much."""
    files: list[tuple[float, int, str]] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            with suppress(OSError):
                files.append((entry.stat().st_mtime, entry.stat().st_size, entry.path))
    total, count = sum(size for _, size, _ in files), len(files)
    for _, size, path in sorted(files):
        if total <= MOST_BYTES and count <= MOST_FILES:
            return
        with suppress(OSError):
            os.unlink(path)
            total, count = total - size, count - 1


# --- the name ----------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1)
def _versions() -> str:
    """The versions of what chooses: of this package by its files, as it may be a checkout."""
    root, files = Path(__file__).parents[1], list[tuple[str, int, int]]()
    for folder, _, names in os.walk(root):
        for path in (os.path.join(folder, name) for name in names if name.endswith(".py")):
            stat = os.stat(path)
            files.append((os.path.relpath(path, root), stat.st_size, stat.st_mtime_ns))
    text = repr((sorted(files), [version(name) for name in CHOOSING]))
    return hashlib.sha256(text.encode()).hexdigest()


def _graph_text(graph: Graph) -> str:
    lines = [repr((graph.inputs, [v for v, _ in graph.constants], graph.outs, graph.types))]
    for call in graph.calls:
        named = call.op.namespace in ("aten", "prims") or call.op in (CONSTRAIN, SAVED)
        text = CallKey.of(call).text
        known = named or (rule_of(call.op) and call.op not in OF_OTHERS)
        if not known or " at 0x" in text:
            raise _Unkept
        lines.append(f"{call.op.name()}{text}{call.ins}{call.outs}")
    return "\n".join(lines)


def _text(value: object) -> str:
    """A value as a text that no other one has, the same in every process."""
    if isinstance(value, (NoneType, bool, int, float, str, range, torch.dtype, torch.device)):
        return repr(value)
    if is_tuple(value) or is_list(value):
        return f"({','.join(map(_text, value))})"
    if isinstance(value, frozenset):
        return f"{{{','.join(sorted(map(_text, cast('frozenset[object]', value))))}}}"
    if is_mapping(value):
        return f"{{{','.join(sorted(f'{_text(k)}:{_text(v)}' for k, v in value.items()))}}}"
    if attrs.has(type(value)):
        fields = [getattr(value, a.name) for a in attrs.fields(type(value))]
        return f"{type(value).__name__}{_text(fields)}"
    raise _Unkept
