"""The bench on tiny tensors: what it counts, checks and shows; never how long something takes."""

import io
import json
import multiprocessing
from collections.abc import Iterator

import attrs
import pytest
import torch
import torch.distributed as dist
from rich.console import Console

from fdtensor.testing.pool import GlooPool, WorkerError
from tests.bench import choice, estimates, main, overlap, pipelines, simulated, tables, training
from tests.bench.cases import CASES
from tests.bench.choice_cases import CASES as CASES_OF_CHOICE
from tests.bench.choice_cases import LAYERED
from tests.bench.choice_others import others
from tests.bench.command import Effort, Found, measure
from tests.bench.count import Received
from tests.bench.hand import HAND
from tests.bench.overhead import OVERHEADS
from tests.support.depth import times

SIZE = (16, 24)
EFFORT = Effort(((SIZE, 1),), tries=1, sample=2, graph_seconds=0.01, calls=1, axes=(1, 2))

NAMES = [case.name for case in CASES]


@pytest.fixture(scope="module")
def alone() -> Iterator[GlooPool]:
    with GlooPool(1) as pool:
        yield pool


@pytest.fixture(scope="module")
def found(pool4: GlooPool, alone: GlooPool) -> Found:
    return measure(pool4, alone, EFFORT)


@pytest.mark.mesh
def test_every_case_is_measured_and_right_for_all_three(found):
    assert [row.case for row in found.traffic] == NAMES
    assert all(row.equal for row in found.traffic)


@pytest.mark.mesh
def test_the_best_way_by_hand_is_one_of_those_that_were_tried(found):
    for row in found.traffic:
        assert list(row.candidates) == [way.__name__ for way in HAND[row.case]]
        assert row.hand in row.candidates


@pytest.mark.mesh
def test_fdtensor_receives_what_it_announces_and_no_more_than_dtensor(found):
    for row in found.traffic:
        assert row.bound_bytes <= row.fdtensor_bytes == row.announced_bytes <= row.dtensor_bytes


@pytest.mark.mesh
def test_movement_is_at_the_bound(found):
    for row in found.traffic:
        if "P" not in row.case:
            assert row.fdtensor_bytes == row.bound_bytes, row.case


@pytest.mark.mesh
def test_the_bytes_of_dtensor_are_those_of_its_collectives(found):
    whole, row = 16 * 24 * 4, {row.case: row for row in found.traffic}
    bytes_of = {name: row[name].dtensor_bytes for name in NAMES}
    assert bytes_of["S0->R"] == bytes_of["S0->S1"] == bytes_of["P->S0"] == whole * 3 // 4
    assert bytes_of["S0->S1 uneven"] == whole * 3 // 4  # 15x21, padded to 16x24
    assert bytes_of["P->R"] == whole * 3 // 2
    assert bytes_of["R->S0"] == 0
    assert row["S0->R"].ops["dtensor"] == ("all_gather_into_tensor",)


@pytest.mark.mesh
def test_planning_is_measured_for_all_axes_and_dims(found):
    assert [(row.axes, row.dims) for row in found.planning] == [(1, 2), (1, 4), (2, 2), (2, 4)]
    for row in found.planning:
        assert row.fdtensor.count == row.greedy.count == EFFORT.sample
        assert row.graph is not None
        assert 1 <= row.graph.count <= EFFORT.sample
    assert len(found.million) == 6


@pytest.mark.mesh
def test_overhead_is_measured_with_messages_and_with_named_collectives(found):
    names = [case.name for case in OVERHEADS]
    assert [(row.case, row.cost) for row in found.overhead] == [
        *((name, "gloo") for name in names),
        *((name, "nccl") for name in names),
    ]
    plans = {(row.case, row.cost): row.plan for row in found.overhead}
    assert plans["S0->S0", "gloo"] == plans["S0->S0", "nccl"] == ()
    assert plans["S0->R", "gloo"] == ("exchange[axis=x way=all_to_all]",)
    assert plans["S0->R", "nccl"] == ("all_gather[axis=x dim=0]",)


@pytest.mark.mesh
def test_tables_have_a_row_for_everything(found):
    for make, rows in (
        (tables.traffic_table, found.traffic),
        (tables.planning_table, found.planning),
        (tables.million_table, found.million),
        (tables.overhead_table, found.overhead),
    ):
        table = make(rows)
        assert table.row_count == len(rows)
        console = Console(width=250, record=True, quiet=True)
        console.print(table)


@pytest.mark.mesh
def test_what_was_found_goes_to_json(found):
    text = json.dumps(attrs.asdict(found))
    assert json.loads(text)["traffic"][0]["case"] == "S0->R"


