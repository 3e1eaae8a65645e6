"""`shard_batches`: the batches of a loader as DTensors, of which each rank reads its own rows."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import length_hint
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from fdtensor.io.rows import Rows
from fdtensor.layouts.errors import LayoutError
from fdtensor.layouts.expected import no_argument, no_layout, whole_number
from fdtensor.layouts.kinds import is_iterable
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.record import integer
from fdtensor.layouts.signatures import named_arguments
from fdtensor.layouts.tree import flatten
from fdtensor.runtime.comm import Comm, refuse_no_comm
from fdtensor.runtime.interpreter import digest_of
from fdtensor.tensors.distribution import distribute

__all__ = ["Batches", "shard_batches"]


class Batches:
    """Batches of DTensors: one epoch for each time that it is iterated over.

    >>> mesh = Mesh(x=2)
    >>> whole = [torch.arange(4.0), torch.arange(3.0)]
    >>> batches = fd.io.shard_batches(whole, mesh.layout("x"), SimulatedComm(mesh))
    >>> isinstance(batches, fd.io.Batches), len(batches)
    (True, 2)
    >>> next(iter(batches)), batches.state_dict()["position"]
    (DTensor(f32[4@x] on Mesh(x=2)), 1)
    """

    def __init__(
        self, source: Any, layouts: Any, comm: Comm[Any], seed: int, prefetch: int
    ) -> None:
        self.source, self.layouts, self.comm = source, layouts, comm
        self.seed, self.prefetch = seed, prefetch
        self.epoch, self.position = 0, 0
        """How many epochs are over, and how many batches of this one."""
        self._rows: Rows | None = None

    def __len__(self) -> int:
        return len(self.source)

    def state_dict(self) -> dict[str, int]:
        """Where it is, to be saved with a checkpoint: the next batch comes after the last one."""
        return {"epoch": self.epoch, "position": self.position, "seed": self.seed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Goes on from where another one was, on any number of ranks."""
        hint = "Pass what state_dict() gives: an int for epoch, position and seed."
        try:
            epoch, position, seed = [integer(state[name]) for name in self.state_dict()]
        except (TypeError, LookupError, AttributeError, ValueError, RuntimeError):
            raise no_argument("state", state, "state of batches", hint) from None
        most = position
        if _has_rows(self.source) or isinstance(self.source, Sequence):  # others only guess theirs
            most = length_hint(self.source, position)
        if epoch < 0 or not 0 <= position <= most:
            raise no_argument("state", state, f"state of {most} batches", hint)
        self.epoch, self.position, self.seed = epoch, position, seed

    def __iter__(self) -> Iterator[Any]:
        given = self._from_rows if _has_rows(self.source) else self._from_whole
        try:
            for number, batch in given(self.position):
                self.position = number + 1
                yield batch
        except Exception as error:
            raise self.comm.failed(self._meshes(), error)  # noqa: B904 - the same error
        self.epoch, self.position = self.epoch + 1, 0

    def _from_whole(self, start: int) -> Iterator[tuple[int, Any]]:
        """Batches that every rank reads as a whole."""
        for number, batch in enumerate(self.source):
            if number >= start:
                yield number, distribute(batch, self.layouts, self.comm)

    def _from_rows(self, start: int) -> Iterator[tuple[int, Any]]:
        """Batches of which every rank reads its own rows."""
        loader = self.source
        batches = _batches(loader, self.seed + self.epoch)
        facts = f"shard_batches {batches!r} {start}"
        self.comm.agree("shard_batches", digest_of(facts), self._meshes(), None)
        if not batches[start:]:  # of an empty dataset there is no first sample
            return
        if self._rows is None:
            self._rows = Rows.of(loader, self.layouts, self.comm)
        rows, batches = self._rows, batches[start:]
        read = _reader(loader, rows.indices(batches))
        for number, (batch, local) in enumerate(
            zip(batches, _ahead(read, self.prefetch), strict=True), start
        ):
            yield number, rows.distributed(local, len(batch))

    def _meshes(self) -> list[Any]:
        return [*dict.fromkeys(layout.mesh for layout in flatten(self.layouts)[0])]


