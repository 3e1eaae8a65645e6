"""Meshes that overlap: after errors on some of them, all ranks go on, on whichever comes next."""

import itertools
import random

import pytest
import torch

from fdtensor import Mesh, call, connect, distribute

SUBSETS = [s for k in (2, 3, 4) for s in itertools.combinations(range(4), k)]
FULL = torch.arange(144.0).view(12, 12)


def computed(op, mesh, comm):
    x = distribute(FULL, mesh.layout("x"), comm, check="never")
    match op:
        case "gather":
            y = x.redistribute(mesh.layout())
        case "exchange":
            y = x.redistribute(mesh.layout(None, "x")).redistribute(mesh.layout())
        case "sum":
            y = call(torch.sum, x).redistribute(mesh.layout())
        case _:
            ones = distribute(torch.ones(12, 2), mesh.layout(), comm, check="never")
            y = call(torch.matmul, x, ones).redistribute(mesh.layout())
    return y.local.sum().item()


def steps(seed, count):
    """What this rank gets of each call on a mesh that it is on, and whether a rank failed there."""
    draw, comm = random.Random(seed), connect(Mesh(all=4))
    told = []
    for _ in range(count):
        ranks = draw.choice(SUBSETS)
        failing = draw.choice(ranks) if draw.random() < 0.3 else None
        op = draw.choice(["gather", "exchange", "sum", "matmul"])
        if comm.rank not in ranks:
            continue
        mesh = Mesh.from_ranks(list(ranks), "x")
        try:
            if failing == comm.rank:
                raise comm.failed([mesh], ValueError("on purpose"))
            result = computed(op, mesh, comm)
        except Exception as error:
            result = str(error)
        told.append((failing, op, result))
    return told


@pytest.mark.parametrize("seed", range(3))
def test_calls_after_an_error_are_right_on_every_mesh(pool4, seed):
    for told in pool4.run(steps, seed, 25, timeout=540):
        for failing, op, result in told:
            if failing is None:
                assert result == FULL.sum() * (2 if op == "matmul" else 1)
            else:
                assert "on purpose" in result