@pytest.mark.mesh
def test_an_unknown_collective_is_not_counted_as_nothing(pool4):
    def broadcast() -> None:
        with Received():
            dist.broadcast(torch.zeros(1), 0)

    with pytest.raises(WorkerError, match="the bytes of broadcast_ are not known"):
        pool4.run(broadcast)


@pytest.mark.parametrize("argv", [[], ["computing"], ["redistribute", "--rounds", "many"]])
def test_bad_arguments_are_refused(argv, capsys):
    with pytest.raises(SystemExit) as error:
        main(argv)
    assert error.value.code == 2
    assert "usage: python -m tests.bench" in capsys.readouterr().err


def test_no_rounds_are_refused(capsys):
    assert main(["redistribute", "--rounds", "0"]) == 2
    assert capsys.readouterr().err == "fdtensor: --rounds takes a count, 1 or more.\n"


def test_the_choice_bench_shows_each_program():
    effort = choice.Effort((("MLP, gradient", 1),))
    found = choice.measure(effort)
    (row,) = found.programs
    assert (row.mesh, row.collectives > 0) == ("dp=2, tp=4", True)
    assert row.others.textbook == row.others.torch == row.received_bytes == 33_554_432
    assert 0 <= row.exposed <= 1
    console = Console(width=200, record=True)
    choice.show(console, found)
    text = console.export_text()
    assert text.count("33.6") == 5
    assert "JAX is not there; --jax PYTHON names a Python that has it." in text


def test_the_textbook_and_torch_agree_on_a_layer_of_llama():
    for number in (1, 3):
        with multiprocessing.get_context("spawn").Pool(1) as process:
            found = process.apply(others, (CASES_OF_CHOICE[1].name, number, None))
        assert found.torch == pytest.approx(found.textbook, rel=1e-3)


@pytest.mark.mesh
def test_the_estimate_bench_runs_each_step(pool4):
    found = estimates.measure(pool4, estimates.Effort(calibrations=1, calls=1, scale=16))
    assert [row.case for row in found.steps] == list(estimates.CASES)
    assert all(once.estimated > 0 for row in found.steps for once in row.times)
    console = Console(width=200, record=True)
    estimates.show(console, found)
    assert "MLP step, FSDP" in console.export_text()


@pytest.mark.mesh
def test_the_overlap_bench_runs_its_programs(pool4):
    found = overlap.measure(pool4, overlap.Effort(overlap.SMALL[-1:], calls=1))
    assert [row.cost for row in found.overlaps] == ["nccl", "h100"]
    assert all(row.after <= row.before for row in found.overlaps)
    console = Console(width=200, record=True)
    overlap.show(console, found)
    assert "4 gloo processes" in console.export_text()


@pytest.mark.mesh
def test_the_pipeline_bench_runs_all_schedules(pool4):
    found = pipelines.measure(pool4, pipelines.Effort(width=8, rows=32, calls=1))
    assert [row.schedule for row in found.steps] == list(pipelines.SCHEDULES)
    assert all(row.difference < 1e-6 for row in found.steps)  # the losses of both
    console = Console(width=200, record=True)
    pipelines.show(console, found)
    assert "4 gloo processes" in console.export_text()


@pytest.mark.mesh
@pytest.mark.filterwarnings("ignore::UserWarning:transformers.*")
def test_the_training_bench_goes_as_one_process_does(pool4):
    pytest.importorskip("transformers")
    meshes = training.MESHES[: times(2, 3)]
    effort = training.Effort(width=32, layers=1, length=16, batch=4, calls=4, meshes=meshes)
    found = training.measure(pool4, effort)
    assert [row.mesh for row in found.trained] == [repr(mesh) for mesh in meshes]
    assert all(row.apart < 1e-4 and row.torchs_apart < 1e-4 for row in found.trained)
    console = Console(width=200, record=True)
    training.show(console, found)
    assert "tokens a second on 4 gloo processes" in console.export_text()


def test_the_choice_bench_knows_each_case_by_its_name():
    names = [case.name for case in (*CASES_OF_CHOICE, *LAYERED)]
    assert len(set(names)) == len(names)


def test_the_simulator_bench_takes_many_ranks():
    effort = simulated.Effort((simulated.Size(2, 2), simulated.Size(4, 2)), reducing=16, rounds=1)
    found = simulated.measure(effort)
    assert [b.size for b in found.blocks] == list(effort.sizes)
    console = Console(file=io.StringIO(), width=120)
    simulated.show(console, found)
    shown = console.file.getvalue()
    assert "LocalTensorMode" in shown
    assert "reduce_scatter" in shown
