"""What takes long says so on a terminal or in a notebook, and nowhere else."""

import io
import os
import pty
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from fdtensor.layouts import progress
from fdtensor.layouts.progress import busy, now, working


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Screen:
    """Keeps the texts that it is to show, and whether it was cleared."""

    def __init__(self):
        self.texts, self.cleared, self.shown = [], False, threading.Event()

    def show(self, text):
        self.texts.append(text)
        self.shown.set()

    def clear(self):
        self.cleared = True


@pytest.fixture
def screens(monkeypatch):
    """Somebody watches, without patience; the screens that something was shown on."""
    used, some = [], threading.Semaphore(0)

    def screen():
        used.append(Screen())
        some.release()
        return used[-1]

    def wait():
        assert some.acquire(timeout=30)
        assert used[-1].shown.wait(30)
        return used[-1]

    monkeypatch.setattr(progress, "_screen", lambda: screen)
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    monkeypatch.setattr(progress, "EVERY", 0.001)
    return SimpleNamespace(used=used, wait=wait)


def test_what_takes_long_is_said_and_cleared(screens):
    with working("adding"):
        screen = screens.wait()
        assert not screen.cleared
    assert screen.texts[0] == "adding, 0 s"
    assert screen.cleared


def test_it_says_at_which_step_it_is(screens):
    with working("tracing"):
        screen = screens.wait()
        for step in ("first", "second"):
            now(step)
            screen.shown.clear()
            assert screen.shown.wait(30)
            screen.shown.clear()
            assert screen.shown.wait(30)
            assert screen.texts[-1] == f"tracing: {step}, 0 s"
    now("of nothing")


def test_what_is_short_is_silent(screens, monkeypatch):
    monkeypatch.setattr(progress, "PATIENCE", 60.0)
    with working("adding"):
        pass
    assert screens.used == []


def test_what_is_inside_is_silent(screens):
    with working("outside"), working("inside"):
        screens.wait()
    with busy(), working("busy"):
        pass
    assert [screen.texts[0] for screen in screens.used] == ["outside, 0 s"]
    assert not progress._SAID.locked()


def test_only_rank_0_on_a_terminal_is_watched(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    assert progress._screen() is None
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert progress._screen() is progress._Terminal
    monkeypatch.setenv("RANK", "1")
    assert progress._screen() is None
    with working("another rank"):
        assert not progress._SAID.locked()


@pytest.mark.parametrize("asks", [True, False])
def test_a_notebook_is_watched_where_it_can_ask(monkeypatch, asks):
    """What runs a file of cells takes no input."""
    monkeypatch.delenv("RANK", raising=False)
    drawn = []
    handle = SimpleNamespace(update=lambda data, raw: drawn.append(data))
    ipython = SimpleNamespace(
        get_ipython=lambda: SimpleNamespace(kernel=SimpleNamespace(_allow_stdin=asks)),
        display=SimpleNamespace(display=lambda data, raw, display_id: handle),
    )
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    with working("tracing"):
        while asks and not drawn:
            time.sleep(0.001)
    assert drawn == ([{"text/plain": "tracing, 0 s"}, {}] if asks else [])


def test_errors_end_it(screens):
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
