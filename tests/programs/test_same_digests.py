"""Programs are the same in each process, whatever the hashes and addresses of objects there."""

import os
import subprocess
import sys

import torch

from fdtensor import Mesh, TensorType, trace
from tests.support.programs import CASES, tensors_of

MESH = Mesh(x=2)
BOTH = Mesh(x=2, y=3)


def nested_branches(h, v):
    def inner(t):
        return torch.cond(t.sum() > 0, lambda u: (u @ (u.T @ u)) / 9, lambda u: u + v, (t,))

    return torch.cond(h.sum() > 1000, lambda t: t * 2, inner, (h,)).sum()


def gradient_of_branches(h, v):
    return torch.func.grad(nested_branches, (0, 1))(h, v)


def programs():
    """Programs of all kinds, with dims that are cut where they can be."""
    h = TensorType((63, 16), torch.float64, MESH.layout(None, "x"))
    v = TensorType((16,), torch.float64, MESH.layout())
    yield "gradient of branches", trace(gradient_of_branches, h, v)
    for i, (name, case) in enumerate(CASES.items()):
        tensors = tensors_of(case, dict.fromkeys(case.names, 4))
        yield name, traced(case, tensors, [MESH.layout(*["x"] * (t.ndim > 0)) for t in tensors])
        if i % 4 == 0:
            layouts = [BOTH.layout(*["x", "y"][: t.ndim]) for t in tensors]
            yield f"{name} on two axes", traced(case, tensors, layouts)


def traced(case, tensors, layouts):
    pairs = zip(tensors, layouts, strict=True)
    return trace(case.f, *[TensorType(tuple(t.shape), t.dtype, at) for t, at in pairs])


def test_another_process_has_the_same_programs():
    told = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", __name__],
        env={**os.environ, "PYTHONHASHSEED": "7", "FDTENSOR_CACHE": "off"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert told == [f"{name} {program.digest}" for name, program in programs()]


def test_no_line_runs_under_a_predicate_and_its_contrary():
    _, program = next(programs())
    conditions = [line.rpartition("  if ")[2].split(" and ") for line in str(program).splitlines()]
    assert any("not" in c or len(c) > 1 for c in conditions)
    assert all(f"not {one}" not in both for both in conditions for one in both)


if __name__ == "__main__":
    for name, program in programs():
        print(name, program.digest)
