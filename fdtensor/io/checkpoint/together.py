"""`together`: what every rank works out for itself, and where all fail if one does."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import attrs
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from fdtensor.layouts.errors import CheckpointError, CommError, FdtensorError
from fdtensor.layouts.torch_private import c10d_group
from fdtensor.runtime.comm import Comm, refuse_no_comm
from fdtensor.runtime.control.process import group_of, plane_of
from fdtensor.runtime.interpreter import digest_of

__all__ = ["gathered", "relayed", "storing", "together"]

T = TypeVar("T")
U = TypeVar("U")


def together(
    about: str, comm: Comm[Any], make: Callable[[], T], same: Callable[[T], str] | None = None
) -> T:
    """The result of `make` on this rank. Collective: where it raises on one rank, all ranks raise.

    A rank that has an error of its own raises that one, the others a `CheckpointError` about it.
    What `same` says of the result has to be the same on all ranks.
    """
    refuse_no_comm(comm)
    result: Any = None
    problem: Exception | None = None
    try:
        result = make()
    except Exception as error:
        problem = error
    try:
        text = same(result) if same and problem is None else about
        comm.agree(about, digest_of(text), [comm.mesh], _told(comm, problem))
    except CommError as error:
        if problem is None:
            raise CheckpointError(
                error.sentence,
                hint="All ranks must see the same files and ask for the same; the error of the "
                "rank that is named has the details.",
            ) from None
    if problem is not None:
        raise problem
    return result


def gathered(value: T, comm: Comm[Any]) -> list[T]:
    """The values of all ranks of a real Comm, in the order of ranks. Collective."""
    ranks = tuple(sorted(comm.mesh.order))
    values: list[Any] = [None] * len(ranks)

    def gather() -> None:
        dist.all_gather_object(values, value, group=_group(ranks))

    _noted(ranks, "a gather of what ranks have", gather)
    return values


def relayed(
    comm: Comm[Any], what: str, make: Callable[[], T], spread: Callable[[list[T]], Sequence[U]]
) -> U:
    """What comes to this rank of what the first rank spreads, of what every rank makes.

    `[a] [b] [c] -> spread([a, b, c]) -> [x] [y] [z]`, on the ranks of `comm` in their order. Where
    something raises on a rank, all ranks raise a `CheckpointError` that begins with `what`.
    """
    ranks = tuple(sorted(comm.mesh.order))
    if comm.rank is None or len(ranks) == 1:
        own = _tried(lambda: spread([make()])[0])
        return _settled({ranks[0]: own}, own, what)
    own = _tried(make)
    failed, value = _noted(ranks, f"wait: {what}", lambda: _relayed(ranks, own, spread))
    return _settled(failed, _Tried(value), what)


def _relayed(
    ranks: Sequence[int], own: _Tried, spread: Callable[[list[Any]], Sequence[Any]]
) -> tuple[dict[int, _Tried], Any]:
    """The ranks that failed, and what the first one has for this rank if none did."""
    group, first = _group(tuple(ranks)), ranks[0]
    made: list[Any] | None = [None] * len(ranks) if dist.get_rank() == first else None
    dist.gather_object(own, made, dst=first, group=group)
    out: list[Any] | None = None
    if made is not None:
        failed = {r: m for r, m in zip(ranks, made, strict=True) if m.problem is not None}
        spreading = _tried(lambda: spread([m.value for m in made])) if not failed else None
        if spreading is not None and spreading.problem is not None:
            failed = {first: spreading}
        values = spreading.value if spreading and not failed else [None] * len(ranks)
        out = [(failed, value) for value in values]
    box: list[Any] = [None]
    dist.scatter_object_list(box, out, src=first, group=group)
    return box[0]


def _noted(ranks: tuple[int, ...], what: str, function: Callable[[], T]) -> T:
    """The result of a function that waits for the other ranks, as a call that all ranks make."""
    return plane_of().ledger(ranks).noted(0, what, function)


@attrs.frozen
class _Tried:
    """The result of a call, or the words of what it raised."""

    value: Any = None
    problem: str | None = None


def _tried(make: Callable[[], Any]) -> _Tried:
    try:
        return _Tried(make())
    except Exception as error:
        told = error.sentence if isinstance(error, FdtensorError) else repr(error)
        return _Tried(problem=told)


def _settled(tried: Mapping[int, _Tried], own: _Tried, what: str) -> Any:
    problems = {f"rank {r}": t.problem for r, t in tried.items() if t.problem is not None}
    if problems:
        raise CheckpointError(
            f"{what}.", **problems, hint="Mend what each rank says of itself, and try again."
        )
    return own.value


def _told(comm: Comm[Any], problem: Exception | None) -> str | None:
    if problem is None:
        return None
    sentence = problem.sentence if isinstance(problem, FdtensorError) else repr(problem)
    return f"rank {comm.rank or 0}: {sentence.removesuffix('.')}"


@contextmanager
def storing(comm: Comm[Any], what: str) -> Iterator[dict[str, Any]]:
    """The arguments that let torch.distributed.checkpoint run on the ranks of a Comm.

    What it raises, on all ranks, becomes a `CheckpointError` that begins with `what`.
    """
    alone = comm.rank is None or comm.mesh.size == 1
    group = None if alone else _group(tuple(sorted(comm.mesh.order)))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        try:
            yield {"process_group": group, "no_dist": alone}
        except CheckpointException as failed:
            errors = {f"rank {r}": repr(error) for r, (error, _) in failed.failures.items()}
            raise CheckpointError(
                f"{what}.", **errors, hint="Mend what each rank says of itself, and try again."
            ) from failed


def _group(ranks: tuple[int, ...]) -> Any:
    return c10d_group(group_of(ranks))
