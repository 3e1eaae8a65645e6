"""`save_checkpoint`: a pytree of DTensors as a checkpoint of `torch.distributed.checkpoint`."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import attrs
import torch
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageWriter

from fdtensor.io.checkpoint.background import Saving, settled
from fdtensor.io.checkpoint.folder import METADATA
from fdtensor.io.checkpoint.names import Leaf, hides_a_tensor, named, with_words
from fdtensor.io.checkpoint.names import Path as Keys
from fdtensor.io.checkpoint.one_path import one_path
from fdtensor.io.checkpoint.same import differences
from fdtensor.io.checkpoint.shares import Pieces, Planner, shared_out
from fdtensor.io.checkpoint.siblings import check_keep
from fdtensor.io.checkpoint.stored import checked_path
from fdtensor.io.checkpoint.together import relayed, storing, together
from fdtensor.io.checkpoint.write import Job, Span, new_directory
from fdtensor.layouts.errors import CheckpointError, FdtensorError, ValueTreeError
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.opaque import opaque
from fdtensor.layouts.placement import Replicate
from fdtensor.layouts.signatures import named_arguments
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.layouts.words import a_kind
from fdtensor.runtime.comm import Comm, inside, refuse_no_comm
from fdtensor.tensors.connect import redistribute
from fdtensor.tensors.dtensor import DTensor

__all__ = ["OnDifference", "save_checkpoint"]

OnDifference = Literal["error", "warn", "ignore"]
"""The response where ranks differ in values that are said to be replicated."""

SHOWN = 12
"""How many entries an error names."""


@opaque
@named_arguments
def save_checkpoint(
    tree: Any,
    path: Any,
    comm: Comm[Any],
    *,
    overwrite: bool = False,
    on_difference: OnDifference = "error",
    keep: int | None = None,
    wait: bool = True,
    sync_files: bool = True,
) -> Saving | None:
    """Writes a pytree of DTensors, plain tensors and other objects as a checkpoint at `path`.

    Collective over the ranks of `comm`; on a simulated one this process writes everything. The
    names are those that `torch.distributed.checkpoint` gives a state dict of the same dicts and
    lists, so that `dcp.load` reads it. Pending terms are reduced first. Each block is written once,
    by one of the ranks that hold it, without a copy of the whole. Plain tensors and objects are
    written by one rank too, random keys as their words. Ranks may have entries that others lack.

    Replicas, and what is no DTensor, are compared by fingerprints of their bits before anything is
    written, which takes one look at their memory. Where ranks that have an entry differ in it, as
    they do in the state of an optimizer of torch on local tensors, `on_difference` says whether
    that is an "error" on all ranks, is to "warn", or is to "ignore", which compares nothing.

    A checkpoint appears whole or not at all, and one that is overwritten is there until then. Each
    piece has a checksum, which is looked at when it is read. Where `sync_files`, as in torch, all
    is on the disk before the checkpoint appears. With `keep=3` and paths such as `run/step_000100`
    the newest 3 that differ in the number alone are left, and older ones deleted.

    With `wait=False` the local tensors are copied, and written while the ranks go on; the result
    is a `Saving`, whose `wait()` waits for the rest. So do the next save and the next load on these
    ranks, which raise what went wrong.

    `path` is a directory, or a `StorageWriter` for other places, which writes in its own way.
    Raises `CheckpointError` where there is a checkpoint already, unless `overwrite`, or ranks
    differ, and `ValueTreeError` for a pytree that has a name twice or leaves that cannot be stored.

    >>> import tempfile
    >>> mesh = Mesh(x=2)
    >>> comm = SimulatedComm(mesh)
    >>> x = distribute(torch.arange(4), mesh.layout("x"), comm)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     fd.io.save_checkpoint({"x": x}, folder + "/step", comm)
    ...     print(fd.io.checkpoint_contents(folder + "/step"))
    x  i64[4]
    1 entry, 32 B of tensors
    """
    refuse_no_comm(comm)
    if on_difference not in get_args(OnDifference):
        raise CheckpointError(
            f"on_difference={on_difference!r} is no option.",
            hint=f"Write on_difference= one of {', '.join(map(repr, get_args(OnDifference)))}.",
        )
    settled(comm)
    about = "save_checkpoint"
    one_path(about, path, comm)
    options = _Options(overwrite, keep, wait, sync_files)
    leaves = together(about, comm, lambda: _checked(tree, path, comm, options))
    values = {leaf.name: leaf.value for leaf in leaves}
    pending = {n: x for n, x in values.items() if isinstance(x, DTensor) and x.layout.partial}
    values |= redistribute(pending, {name: _reduced(x.type) for name, x in pending.items()})
    if not inside(comm):
        return None
    if on_difference != "ignore":
        _compared(values, comm, on_difference)
    state = {n: Pieces.of(x) if isinstance(x, DTensor) else x for n, x in values.items()}
    paths = {leaf.name: leaf.path for leaf in leaves}
    what = f"the checkpoint at {_place(path)} was not written"
    if isinstance(path, StorageWriter):
        with storing(comm, what) as ranks:
            save(state, storage_writer=path, planner=Planner(paths), **ranks)
        return None
    return _written(Path(path), state, paths, comm, what, options)


@attrs.frozen
class _Options:
    """How a checkpoint is written."""

    overwrite: bool
    keep: int | None
    wait: bool
    sync_files: bool


def _written(
    folder: Path,
    state: Mapping[str, Any],
    paths: Mapping[str, Keys],
    comm: Comm[Any],
    what: str,
    options: _Options,
) -> Saving | None:
    """Writes the directory, or begins to."""

    def begin() -> None:
        new_directory(folder, options.sync_files)

    share, whole = shared_out(state, paths, comm, what, begin)
    job = Job(folder, share, whole, options.keep, options.sync_files)
    if not options.wait:
        job = attrs.evolve(job, share=together("save_checkpoint", comm, share.copied))
        return Saving(job, comm, what)

    def finish(spans: Sequence[Sequence[Span]]) -> Sequence[None]:
        job.finish(spans)
        return [None] * len(spans)

    try:
        relayed(comm, what, job.write, finish)
    except FdtensorError:
        job.clean()
        raise
    return None


# --- what is wrong ---------------------------------------------------------------------------


def _checked(tree: Any, path: Any, comm: Comm[Any], options: _Options) -> list[Leaf]:
    """The named leaves of a pytree that can be stored."""
    if not isinstance(path, StorageWriter):
        checked_path(path)
    check_keep(path, options.keep)
    if isinstance(path, StorageWriter):
        if not options.wait:
            raise CheckpointError(
                f"{a_kind(path)} cannot write in the background.",
                hint="Pass a directory, or leave wait=True.",
            )
    elif not options.overwrite and (Path(path) / METADATA).exists():
        raise CheckpointError(
            f"there is a checkpoint at {str(path)!r} already.",
            hint="Save to another directory, or pass overwrite=True.",
        )
    leaves = [with_words(leaf) for leaf in named(tree)[0]]
    problems: dict[str, str] = {}
    seen: dict[str, Leaf] = {}
    for leaf in leaves:
        other = seen.setdefault(leaf.name, leaf)
        twice = f"is the name of {other.path} and of {leaf.path}" if other is not leaf else None
        problem = twice or _problem(leaf, comm)
        if problem is not None:
            problems[leaf.name or "tree"] = problem
    if problems:
        raise ValueTreeError(
            f"{len(problems)} of {len(leaves)} leaves cannot be stored.",
            **problems,
            hint="A leaf is a DTensor, a tensor or an object that can be pickled.",
        )
    return leaves


def _compared(values: Mapping[str, Any], comm: Comm[Any], on_difference: OnDifference) -> None:
    """Raises or warns where ranks differ in what they claim to hold alike."""
    unlike = differences(values, comm)
    if not unlike:
        return
    shown = dict(list(unlike.items())[:SHOWN])
    if len(unlike) > len(shown):
        shown["..."] = f"{len(unlike) - len(shown)} more"
    error = CheckpointError(
        f"{len(unlike)} of {len(values)} entries are not the same on all ranks that have them, and "
        "one rank's would be kept.",
        **shown,
        hint="Distribute what each rank has a part of (the state of fdtensor.optim is), name what "
        'each has of its own by rank, or keep one with on_difference="ignore".',
    )
    if on_difference == "error":
        raise error
    warnings.warn(str(error), stacklevel=3)


def _problem(leaf: Leaf, comm: Comm[Any]) -> str | None:
    value = leaf.value
    if not leaf.path:
        return "has no name: pass a dict"
    if isinstance(value, (Layout, TensorType)):
        return f"is {a_kind(value)}, not a value"
    stateful = hasattr(value, "state_dict") and hasattr(value, "load_state_dict")
    if stateful and not isinstance(value, DTensor):
        return f"is {a_kind(value)}: pass its state_dict()"
    if hides_a_tensor(value):
        return f"is {a_kind(value)} that holds a DTensor: write a dict, list, tuple or dataclass"
    plain = type(value) in (torch.Tensor, torch.nn.Parameter)
    if plain and (value.is_nested or value.is_meta or value.layout is not torch.strided):
        return f"is a tensor without plain memory: {value.device}, {value.layout}"
    if not isinstance(value, DTensor):
        return None
    if (value.comm.rank is None) != (comm.rank is None):
        return f"is on {value.comm!r}, not on ranks of {comm!r}"
    return value.comm.mistake(value.local, value.type)


def _place(path: Any) -> str:
    return repr(str(path)) if isinstance(path, (str, os.PathLike)) else type(path).__name__


def _reduced(type: TensorType) -> Layout:
    """The layout in which terms are reduced: every partial axis cuts the longest dim."""
    layout = type.layout
    longest = max(range(len(type.shape)), key=lambda d: type.shape[d], default=None)
    for axis in layout.partial:
        layout = layout.placed(axis, Replicate())
        layout = layout if longest is None else layout.split(axis, longest)
    return layout
