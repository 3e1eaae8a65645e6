"""`fail_together`: a block of code whose errors are those of all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fdtensor.layouts.opaque import opaque
from fdtensor.runtime.comm import Comm, refuse_no_comm
from fdtensor.runtime.digests import digest_of

__all__ = ["fail_together"]


@opaque
@contextmanager
def fail_together(comm: Comm[Any]) -> Iterator[None]:
    """A block, or as a decorator a function, that all ranks of a Comm leave together.

    What one of them raises in it, such as the reader of a file, is raised there, and is at once a
    `CommError` on the others, in the block too. A script that catches errors and goes on needs it:
    ranks of which only one has gone on by itself are at different calls from then on. On a
    simulated mesh it changes nothing. Collective over `comm.mesh`: at its end ranks wait for each
    other, and are compared as `full` does it.

    >>> comm = connect(Mesh(x=2))
    >>> with fail_together(comm):
    ...     x = distribute(torch.ones(4), comm.mesh.layout("x"), comm)
    """
    refuse_no_comm(comm)
    about = "the end of a block that fails together"
    try:
        yield
        comm.agree(about, digest_of(about), [comm.mesh], None)
    except BaseException as error:
        raise comm.failed([comm.mesh], error)  # noqa: B904 - the same error, of which others hear