@named_arguments
def shard_batches(
    loader: Iterable[Any],
    layout: Any,
    comm: Comm[Any],
    *,
    seed: int = 0,
    prefetch: int = 2,
) -> Batches:
    """The batches of a loader as DTensors, of which each rank reads only its part.

    `layout` is one for all tensors of a batch or a prefix of its pytree; a batch has its samples
    along dim 0. Of a `DataLoader` with a map-style dataset each rank reads the samples of its own
    rows, in the order of `seed` and the epoch where the loader shuffles; its workers,
    `collate_fn` and `drop_last` are as they were, `prefetch` batches are read ahead, and the last
    batch may be uneven. So `collate_fn` sees the samples of a rank alone, and gives a row for each;
    and what a dataset draws at random is the same on ranks that hold the same rows only if their
    seeds are. Of any other iterable all ranks read all of each batch, which must be the same. All
    ranks agree on the samples of an epoch.

    `state_dict()` says where it is, also in the middle of an epoch, and `load_state_dict` goes on
    from there, on any number of ranks.

    >>> mesh = Mesh(x=2)
    >>> data = torch.utils.data.TensorDataset(torch.arange(10.0))
    >>> loader = torch.utils.data.DataLoader(data, batch_size=4)
    >>> batches = fd.io.shard_batches(loader, mesh.layout("x"), SimulatedComm(mesh))
    >>> [[x.type.shape[0] for x in batch] for batch in batches]
    [[4], [4], [2]]
    >>> batches.state_dict()
    {'epoch': 1, 'position': 0, 'seed': 0}
    """
    refuse_no_comm(comm)
    for leaf in flatten(layout)[0]:
        if not isinstance(leaf, Layout):
            raise no_layout(leaf)
        if leaf.partial:
            raise LayoutError(
                f"batches cannot be pending: {leaf}.", hint="Use Shard and Replicate for them."
            )
    if not is_iterable(loader):
        raise LayoutError(
            f"{type(loader).__name__} is no iterable of batches.",
            hint="Give a DataLoader, or any iterable of pytrees of tensors.",
        )
    ends = "Write an int, from -2**63 to 2**64 - 1."
    seed = whole_number("seed", seed, "seed", ends, -(2**63), 2**64 - 1)
    prefetch = whole_number("prefetch", prefetch, "number of batches", "Write 0 or more.", 0)
    return Batches(loader, layout, comm, seed, prefetch)


def _has_rows(loader: Any) -> bool:
    """Whether samples can be read one by one."""
    return (
        isinstance(loader, DataLoader)
        and not isinstance(loader.dataset, IterableDataset)
        and loader.batch_sampler is not None
    )


def _batches(loader: Any, seed: int) -> list[list[int]]:
    """The samples of each batch of an epoch."""
    sampler: Any = loader.sampler
    order: Sequence[int] = range(len(loader.dataset))
    shuffles = type(sampler) is RandomSampler and not sampler.replacement
    known = type(sampler) is SequentialSampler or (shuffles and sampler.num_samples == len(order))
    if loader.batch_size is None or not known:  # ranks compare what a sampler of its own draws
        return [list(batch) for batch in loader.batch_sampler]
    if shuffles:
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(order), generator=generator).tolist()
    size = loader.batch_size
    batches = [list(order[i : i + size]) for i in range(0, len(order), size)]
    return batches[:-1] if loader.drop_last and batches and len(batches[-1]) < size else batches


def _reader(loader: Any, batches: Sequence[Sequence[int]]) -> Iterable[Any]:
    """The loader for these samples alone."""
    workers: dict[str, Any] = {}
    if loader.num_workers:
        workers = {
            "prefetch_factor": loader.prefetch_factor,
            "multiprocessing_context": loader.multiprocessing_context,
            "worker_init_fn": loader.worker_init_fn,
            "timeout": loader.timeout,
        }
    return DataLoader(
        loader.dataset,
        batch_sampler=batches,  # type: ignore[arg-type]
        collate_fn=loader.collate_fn,
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
        **workers,
    )


def _ahead(read: Iterable[Any], count: int) -> Iterator[Any]:
    """What is read, up to `count` batches before it is asked for, by a thread."""
    if count < 1:
        yield from read
        return
    ready: queue.Queue[tuple[str, Any]] = queue.Queue(count)
    over = threading.Event()

    def put(kind: str, value: Any) -> None:
        waiting = True
        while waiting and not over.is_set():
            with contextlib.suppress(queue.Full):
                ready.put((kind, value), timeout=0.1)
                waiting = False

    def work() -> None:
        try:
            for batch in read:
                put("batch", batch)
                if over.is_set():
                    return
            put("end", None)
        except BaseException as error:
            put("error", error)

    threading.Thread(target=work, name="fdtensor batches", daemon=True).start()
    try:
        while True:
            kind, value = ready.get()
            if kind == "error":
                raise value
            if kind == "end":
                return
            yield value
    finally:
        over.set()
