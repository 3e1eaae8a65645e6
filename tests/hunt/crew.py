"""`Child`: a process that draws and runs programs, so that a crash or hang is only told of."""

from __future__ import annotations

import multiprocessing
import warnings
from multiprocessing.connection import Connection
from typing import Any

import torch

from tests.hunt.generate import Extent, generated
from tests.hunt.records import Program
from tests.hunt.ways import Outcome, outcome

__all__ = ["Child"]


def _serve(pipe: Connection) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    pipe.send(None)
    while True:
        try:
            match pipe.recv():
                case ("draw", seed, number, extent):
                    pipe.send(generated(seed, number, extent))
                case ("run", program):
                    pipe.send(_told(program))
        except (EOFError, KeyboardInterrupt):
            return


def _told(program: Program) -> Outcome:
    """The outcome; an exception is one of the hunt itself."""
    try:
        found = outcome(program)
    except Exception as error:
        found = Outcome("hunt", f"{type(error).__name__}: {error}"[:300])
    if not _sound():
        return Outcome("poisoned", f"torch itself is broken afterwards; before: {found.text}"[:300])
    return found


def _sound() -> bool:
    """Whether torch is as it was: a program must not leave a mode on, or autograd broken."""
    try:
        leaf = torch.ones(2, requires_grad=True)
        (leaf * 2).sum().backward()
    except Exception:
        return False
    modes = torch._C._len_torch_dispatch_stack() + torch._C._len_torch_function_stack()
    plain = torch.get_default_dtype() is torch.float32 and torch.is_grad_enabled()
    return plain and not modes and not torch.is_autocast_enabled("cpu")


class Child:
    """One process at a time; where it takes longer than `seconds`, another takes its place."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.process, self.pipe = seconds, None, None

    def draw(self, seed: int, number: int, extent: Extent) -> Program | Outcome:
        """The program of a number."""
        return self._asked(("draw", seed, number, extent))

    def run(self, program: Program) -> Outcome:
        """What comes of a program."""
        return self._asked(("run", program))

    def _asked(self, question: Any) -> Any:
        pipe = self._ready()
        try:
            pipe.send(question)
            if pipe.poll(self.seconds):
                answer = pipe.recv()
                if isinstance(answer, Outcome) and answer.kind in ("poisoned", "hunt"):
                    self.close()
                return answer
        except (EOFError, BrokenPipeError, ConnectionResetError):
            assert self.process is not None
            self.process.join()
            code = self.process.exitcode
            self.close()
            return Outcome("crash", f"exit code {code}", error=f"exit code {code}")
        self.close()
        return Outcome("slow", f"more than {self.seconds:.0f} s", seconds=self.seconds)

    def _ready(self) -> Connection:
        if self.pipe is None:
            context = multiprocessing.get_context("spawn")
            self.pipe, theirs = context.Pipe()
            self.process = context.Process(target=_serve, args=(theirs,), daemon=True)
            self.process.start()
            theirs.close()
            self.pipe.recv()
        return self.pipe

    def close(self) -> None:
        """Ends the process."""
        if self.process is not None:
            self.process.kill()
            self.process.join()
        self.process, self.pipe = None, None
