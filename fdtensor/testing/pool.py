"""`GlooPool`: a local cluster as tests want it, with a limit on time and without labels."""

from __future__ import annotations

from fdtensor.cluster.failures import WorkerError
from fdtensor.cluster.local import LocalCluster

__all__ = ["GlooPool", "WorkerError"]


class GlooPool(LocalCluster):
    """`n` gloo ranks, each a process with one torch thread, started by the first `run`.

    A `LocalCluster` whose calls may take `timeout` seconds, and whose ranks print as they are, onto
    the streams of this process. Ranks wait a minute for each other: by default a call may take
    three, so that what they say of each other comes first. `grace` is how many seconds the other
    ranks may go on when one has failed.

    >>> with fd.testing.GlooPool(2) as pool:
    ...     print(pool.run(lambda: connect(Mesh(x=2)).rank))
    [0, 1]
    """

    def __init__(self, n: int, *, timeout: float = 180.0, grace: float = 5.0) -> None:
        super().__init__(n, timeout=timeout, grace=grace, labels=False)
