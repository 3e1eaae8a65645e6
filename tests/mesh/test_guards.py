"""A function that is called again and again, of which anything may have changed since."""

import random
import warnings
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from torch.utils._pytree import tree_map, tree_map_only

from fdtensor.layouts.mesh import Mesh
from fdtensor.tensors.calls import function, guard
from fdtensor.tensors.calls.function import flatten
from fdtensor.tensors.connect import connect
from fdtensor.tensors.distribution import distribute
from fdtensor.tensors.dtensor import DTensor
from fdtensor.tensors.spmd import spmd
from tests.tensors.test_by_op import ints

pytestmark = pytest.mark.mesh

MESH = Mesh(y=2, x=2)
SETTINGS = {
    "none": nullcontext,
    "no_grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


def function_of(closed):
    """A function that reads all of its arguments, the order of dicts, and what it closes over."""

    def f(tree, scale, *pair, mode="sum", extra=None):
        total = 0
        parts = tree.items() if isinstance(tree, dict) else enumerate(tree)
        for place, (name, part) in enumerate(parts):
            total = total + (place + 1) * len(str(name)) * part
        if isinstance(tree, list):
            total = total * 2
        if pair:
            pair[0].add_(1)  # shows in what is the same tensor
            total = total + pair[-1] * 3
        total = total * scale * closed["factor"] + closed["some"][0]
        if closed["module"].training:
            total = total + 1
        if extra is not None:
            total = total + extra @ torch.full((8, 8), 77.0)
        if isinstance(scale, float):
            total = total.double()
        return {"total": total, "kind": mode, "some": [total.sum(0), (total + 1,), None]}

    return f


def variants(a, b, c, last, other, tracked):
    """A call, and others that differ from it in one thing: arguments, and settings of torch."""
    named = {"extra": c, "mode": "sum"}
    trees = [
        {"b": b, "a": a},
        {"a": b, "b": a},
        {"a": a, "long": b},
        {"a": a, "b": other},
        {"a": a, "b": tracked},
        {"a": a, "b": b, "long": other},
        [a, b],
        (a, b),
    ]
    tree = {"a": a, "b": b}
    calls = [((tree, 1), named, setting) for setting in SETTINGS]
    calls += [((some, 1), named, "none") for some in trees]
    calls += [((tree, scale), named, "none") for scale in (2, True, 2.0)]
    calls += [((trees[4], 1), named, "no_grad")]
    calls += [((tree, 1, some), named, "none") for some in (last, a, other)]
    calls += [((tree, 1, last, some), named, "none") for some in (last, other)]
    calls += [
        ((tree, 1), {"mode": "other", "extra": c}, "none"),
        ((tree, 1), {"extra": None}, "none"),
    ]
    return [
        *calls,
        ((tree, 1), {"extra": c}, "no_grad"),
        (({"a": a, "b": tracked}, 1), {}, "no_grad"),
    ]


def on_this_rank(seed, count):
    """Those of many calls whose results are not torch's; and how many were known by a guard."""
    warnings.simplefilter("ignore")
    draw, comm, wrong, guarded = random.Random(seed), connect(MESH), [], 0
    closed = {"factor": 1, "some": [1, 2], "module": torch.nn.Dropout()}
    f = function_of(closed)
    g = spmd(f)
    some = [distribute(ints(4, 8, seed=s).float(), MESH.layout("x"), comm) for s in range(5)]
    pool = [*some[:4], some[1].redistribute(MESH.layout(None, "y")), some[4].requires_grad_()]
    plain = {id(x): x.full().detach().requires_grad_(x.requires_grad) for x in pool}
    calls = variants(*pool)
    for i in range(count):
        change = draw.random()
        if change < 0.02:
            closed["factor"] = draw.choice([1, 2])
        elif change < 0.025:
            closed["some"][0] = draw.choice([1, 5])
        elif change < 0.03:
            closed["module"].train(not closed["module"].training)
        args, named, setting = draw.choice(calls)
        looks = []

        def counted(*given, looks=looks, **options):
            looks.append(1)
            return flatten(*given, **options)

        many = mock.patch.object(guard, "_GUARDS", 1000)
        with many, mock.patch.object(function, "flatten", counted), SETTINGS[setting]():
            got = g(*args, **named)
        guarded += not looks
        copies = {key: x.clone() for key, x in plain.items()}
        own = tree_map_only(DTensor, lambda x, copies=copies: copies[id(x)], (args, named))
        with SETTINGS[setting]():
            want = f(*own[0], **own[1])
        if [*got] != [*want] or got["kind"] != want["kind"] or got["some"][2] is not None:
            wrong.append((i, "structure"))
        pairs = [(got["total"], want["total"]), (got["some"][0], want["some"][0])]
        for a, b in [*pairs, (got["some"][1][0], want["some"][1][0])]:
            if a.requires_grad != b.requires_grad or a.dtype != b.dtype:
                wrong.append((i, setting, str(a.dtype), a.requires_grad))
            elif not torch.equal(a.full(), b):
                wrong.append((i, setting))
    return wrong, guarded


def test_a_guard_lets_nothing_through_that_has_changed(pool4):
    for wrong, guarded in pool4.run(on_this_rank, 0, 300):
        assert wrong == []
        assert guarded > 100


def steps_on_this_rank():
    """How often a training step takes the whole look, and what it gives, beside op by op."""
    comm, looks = connect(MESH), []
    rows = MESH.layout("x")
    weights = [distribute(ints(8, 8, seed=s).double(), rows, comm) for s in range(3)]
    params = {"first": weights[:2], "last": weights[2]}
    x = distribute(ints(4, 8, seed=4).double(), rows, comm)

    def loss(params, x):
        for weight in params["first"]:
            x = torch.relu(x @ weight) % 7
        return (x @ params["last"]).sum()

    def step(params, x, rate):
        grads = torch.func.grad(loss)(params, x)
        return tree_map(lambda p, g: (p - rate * g) % 5, params, grads)

    def counted(*args, **kwargs):
        looks.append(len(counts))
        return flatten(*args, **kwargs)

    full = tree_map(lambda p: p.full(), params)
    counts, ours = [], spmd(step, out_layouts=tree_map(lambda p: rows, params))
    with mock.patch.object(function, "flatten", counted):
        for i in range(6):
            counts.append(i)
            params, full = ours(params, x, 1), step(full, x.full(), 1)
    same = [torch.equal(params["last"].full(), full["last"])]
    same += [torch.equal(p.full(), f) for p, f in zip(params["first"], full["first"], strict=True)]
    return sorted(set(looks)), all(same)


def test_a_training_step_is_known_from_its_third_call_on(pool4):
    for looks, same in pool4.run(steps_on_this_rank):
        assert same
        assert looks == [2]  # the first one admits nodes instead
