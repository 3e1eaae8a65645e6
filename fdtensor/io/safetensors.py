"""`load_safetensors` and `save_safetensors`: DTensors from and to files of whole tensors."""

from __future__ import annotations

import json
import os
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

from fdtensor.io.checkpoint.boxes import rectangles, view
from fdtensor.io.checkpoint.fresh import Fresh
from fdtensor.io.checkpoint.headers import DTYPES, Header, headers, opened
from fdtensor.io.checkpoint.names import Leaf, named, with_words
from fdtensor.io.checkpoint.one_path import of_paths, one_path
from fdtensor.io.checkpoint.places import draft, old_files, refuse_place
from fdtensor.io.checkpoint.request import Request, request
from fdtensor.io.checkpoint.stored import Contents, Stored, checked_path
from fdtensor.io.checkpoint.sums import KEY, Sums, offsets
from fdtensor.io.checkpoint.together import relayed, together
from fdtensor.io.checkpoint.write import sync_directory
from fdtensor.layouts.dtypes import dtype_name
from fdtensor.layouts.errors import CheckpointError, ValueTreeError
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import Replicate
from fdtensor.layouts.signatures import named_arguments
from fdtensor.runtime.comm import Comm, inside
from fdtensor.runtime.interpreter import digest_of
from fdtensor.tensors.connect import redistribute
from fdtensor.tensors.dtensor import DTensor

__all__ = ["load_safetensors", "save_safetensors"]


@named_arguments
def load_safetensors(path: Any, layouts: Any, comm: Comm[Any], *, strict: bool = True) -> Any:
    """DTensors from safetensors files, as a pytree like `layouts`; a rank reads only its blocks.

    `path` is a file, several files, an index or a directory. `layouts` maps names to layouts, or
    to types, which are checked; dicts may be nested, their keys joined by dots, and tensors stand
    for plain ones like them. One layout, or a function that gives one for a name and its `Stored`,
    stands for all names below its place: alone it gives a flat dict of all.

    Collective over the ranks of `comm`, but nothing is sent but whether all is well. Raises one
    `CheckpointError` on all ranks for whatever is missing, of another shape or dtype, or, where
    `strict`, left over.

    >>> import tempfile
    >>> mesh = Mesh(x=2)
    >>> comm = SimulatedComm(mesh)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     fd.io.save_safetensors({"w": torch.arange(4)}, folder, comm)
    ...     params = fd.io.load_safetensors(folder, {"w": mesh.layout("x")}, comm)

    >>> params["w"].local
    (tensor([0, 1]), tensor([2, 3]))
    """
    about = "load_safetensors"
    with of_paths(path, comm):
        where, wanted, fresh = together(about, comm, lambda: _prepared(path, layouts, comm, strict))
        together(about, comm, lambda: _read(where, fresh))
    return wanted.filled({name: x.value() for name, x in fresh.items()})


def _prepared(
    path: Any, layouts: Any, comm: Comm[Any], strict: bool
) -> tuple[dict[str, Header], Request, dict[str, Fresh]]:
    where = headers(path)
    contents = Contents({name: header.stored for name, header in where.items()})
    wanted = request(layouts, contents, comm, strict, "the files")
    return where, wanted, {name: Fresh.of(asked) for name, asked in wanted.asked.items()}


def _read(where: Mapping[str, Header], fresh: Mapping[str, Fresh]) -> None:
    """Reads what the blocks here hold, each rectangle once for all replicas."""
    for file in dict.fromkeys(where[name].file for name in fresh):
        ends: dict[str, tuple[int, int]] = {}
        with opened(file) as tensors:
            for name, x in fresh.items():
                if where[name].file != file:
                    continue
                boxes = list(dict.fromkeys(box for box, _ in x.blocks))
                if (sums := where[name].sums) is not None:
                    ends = ends or offsets(file)  # once: it reads the whole header
                    sums.check(file, name, where[name].stored, boxes, ends[name])
                source = tensors.get_slice(name)
                for box in boxes:
                    same = [local for other, local in x.blocks if other == box]
                    for piece in rectangles(box):
                        part = source[tuple(slice(*ends) for ends in piece) or ...]
                        for local in same:
                            view(local, box, piece).copy_(part)


