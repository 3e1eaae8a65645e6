"""The bench of computing, in little: what it runs, counts and shows; never how long it takes."""

import json
from collections.abc import Iterator
from io import StringIO

import attrs
import optree
import pytest
import torch
from rich.console import Console
from torch.distributed.tensor import DTensor as TorchDTensor

from fdtensor.testing.pool import GlooPool
from tests.bench import compute, main, planning
from tests.bench.compute import Effort, Found, measure
from tests.bench.compute_checks import LOOKUPS
from tests.bench.compute_ops import OPS
from tests.bench.compute_trace import MESHES
from tests.bench.compute_ways import WAYS
from tests.bench.models import BLOCK, MLP, MODELS, Module
from tests.bench.timing import interleaved, once

EFFORT = Effort(rounds=1, calls=1, steps=1, layers=1)

PENDING = {"mm", "linear", "layer_norm"}
"""The ops whose backward reduces the gradients of weights, together or each by itself."""


@pytest.fixture(scope="module")
def alone() -> Iterator[GlooPool]:
    with GlooPool(1) as pool:
        yield pool


@pytest.fixture(scope="module")
def found(alone: GlooPool) -> Found:
    return measure(alone, EFFORT)


@pytest.mark.deep
@pytest.mark.mesh
def test_every_op_is_measured_with_and_without_its_backward(found):
    assert [row.op for row in found.ops] == [op.name for op in OPS]
    for row in found.ops:
        assert (row.both is None) == (row.first_both is None) == (row.op == "detach")


@pytest.mark.deep
@pytest.mark.mesh
def test_gradients_of_weights_are_reduced_and_nothing_else_is_sent(found):
    assert {row.op for row in found.ops if row.collectives[0]} == PENDING
    assert {row.collectives[1] for row in found.ops} == {0}


@pytest.mark.deep
@pytest.mark.mesh
def test_every_step_is_measured_in_every_way(found):
    wanted = [(model.name, way) for model in MODELS for way in WAYS]
    assert [(row.model, row.way) for row in found.steps] == wanted
    assert all(row.to_local == 1 for row in found.steps if row.way == "local")


@pytest.mark.deep
@pytest.mark.mesh
@pytest.mark.parametrize(("model", "by_hand"), [("mlp", 2), ("block", 4)])
def test_no_way_has_fewer_collectives_than_megatron_and_programs_no_more(found, model, by_hand):
    counts = {row.way: row.collectives for row in found.steps if row.model == model}
    assert counts.pop("local") == 0
    for way in ("eager", "make_fx", "program", "to_fx", "spmd grad", "spmd"):
        assert counts.pop(way) == by_hand, way
    assert min(counts.values()) >= by_hand


@pytest.mark.deep
@pytest.mark.mesh
def test_a_program_has_about_the_ops_of_the_blocks_of_one_rank(found):
    ops = {(row.model, row.way): row.ops for row in found.steps}
    for model in MODELS:
        assert ops[model.name, "program"] <= 1.1 * ops[model.name, "local"]


@pytest.mark.deep
@pytest.mark.mesh
def test_a_look_at_indices_takes_one_collective_at_most(found):
    assert [row.op for row in found.checks] == [lookup.name for lookup in LOOKUPS]
    assert all(0 <= after - before <= 1 for before, after in (r.collectives for r in found.checks))


@pytest.mark.deep
@pytest.mark.mesh
def test_every_mesh_is_traced(found):
    assert [row.mesh for row in found.traces] == [repr(mesh) for mesh in MESHES]
    for row in found.traces:
        assert row.layers == 1
        assert row.eqns > row.collectives > 0


@pytest.mark.deep
@pytest.mark.mesh
def test_tables_have_a_row_for_everything_and_it_goes_to_json(found):
    console = Console(width=200, file=StringIO())
    with console.capture() as shown:
        compute.show(console, found)
    lookups = (lookup.name for lookup in LOOKUPS)
    for name in (*(op.name for op in OPS), *WAYS, *map(repr, MESHES), *lookups):
        assert name in shown.get()
    assert json.loads(json.dumps(attrs.asdict(found)))["ops"][0]["op"] == "detach"


@pytest.mark.mesh
@pytest.mark.parametrize("number", range(len(MODELS)))
def test_all_ways_give_blocks_of_the_same_shapes(alone, number):
    def shapes(number: int) -> dict[str, list[tuple[int, ...]]]:
        planning.pretend(0, 4)
        model = MODELS[number]
        return {name: _shapes(way(model)()) for name, way in WAYS.items()}

    [made] = alone.run(shapes, number, timeout=300)
    wanted = made["local"]
    assert len(wanted) == len(MODELS[number].shapes) + 1
    assert {name: found for name, found in made.items() if found != wanted} == {}


@pytest.mark.parametrize("model", MODELS)
def test_the_module_is_the_function(model):
    module, x = Module(model), torch.randn(model.x)
    assert {n: tuple(p.shape) for n, p in module.named_parameters()} == model.shapes
    with torch.no_grad():
        torch.testing.assert_close(module(x), model.forward(dict(module.named_parameters()), x))


def test_one_rank_holds_a_quarter_of_what_is_sharded():
    assert MLP.local_shape("up.weight", 4) == (32, 32)
    assert MLP.local_shape("down.bias", 4) == (32,)
    assert BLOCK.local_shape("out.weight", 4) == (64, 16)


def test_calls_take_turns_and_one_round_does_not_count():
    seen: list[str] = []
    calls = {"a": lambda: seen.append("a"), "b": lambda: seen.append("b")}
    taken = interleaved(calls, 2, 2)
    assert "".join(seen) == "aabbbbaaaabb"
    assert {name: len(us) for name, us in taken.items()} == {"a": 2, "b": 2}
    once(calls["a"])
    assert len(seen) == 13


def test_no_rounds_are_refused(capsys):
    assert main(["compute", "--rounds", "0"]) == 2
    assert capsys.readouterr().err == "fdtensor: --rounds takes a count, 1 or more.\n"


def _shapes(made: object) -> list[tuple[int, ...]]:
    """The shapes of what a step gives, but for the loss, sorted."""
    leaves = optree.tree_leaves(made, namespace="fdtensor")
    blocks = [leaf.to_local() if isinstance(leaf, TorchDTensor) else leaf for leaf in leaves]
    return sorted(tuple(block.shape) for block in blocks if block.dim())
