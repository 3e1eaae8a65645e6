"""The processes of ranks on this machine: started together, and ended with what they started."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import attrs

from fdtensor.cluster.fork_server import Forked, fork
from fdtensor.cluster.parcels import search_path

__all__ = ["Worker", "ended", "start", "stop"]

_BOOT = (
    "import sys; sys.path[:] = {path}; "
    "from fdtensor.cluster.worker import serve; serve({calls}, {lifeline})"
)

_FORKS = sys.platform == "linux"
"""Whether a process with torch imported may be forked: libraries of macOS forbid it."""


@attrs.frozen
class Worker:
    """A process that is a rank: its calls and answers, and a pipe that closes with this process."""

    process: subprocess.Popen[bytes] | Forked
    pipe: Connection
    lifeline: Connection


def start(workers: list[Worker], n: int, threads: int, env: Mapping[str, str], catch: bool) -> None:
    """Starts `n` processes into `workers`; with `catch`, what they print comes here.

    Their sockets are on the loopback, unless `env` names another interface.
    """
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
    env = {
        **os.environ,
        "GLOO_SOCKET_IFNAME": loopback,
        "OMP_NUM_THREADS": str(threads),
        **env,
    }
    forks = _FORKS
    for rank in range(n):
        ours, theirs = Pipe()
        child_end, lifeline = Pipe(duplex=False)
        with theirs, child_end:
            fds = [theirs.fileno(), child_end.fileno()]
            process = fork(rank, fds, search_path(), env, catch) if forks else None
            forks = process is not None
            process = process or _interpreter(fds, env, catch)
        workers.append(Worker(process, ours, lifeline))
        for file in (process.stdout, process.stderr):
            if file is not None:
                os.set_blocking(file.fileno(), False)


def _interpreter(fds: list[int], env: Mapping[str, str], catch: bool) -> subprocess.Popen[bytes]:
    """A new interpreter that serves `fds`; if it cannot start, it says why on its streams."""
    output = subprocess.PIPE if catch else None
    return subprocess.Popen(
        [sys.executable, "-c", _BOOT.format(path=search_path(), calls=fds[0], lifeline=fds[1])],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        pass_fds=fds,
        env=env,
        start_new_session=True,  # Ctrl-C reaches this process, which stops the others
    )


def stop(workers: list[Worker], owner: int) -> None:
    """Ends the processes, if `owner` is this process and not the one that it was forked from."""
    if os.getpid() != owner:
        return
    for worker in workers:
        _kill(worker.process)
    for worker in workers:
        worker.process.wait()
        worker.pipe.close()
        worker.lifeline.close()
        for file in (worker.process.stdout, worker.process.stderr):
            if file is not None:
                file.close()
    workers.clear()


def ended(process: subprocess.Popen[bytes] | Forked) -> str:
    """How a process ended that has closed its pipe, in a few words."""
    _kill(process)  # no effect on one that is gone
    code = process.wait()
    if code >= 0:
        return f"exited with {code}"
    name = signal.Signals(-code).name
    return f"died of {name}" + (" (out of memory?)" if name == "SIGKILL" else "")


def _kill(process: subprocess.Popen[bytes] | Forked) -> None:
    """Kills a process and what it has started."""
    if process.returncode is None:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except OSError:
            process.kill()