# --- writing ---------------------------------------------------------------------------------


@named_arguments
def save_safetensors(tree: Any, path: Any, comm: Comm[Any], *, overwrite: bool = False) -> None:
    """Writes a pytree of DTensors and plain tensors as safetensors files of whole tensors.

    Collective over the ranks of `comm`. To a path that ends with `.safetensors` its first rank
    writes one file; to a directory each rank writes the tensors that come to it, of about as many
    bytes as any other's, beside an index that is written last. Names are keys joined by dots. One
    file is replaced in one step; of several, those of two saves are never taken for one set. Their
    headers have checksums, which `load_safetensors` looks at, of what it reads.
    Each tensor is redistributed to the rank that writes it, which holds its share at once. Raises
    `CheckpointError` where there are such files already, unless `overwrite`, and `ValueTreeError`
    for leaves that are no tensors, or of a dtype that the format lacks.

    >>> import tempfile
    >>> mesh = Mesh(x=2)
    >>> comm = SimulatedComm(mesh)
    >>> x = distribute(torch.arange(4), mesh.layout("x"), comm)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     fd.io.save_safetensors({"x": x}, folder + "/x.safetensors", comm)
    ...     print(fd.io.load_safetensors(folder + "/x.safetensors", mesh.layout(), comm)["x"].type)
    i64[4]
    """
    about = "save_safetensors"
    one_path(about, path, comm)
    leaves = together(about, comm, lambda: _checked(tree, Path(checked_path(path)), overwrite))
    target = Path(path)
    files = _shared_out(leaves, target, comm)
    facts = [(leaf.name, str(_kind(leaf.value))) for leaf in leaves]
    comm.agree(about, digest_of(f"{facts} {files}"), [comm.mesh], None)
    tensors = {leaf.name: leaf.value for leaf in leaves}
    spread = {name: x.detach() for name, x in tensors.items() if isinstance(x, DTensor)}
    owner = {name: file.rank for file in files for name in file.names}
    whole = redistribute(spread, {name: _alone(owner[name]) for name in spread})
    if not inside(comm):
        return
    what = f"the safetensors files at {str(target)!r} were not written"
    count = 1 if comm.rank is None else comm.mesh.size
    save = relayed(comm, what, lambda: None, lambda _: [uuid.uuid4().hex[:8]] * count)
    mine = [f for f in files if comm.rank in (None, f.rank)]
    try:
        together(about, comm, lambda: _write(mine, {**tensors, **whole}, save))
        together(about, comm, lambda: _put_in_place(mine))
    except BaseException:
        for file in mine:
            draft(file.path).unlink(missing_ok=True)
        raise
    together(about, comm, lambda: _index(target, files, leaves, comm))


@attrs.frozen
class _File:
    """A file, the rank that writes it and the tensors in it."""

    path: Path
    rank: int
    names: tuple[str, ...]


def _checked(tree: Any, target: Path, overwrite: bool) -> list[Leaf]:
    refuse_place(target, overwrite)
    leaves = [with_words(leaf) for leaf in named(tree)[0]]
    names = Counter(leaf.name for leaf in leaves)
    problems: dict[str, str] = {}
    for leaf in leaves:
        kind = _kind(leaf.value)
        if kind is None:
            problems[leaf.name] = f"is not a tensor: {type(leaf.value).__name__}"
        elif kind.dtype not in DTYPES:
            problems[leaf.name] = f"is {kind}: safetensors files have no {dtype_name(kind.dtype)}"
        elif not leaf.path:
            problems["tree"] = "has no name: pass a dict"
        elif leaf.name == "__metadata__" or not _is_text(leaf.name):
            problems[repr(leaf.name)] = "is no name that a safetensors file can have"
        elif names[leaf.name] > 1:
            problems[leaf.name] = "is the name of two leaves"
    if problems:
        raise ValueTreeError(
            f"{len(problems)} of {len(leaves)} leaves cannot be in safetensors files.",
            **problems,
            hint="Leave them out; save_checkpoint stores objects and any dtype.",
        )
    return leaves


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _kind(value: Any) -> Stored | None:
    """Shape and dtype of a tensor of either kind; None for anything else."""
    if isinstance(value, DTensor):
        return Stored(value.shape, value.dtype)
    plain = isinstance(value, torch.Tensor) and type(value) in (torch.Tensor, torch.nn.Parameter)
    return Stored(tuple(value.shape), value.dtype) if plain else None


