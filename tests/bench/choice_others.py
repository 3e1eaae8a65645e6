"""`Others`: the bytes that others receive where they cut a case: a textbook, PyTorch and JAX."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import attrs

from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.tensor_type import TensorType
from tests.bench.choice_cases import Case, case_of
from tests.bench.choice_textbook import textbook
from tests.bench.choice_torch import by_torch

__all__ = ["Others", "others"]

MOST_DEVICES = 1024
"""XLA is not asked to pretend more."""


@attrs.frozen
class Others:
    """The bytes of each; a text says why there are none."""

    textbook: int
    torch: int | str
    jax: int | str


def others(name: str, number: int, jax: str | None) -> Others:
    """What others receive in a case on one of its meshes; `jax` is the Python that has JAX.

    Pretends a process group that the process keeps.
    """
    case, mesh = case_of(name, number)
    return Others(textbook(case, mesh), by_torch(case, mesh), by_jax(case, mesh, jax))


def by_jax(case: Case, mesh: Mesh, python: str | None) -> int | str:
    """The bytes that a rank receives with JAX, or why it is not asked."""
    if python is None:
        return "JAX is not there; --jax PYTHON names a Python that has it."
    if mesh.size > MOST_DEVICES:
        return f"XLA is asked to pretend at most {MOST_DEVICES} devices."
    params, *rest = case.types(mesh)
    parts = params if isinstance(params, list) else [params]
    args = [[{n: _plain(t) for n, t in p.items()} for p in parts], *map(_plain, rest)]
    text = json.dumps({"axes": mesh.axes, "sizes": mesh.sizes, "args": args})
    file = Path(__file__).with_name("choice_jax.py")
    done = subprocess.run([python, str(file), text], capture_output=True, text=True, check=False)
    return int(done.stdout) if not done.returncode else (done.stderr.splitlines() or ["?"])[-1]


def _plain(type: TensorType) -> list[Any]:
    """A shape, a dtype by the name that numpy gives it, and the axes that cut each dim."""
    axes = [
        [a for a, p in zip(type.mesh.axes, type.layout.placements) if getattr(p, "dim", None) == d]
        for d in range(len(type.shape))
    ]
    return [type.shape, str(type.dtype).removeprefix("torch."), axes]
