"""Real ranks from a notebook, a script or a test: `local_cluster` keeps gloo processes up.

    cluster = fd.local_cluster(4)
    cluster.run(lambda: torch.arange(4) * cluster.rank)

It imports from `layouts` to `inspect`, and offers itself to users and to `testing`.
`local` is what the caller holds and `worker` what runs on a rank; `parcels` is what travels between
them, `processes` starts and ends ranks, `answers` waits for them, `output` merges what they print
and `failures` what they raise.
"""

from fdtensor.cluster.failures import WorkerError
from fdtensor.cluster.local import LocalCluster, local_cluster

__all__ = ["LocalCluster", "WorkerError", "local_cluster"]
