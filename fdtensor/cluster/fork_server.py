"""The fork server: a process that has torch imported, and forks the ranks of clusters.

A new interpreter needs seconds for its imports; a fork has them at once, in memory that all share.
A server has one environment, so that a rank begins as a new interpreter would.
"""

from __future__ import annotations

import atexit
import importlib
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from threading import Lock
from typing import IO

import attrs
import torch

from fdtensor.cluster.parcels import search_path

__all__ = ["Forked", "fork", "forked"]

_BOOT = (
    "import sys; sys.path[:] = {path}; "
    "from fdtensor.cluster.fork_server import forked; from fdtensor.cluster.worker import serve; "
    "serve(*forked({requests}))"
)

_SERVERS = 2
"""How many servers take turns: ranks of two hash strings each in its own way, as on a real mesh.

So code that has ranks go through a set of names, each in an order of its own, fails on them too.
"""

_TORCH_IMPORTS = "torch.fx.experimental.symbolic_shapes", "torch.distributed.tensor"
"""What torch imports for the first op on fake tensors: by a server, and not on each rank."""

_READ_LATE = "GLOO_SOCKET_IFNAME", "PYTEST_CURRENT_TEST"
"""Variables that nothing reads when it is imported: a rank sets them, and its server may differ."""


@attrs.define(eq=False)
class Forked:
    """A process that a server has forked, with the part of `subprocess.Popen` that ranks need."""

    pid: int
    stdout: IO[bytes] | None
    stderr: IO[bytes] | None
    _end: Connection
    """Where the server writes how the process ended."""
    returncode: int | None = None
    """As of a `Popen`; -9 where the server was gone first, for then nothing is known."""

    def poll(self) -> int | None:
        """The exit code, or None of a process that runs."""
        if self.returncode is None and self._end.poll():
            try:
                self.returncode = self._end.recv()
            except (EOFError, OSError):  # the server is gone
                self.returncode = None if self._runs() else -signal.SIGKILL
        return self.returncode

    def wait(self) -> int:
        """The exit code, once the process has ended; after `kill` where the server is gone."""
        if self.returncode is None:
            self._end.poll(None)
            code = self.poll()
            self.returncode = -signal.SIGKILL if code is None else code
        return self.returncode

    def kill(self) -> None:
        """Kills the process, if it runs."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def _runs(self) -> bool:
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        return True


@attrs.frozen(eq=False)
class _Server:
    """The caller's end of a server."""

    process: subprocess.Popen[bytes]
    requests: socket.socket


_Key = tuple[int, frozenset[tuple[str, str]]]

_servers: dict[_Key, list[_Server]] = {}
_retired: list[_Server] = []
"""Servers that fork no more; each ends with the last process that it has forked."""

_lock = Lock()


def fork(
    rank: int, fds: Sequence[int], path: Sequence[str], env: Mapping[str, str], catch: bool
) -> Forked | None:
    """A process of `env` and the search path `path` that serves `fds`; None if no server came up.

    With `catch`, what it prints comes here by pipes. The first call of an environment starts the
    servers of it, and retires those of another.
    """
    end, theirs = Pipe(duplex=False)
    outputs = [os.pipe() for _ in range(2)] if catch else []
    given = [*fds, *([write for _, write in outputs] or (1, 2)), theirs.fileno()]
    request = pickle.dumps((os.getcwd(), path, {k: env[k] for k in _READ_LATE if k in env}))
    try:
        with ExitStack() as sent:
            sent.enter_context(theirs)
            for _, write in outputs:
                sent.callback(os.close, write)
            with _lock, suppress(OSError):
                socket.send_fds(_ready(env)[rank % _SERVERS].requests, [request], given)
        pid = end.recv()
    except BaseException as error:
        for read, _ in outputs:
            os.close(read)
        end.close()
        if not isinstance(error, EOFError):
            raise
        with _lock:
            _retire()
        return None
    stdout, stderr = [open(read, "rb") for read, _ in outputs] or [None, None]  # noqa: SIM115
    return Forked(pid, stdout, stderr, end)


def _ready(env: Mapping[str, str]) -> list[_Server]:
    """The servers of this process and an environment: there are those of one at a time."""
    key = os.getpid(), frozenset((k, v) for k, v in env.items() if k not in _READ_LATE)
    if key not in _servers:
        _retire()
        _servers[key] = [_started(env) for _ in range(_SERVERS)]
    return _servers[key]


def _started(env: Mapping[str, str]) -> _Server:
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", _BOOT.format(path=search_path(), requests=theirs.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env=env,
            start_new_session=True,  # Ctrl-C reaches this process, which stops the others
        )
    return _Server(process, ours)


def _retire() -> None:
    for key in [key for key in _servers if key[0] == os.getpid()]:
        for server in _servers.pop(key):
            server.requests.close()
            _retired.append(server)
    _retired[:] = [server for server in _retired if server.process.poll() is None]


@atexit.register
def _end() -> None:
    _retire()
    for server in _retired:
        server.process.kill()
        server.process.wait()


def forked(requests: int) -> tuple[int, int]:
    """The life of a server: it returns in each process that it forks, with what that is to serve.

    It ends when the caller's end of the socket `requests` is closed.
    """
    for name in _TORCH_IMPORTS:
        importlib.import_module(name)
    calls = socket.socket(fileno=requests)
    wake, awake = os.pipe()
    for fd in (wake, awake):
        os.set_blocking(fd, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(awake)
    ends: dict[int, int] = {}
    sources: list[socket.socket | int] = [wake, calls]
    while calls in sources or ends:
        ready, _, _ = select.select(sources, [], [])
        if wake in ready:
            os.read(wake, 4096)
            _report(ends)
        if calls not in ready:
            continue
        request, fds, _, _ = socket.recv_fds(calls, 1 << 20, 5)
        if not request:
            sources.remove(calls)
            continue
        pid = os.fork()
        if not pid:
            calls.close()
            for fd in (wake, awake, *ends.values()):
                os.close(fd)
            _settle(request, fds)
            return fds[0], fds[1]
        ends[pid] = fds[4]
        for fd in fds[:4]:
            os.close(fd)
    os._exit(0)


def _report(ends: dict[int, int]) -> None:
    """Writes to the callers how those processes ended that have."""
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            pid, status = ended
            with suppress(OSError), Connection(ends.pop(pid), readable=False) as end:
                end.send(os.waitstatus_to_exitcode(status))


def _settle(request: bytes, fds: Sequence[int]) -> None:
    """Has a fork be as a new process: a session, streams, signals, random numbers of its own."""
    os.setsid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for fd, stream in zip(fds[2:4], (1, 2), strict=True):
        os.dup2(fd, stream)
        os.close(fd)
    directory, sys.path[:], variables = pickle.loads(request)
    os.chdir(directory)
    for name in _READ_LATE:
        os.environ.pop(name, None)
    os.environ.update(variables)
    torch.default_generator.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    with Connection(fds[4], readable=False) as end:
        end.send(os.getpid())
