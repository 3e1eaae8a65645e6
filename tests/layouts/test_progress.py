"""What takes long says so on a terminal, and nowhere else."""

import io
import os
import pty
import subprocess
import sys
import threading

import pytest

from fdtensor.layouts import progress
from fdtensor.layouts.progress import busy, working


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def watched(monkeypatch):
    """Somebody watches, without patience; the spinners that were started."""
    started = []

    class Spinner(progress._Spinner):
        def start(self):
            super().start()
            started.append(self.what)
            slow.set()

    slow = threading.Event()
    monkeypatch.setattr(progress, "_watched", lambda: True)
    monkeypatch.setattr(progress, "_Spinner", Spinner)
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    return started, slow


def test_what_takes_long_is_said(watched):
    started, slow = watched
    with working("adding"):
        assert slow.wait(30)
    assert started == ["adding"]


def test_what_is_inside_is_silent(watched):
    started, slow = watched
    with working("outside"), working("inside"):
        assert slow.wait(30)
    with busy(), working("busy"):
        pass
    assert started == ["outside"]
    assert not progress._SAID.locked()


def test_only_rank_0_on_a_terminal_is_watched(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    assert not progress._watched()
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert progress._watched()
    monkeypatch.setenv("RANK", "1")
    assert not progress._watched()
    with working("another rank"):
        assert not progress._SAID.locked()


def test_errors_end_it(watched):
    with pytest.raises(ZeroDivisionError), working("dividing"):
        1 / 0  # noqa: B018
    assert not progress._SAID.locked()


def test_a_trace_says_so_on_a_real_terminal():
    code = """
import time, torch, fdtensor as fd
from fdtensor.layouts import progress
progress.PATIENCE = 0.0
mesh = fd.Mesh(dp=2)
def slowly(x):
    time.sleep(1.5)
    return x + 1
print(fd.trace(slowly, fd.TensorType((4,), torch.float32, mesh.layout("dp"))).received_bytes)
"""
    ours, theirs = pty.openpty()
    out = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=theirs, check=True, text=True
    )
    os.close(theirs)
    said = b""
    try:
        while part := os.read(ours, 65536):
            said += part
    except OSError:  # the end, on Linux
        pass
    os.close(ours)
    assert out.stdout == "0\n"
    assert b"tracing slowly" in said
