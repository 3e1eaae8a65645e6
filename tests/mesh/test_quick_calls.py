"""Calls of single functions that are known by their arguments: their results, and their notes."""

import random
import warnings
from unittest import mock

import pytest
import torch
from torch.utils._pytree import tree_flatten

from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.torch_private import profiling
from fdtensor.tensors.call import call
from fdtensor.tensors.calls.function import Spmd
from fdtensor.tensors.connect import connect
from fdtensor.tensors.distribution import distribute
from tests.tensors.test_by_op import ints

pytestmark = pytest.mark.mesh

MESH = Mesh(y=2, x=2)
LAYOUTS = [(), ("x",), (None, "y"), ("y", "x")]


def shifted(a, b):
    a.add_(1)  # shows in `b` where that is the same
    return a * b


def nested(a, b):
    return [a + b], b, a


def with_none(a, b):
    return a + b, None, [b, a]


CALLS = [
    lambda f, a, b: f(shifted, a, b),
    lambda f, a, b: f(shifted, a, a),
    lambda f, a, b: f(torch.sum, a, dim=0),
    lambda f, a, b: f(torch.sum, a, dim=1),
    lambda f, a, b: f(torch.sum, a, 1, keepdim=True),
    lambda f, a, b: f(torch.sum, a, dim=1, keepdim=True),
    lambda f, a, b: f(torch.sum, a, dtype=torch.float64),
    lambda f, a, b: f(torch.add, a, b),
    lambda f, a, b: f(torch.add, b, a),
    lambda f, a, b: f(torch.add, a, a),
    lambda f, a, b: f(torch.add, a, other=b),
    lambda f, a, b: f(torch.add, a, other=b, alpha=2),
    lambda f, a, b: f(torch.add, a, alpha=2, other=b),
    lambda f, a, b: f(torch.add, a, b, alpha=2.0),
    lambda f, a, b: f(torch.mul, a, 1),
    lambda f, a, b: f(torch.mul, a, 1.0),
    lambda f, a, b: f(torch.mul, a, True),
    lambda f, a, b: f(torch.clamp, a, min=3),
    lambda f, a, b: f(torch.clamp, a, max=3),
    lambda f, a, b: f(torch.clamp, a, min=b, max=a),
    lambda f, a, b: f(torch.where, a > b, a, b),
    lambda f, a, b: f(torch.cat, [a, b]),
    lambda f, a, b: f(torch.cat, [a, b], 1),
    lambda f, a, b: f(torch.cat, (b, a), dim=1),
    lambda f, a, b: f(torch.split, a, 3, 1),
    lambda f, a, b: f(torch.split, a, [2, 6], dim=1),
    lambda f, a, b: f(torch.unbind, a),
    lambda f, a, b: f(nested, a, b),
    lambda f, a, b: f(with_none, a, b),
    lambda f, a, b: f(torch.max, a, 0),
    lambda f, a, b: f(torch.max, a, dim=1),
    lambda f, a, b: f(torch.Tensor.to, a, torch.float64),
    lambda f, a, b: f(torch.Tensor.view, a, torch.Size([4, 2, 4])),
    lambda f, a, b: f(torch.Tensor.view, a, (4, 2, 4)),
    lambda f, a, b: f(torch.Tensor.view, a, 4, -1),
    lambda f, a, b: f(torch.Tensor.__getitem__, a, slice(1, 3)),
    lambda f, a, b: f(torch.Tensor.__getitem__, a, slice(1, None, 2)),
    lambda f, a, b: f(torch.Tensor.__getitem__, a, (..., slice(None, 5))),
    lambda f, a, b: f(torch.Tensor.__getitem__, a, (None, 2)),
    lambda f, a, b: f(torch.Tensor.__getitem__, a, 2),
    lambda f, a, b: f(torch.Tensor.contiguous, a, memory_format=torch.contiguous_format),
    lambda f, a, b: f(torch.zeros_like, a, device=torch.device("cpu")),
]


def plainly(fn, *args, **kwargs):
    return fn(*args, **kwargs)


def alike(ours, plain):
    """Whether results have the same structure, dtypes and numbers."""
    (leaves, spec), (wanted, wanted_spec) = tree_flatten(ours), tree_flatten(plain)
    full = [x if x is None else x.full().detach() for x in leaves]
    return spec == wanted_spec and all(
        a is b is None or (a.dtype == b.dtype and torch.equal(a, b))
        for a, b in zip(full, wanted, strict=True)
    )


def on_this_rank(seed, count):
    """The numbers of those of many calls, in a random order, whose results are not torch's."""
    warnings.simplefilter("ignore")  # of what is written to arguments
    draw, comm, wrong = random.Random(seed), connect(MESH), []
    for _ in range(count):
        i, grad = draw.randrange(len(CALLS)), draw.random() < 0.3
        fulls = [ints(4, 8, seed=draw.randrange(5)).float() for _ in range(2)]
        given = [distribute(x, MESH.layout(*draw.choice(LAYOUTS)), comm) for x in fulls]
        if grad:
            given = [x.requires_grad_() for x in given]
        with torch.set_grad_enabled(draw.random() < 0.8):
            both = [CALLS[i](call, *given) for _ in range(2)]  # the second is known
        plain = CALLS[i](plainly, *fulls)
        wrong += [i for ours in both if not alike(ours, plain)]
    return wrong


def test_results_are_those_of_torch_whatever_was_called_before(pool4):
    assert pool4.run(on_this_rank, 0, 200) == [[]] * 4


def known_on_this_rank():
    """How often calls take the long way: first, and then by each of the ways to write them."""
    warnings.simplefilter("ignore")
    comm, counts = connect(MESH), []
    a, b = (distribute(ints(4, 8, seed=s).float(), MESH.layout("x"), comm) for s in (0, 1))
    calls, way = [0], Spmd.__call__

    def counted(self, *args, **kwargs):
        calls[0] += 1
        return way(self, *args, **kwargs)

    with mock.patch.object(Spmd, "__call__", counted):
        for f in CALLS:
            f(call, a, b)
            calls[0] = 0
            f(call, a, b)
            counts.append(calls[0])
    return counts


def test_a_second_call_is_known_by_its_arguments(pool4):
    counts = pool4.run(known_on_this_rank)
    assert counts == [[0] * len(CALLS)] * 4


def notes_on_this_rank():
    """What the ledger has of a second call, and whether a profiler sees a third one."""
    comm = connect(MESH)
    a = distribute(ints(4, 8).float(), MESH.layout("x"), comm)
    call(torch.mul, a, 2)
    ledger = comm.plane.ledger((0, 1, 2, 3))
    before = ledger.number
    call(torch.mul, a, 2)
    counted, open_calls = ledger.number - before, ledger.number - ledger.done
    with torch.profiler.profile() as seen:
        call(torch.mul, a, 2)
        assert profiling()
    named = any(event.key == "fdtensor mul" for event in seen.key_averages())
    last = ledger.entries()[-1]
    return counted, open_calls, named, last[0] == ledger.number, last[-1] is not None


def test_brief_calls_are_counted(pool4):
    assert pool4.run(notes_on_this_rank) == [(1, 0, True, True, True)] * 4
