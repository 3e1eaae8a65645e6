"""`load_checkpoint`: DTensors of any layouts from what `torch.distributed.checkpoint` stored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
from torch.distributed.checkpoint.storage import StorageReader

from fdtensor.io.checkpoint.background import settled
from fdtensor.io.checkpoint.catalog import Catalog, Piece
from fdtensor.io.checkpoint.contents import reader_catalog
from fdtensor.io.checkpoint.elsewhere import read_elsewhere
from fdtensor.io.checkpoint.folder import Folder, folder_at
from fdtensor.io.checkpoint.fresh import Fresh
from fdtensor.io.checkpoint.one_path import of_paths
from fdtensor.io.checkpoint.read import read
from fdtensor.io.checkpoint.request import Request, request
from fdtensor.io.checkpoint.stored import checked_path
from fdtensor.io.checkpoint.together import together
from fdtensor.io.pickles import Objects, check_objects
from fdtensor.layouts.opaque import opaque
from fdtensor.layouts.signatures import named_arguments
from fdtensor.runtime.comm import Comm, inside, refuse_no_comm

__all__ = ["load_checkpoint"]


@opaque
@named_arguments
def load_checkpoint(
    path: Any, like: Any, comm: Comm[Any], *, strict: bool = True, objects: Objects = ()
) -> Any:
    """The pytree `like`, filled from the checkpoint at `path`, whatever mesh wrote it.

    Collective over the ranks of `comm`. The leaves of `like` say what is wanted: a `TensorType`, a
    `Layout` for a tensor of any shape and dtype, a DTensor or a tensor for one like it, a random
    key for a key, anything else for an object. A `Layout`, or a function that gives one for the
    name and `Stored` of a tensor, may stand for all entries below its place, of which tensors
    without dims stay whole: a single one gives the whole checkpoint, in lists and in dicts with
    strings for keys, as torch's state dicts are; what was empty is not there. Each rank reads the
    pieces that have parts of its blocks, each once.

    All tensors are new. Raises one `CheckpointError` on all ranks, before anything is read, for
    whatever is missing, of another shape or dtype, or, where `strict`, left over; and for pieces
    that are not what was written, by their checksums.

    Files need no trust: nothing runs that they ask for, and they get memory by their size. Objects
    are plain Python values and tensors; to make others takes code of their types, so `objects` has
    the types that may be. `path` is a directory, or a `StorageReader` for other places, which reads
    in its own way: that of torch unpickles what it reads.

    >>> import tempfile
    >>> two, three = SimulatedComm(Mesh(x=2)), SimulatedComm(Mesh(x=3))
    >>> w = distribute(torch.arange(6), two.mesh.layout("x"), two)
    >>> with tempfile.TemporaryDirectory() as path:
    ...     fd.save_checkpoint({"w": w, "step": 10}, path, two)
    ...     state = fd.load_checkpoint(path, {"w": three.mesh.layout("x"), "step": 0}, three)
    >>> state["w"].local, state["step"]
    ((tensor([0, 1]), tensor([2, 3]), tensor([4, 5])), 10)
    """
    refuse_no_comm(comm)
    settled(comm)
    with of_paths(path, comm):
        prepared = together(
            "load_checkpoint",
            comm,
            lambda: _prepared(path, like, comm, strict, objects),
            _Prepared.same,
        )
    wanted, fresh = prepared.wanted, prepared.fresh
    if isinstance(path, StorageReader):
        names = list(prepared.names)
        values = read_elsewhere(path, prepared.listed, names, fresh, comm, objects)
    else:
        values = together("load_checkpoint", comm, lambda: _read(prepared, comm, objects))
    return wanted.filled({**values, **{name: x.value() for name, x in fresh.items()}})


@attrs.frozen
class _Prepared:
    """What is asked of a checkpoint, and the memory for it."""

    folder: Folder | None
    """None for a `StorageReader`."""
    listed: Catalog
    wanted: Request
    fresh: Mapping[str, Fresh]

    @property
    def names(self) -> Iterator[str]:
        """Those of objects."""
        return (name for name, asked in self.wanted.asked.items() if asked.stored is None)

    def same(self) -> str:
        """What tells one checkpoint from another: all ranks have to read the same one."""
        return f"load_checkpoint {self.folder and self.folder.digest}"


def _prepared(path: Any, like: Any, comm: Comm[Any], strict: bool, objects: Objects) -> _Prepared:
    """The request, checked against the files before memory is taken."""
    check_objects(objects)
    folder = None if isinstance(path, StorageReader) else folder_at(checked_path(path))
    listed = reader_catalog(path)[1] if folder is None else folder.catalog
    wanted = request(like, listed.contents, comm, strict, "the checkpoint")
    if folder is not None:
        folder.check_files(piece for name in wanted.asked for piece in listed.pieces[name])
    fresh = {n: Fresh.of(asked) for n, asked in wanted.asked.items() if asked.stored}
    return _Prepared(folder, listed, wanted, fresh)


def _read(prepared: _Prepared, comm: Comm[Any], objects: Objects) -> dict[str, Any]:
    if prepared.folder is None or not inside(comm):
        return dict.fromkeys(prepared.names)
    pieces: dict[str, Sequence[Piece]] = {n: prepared.listed.pieces[n] for n in prepared.names}
    for name, x in prepared.fresh.items():
        own = prepared.listed.pieces[name]
        pieces[name] = [piece for piece in own if x.needed(piece.box) is not None]
    return read(prepared.folder, pieces, prepared.fresh, objects)
