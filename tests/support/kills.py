"""`python -m tests.support.kills FOLDER [STRIDE]`: saves that are killed at calls to the system.

A child saves until its n-th call of `open`, `write`, `fsync`, `replace` and so on, and ends there
without a word, as a process does that is killed. Prints JSON: for each scenario what was loaded
after each kill, or after each STRIDE-th, of which the last one came after the end.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import torch

import fdtensor as fd
from fdtensor.layouts.errors import CheckpointError
from fdtensor.layouts.mesh import Mesh
from fdtensor.runtime.simulator import SimulatedComm
from fdtensor.tensors.connect import distribute

__all__ = ["SCENARIOS", "loaded", "main"]

CALLS = {"open", "write", "flush", "fsync", "replace", "unlink", "mkdir", "rmdir", "close", "start"}
KILLED = 9

COMM = SimulatedComm(Mesh(x=2))


def tree(number: int) -> dict[str, object]:
    x = distribute(torch.full((64,), number), COMM.mesh.layout("x"), COMM)
    return {"x": x, "step": number}


def loaded(path: Path) -> str:
    """The number of the state at a path, "none" where there is none, or what is wrong with it."""
    try:
        found = fd.load_checkpoint(path, {"x": COMM.mesh.layout(), "step": 0}, COMM)
    except CheckpointError as error:
        return "none" if error.sentence.startswith("there is no checkpoint") else str(error)
    same = torch.equal(found["x"].full(), torch.full((64,), found["step"]))
    return str(found["step"]) if same else "a mixture"


def first(path: Path) -> None:
    fd.save_checkpoint(tree(2), path / "step_2", COMM)


def over(path: Path) -> None:
    fd.save_checkpoint(tree(2), path / "step_1", COMM, overwrite=True)


def kept(path: Path) -> None:
    fd.save_checkpoint(tree(2), path / "step_2", COMM, keep=1)


def behind(path: Path) -> None:
    saving = fd.save_checkpoint(tree(2), path / "step_1", COMM, overwrite=True, wait=False)
    assert saving is not None
    saving.wait()


SCENARIOS: dict[str, Callable[[Path], None]] = {
    "first": first,
    "over": over,
    "kept": kept,
    "behind": behind,
}


def killed(act: Callable[[Path], None], path: Path, at: int) -> bool:
    """Whether the process that acts was killed at its n-th call; False where it made fewer."""
    child = os.fork()
    if child == 0:
        left = [at]

        def watch(frame: object, event: str, arg: object) -> None:
            if event == "c_call" and getattr(arg, "__name__", "") in CALLS:
                left[0] -= 1
                if left[0] == 0:
                    os._exit(KILLED)

        threading.setprofile(watch)
        sys.setprofile(watch)
        act(path)
        sys.setprofile(None)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, KILLED), code
    return code == KILLED


def run(name: str, folder: Path, stride: int) -> list[dict[str, str]]:
    """What is there after a kill at each call of a scenario, and after saving once more."""
    outcomes = []
    while True:
        path = folder / f"{name}_{len(outcomes)}"
        path.mkdir()
        if name != "first":
            fd.save_checkpoint(tree(1), path / "step_1", COMM)
        ended = not killed(SCENARIOS[name], path, 1 + stride * len(outcomes))
        newest = fd.io.latest_checkpoint(path)
        latest = loaded(newest) if newest else "none"
        one, two = loaded(path / "step_1"), loaded(path / "step_2")
        if two == "none":
            SCENARIOS[name](path)
        after = fd.io.latest_checkpoint(path)
        files = [file.name for file in after.iterdir()] if after else []
        outcomes.append(
            {
                "step_1": one,
                "step_2": two,
                "latest": latest,
                "after": loaded(after) if after else "none",
                "files": str(len(files)),
            }
        )
        if ended:
            return outcomes


def main(argv: list[str]) -> int:
    torch.set_num_threads(1)
    folder, stride = Path(argv[0]), int(argv[1]) if len(argv) > 1 else 1
    print(json.dumps({name: run(name, folder, stride) for name in SCENARIOS}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