def _shared_out(leaves: Sequence[Leaf], target: Path, comm: Comm[Any]) -> list[_File]:
    """The files: largest tensors first, each to the rank of its mesh that has least to write."""
    loads = dict.fromkeys(sorted(comm.mesh.order), 0)
    sizes = {leaf.name: (_kind(leaf.value) or Stored((), torch.bool)).nbytes for leaf in leaves}
    names: dict[int, list[str]] = {rank: [] for rank in loads}
    for leaf in sorted(leaves, key=lambda leaf: (-sizes[leaf.name], leaf.name)):
        ranks = [min(loads)] if target.suffix == ".safetensors" else _holders(leaf, comm)
        rank = min(ranks, key=lambda r: loads[r])
        loads[rank] += sizes[leaf.name]
        names[rank].append(leaf.name)
    used = [rank for rank in names if names[rank]] or [min(loads)]
    paths = [target] if target.suffix == ".safetensors" else _paths(target, len(used))
    return [_File(p, r, tuple(sorted(names[r]))) for p, r in zip(paths, used, strict=True)]


def _holders(leaf: Leaf, comm: Comm[Any]) -> Sequence[int]:
    """The ranks of the Comm that have a part of a tensor; all of them if none has."""
    holders = leaf.value.mesh.order if isinstance(leaf.value, DTensor) else comm.mesh.order
    return sorted({*holders} & {*comm.mesh.order} or comm.mesh.order)


def _paths(target: Path, count: int) -> list[Path]:
    if count == 1:
        return [target / "model.safetensors"]
    return [target / f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]


def _alone(rank: int) -> Layout:
    return Layout(Mesh.from_ranks([rank], "file"), [Replicate()])


def _is_first(comm: Comm[Any]) -> bool:
    return comm.rank in (None, min(comm.mesh.order))


def _write(files: Sequence[_File], values: Mapping[str, Any], save: str) -> None:
    """Writes files beside old ones, to the disk."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    for file in files:
        file.path.parent.mkdir(parents=True, exist_ok=True)
        tensors = {name: _whole(values[name]) for name in file.names}
        stored = {name: Stored(tuple(x.shape), x.dtype) for name, x in tensors.items()}
        sums = Sums.of(tensors, save).text(stored)
        try:
            save_file(tensors, draft(file.path), metadata={"format": "pt", KEY: sums})
        except SafetensorError as error:
            raise CheckpointError(
                f"the safetensors file at {str(file.path)!r} was not written: {error}.",
                hint="Make room there, or save to another place.",
            ) from error
        with open(draft(file.path), "rb") as written:
            os.fsync(written.fileno())


def _put_in_place(files: Sequence[_File]) -> None:
    """Renames the files over old ones."""
    for file in files:
        os.replace(draft(file.path), file.path)
        sync_directory(file.path.parent)


def _whole(value: Any) -> torch.Tensor:
    """A tensor that shares no memory with others of the file."""
    if isinstance(value, DTensor):
        return value.comm.leaves(value.local)[0].cpu()
    return value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def _index(target: Path, files: Sequence[_File], leaves: Sequence[Leaf], comm: Comm[Any]) -> None:
    """Writes which of several files has which tensor, and removes files of old saves."""
    if not _is_first(comm):
        return
    index = target / "model.safetensors.index.json"
    kept = {file.path for file in files} | ({index} if len(files) > 1 else set())
    if len(files) > 1:
        _write_index(index, files, leaves)
    for file in set(old_files(target)) - kept:
        file.unlink()


def _write_index(index: Path, files: Sequence[_File], leaves: Sequence[Leaf]) -> None:
    total = sum(kind.nbytes for leaf in leaves if (kind := _kind(leaf.value)))
    weights = {name: file.path.name for file in files for name in file.names}
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": weights}, indent=2)
    with open(draft(index), "w", encoding="utf-8") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft(index), index)
    sync_directory(index.parent)
