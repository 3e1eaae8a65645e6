"""The command line as a user meets it."""

import json
import os
import subprocess
import sys

import pytest

from fdtensor import Layout, Mesh, Plan, Ragged, Shard, demo
from fdtensor.cli import main, parse_layout


def shell(*arguments: str, program=(sys.executable, "-m", "fdtensor")):
    env = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    return subprocess.run(
        [*program, *arguments], capture_output=True, text=True, timeout=300, env=env
    )


LARGE = ["plan", "--mesh", "a=2", "--dst", "R", "--shape"]
PLAN = ["plan", "--mesh", "dp=2,tp=4", "--shape", "8192,8192", "--dtype", "bf16"]


def test_without_arguments_it_says_what_it_can_do(capsys):
    assert main([]) == 0
    assert "python -m fdtensor demo" in capsys.readouterr().out


def test_plan_prints_the_plan_and_its_facts(capsys):
    assert main([*PLAN, "--src", "S(0),P(sum)", "--dst", "R,S(1)"]) == 0
    assert capsys.readouterr().out == PRINTED


def test_plan_prints_exact_bytes_on_request(capsys):
    assert main([*PLAN, "--src", "S(0),P(sum)", "--dst", "R,S(1)", "--exact"]) == 0
    out = capsys.readouterr().out
    assert all(
        text in out for text in ("  50331648 B", "bound    67108864 B", "peak     150994944 B")
    )


def test_plan_prints_json(capsys):
    assert main([*PLAN, "--src", "S(0),P(sum)", "--dst", "R,S(1)", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    found = Plan.from_json(json.dumps(data["plan"]))
    assert (data["received_bytes"], data["digest"]) == (found.received_bytes, found.digest)


def test_a_plan_may_go_to_another_mesh(capsys):
    more = ["--src", "[dp,tp]", "--dst", "S(0)", "--dst-mesh", "x=3", "--max-bytes", "200000000"]
    assert main([*PLAN, *more]) == 0
    assert "on Mesh(dp=2, tp=4) -> bf16[8192@x,8192] on Mesh(x=3)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "layout"),
    [
        ("S(0),P(sum)", ("dp", {"tp": "sum"})),
        ("[dp]{sum:tp}", ("dp", {"tp": "sum"})),
        ("[-,(tp,dp)]", (None, ("tp", "dp"), {})),
        ("[None, tp]", (None, "tp", {})),
        (" Shard(0) , Partial('sum') ", ("dp", {"tp": "sum"})),
    ],
)
def test_a_layout_is_written_per_axis_or_per_dim(text, layout):
    mesh = Mesh(dp=2, tp=4)
    *dims, partial = layout
    assert parse_layout(mesh, text) is mesh.layout(*dims, partial=partial)


@pytest.mark.parametrize("text", ["S(0, [3,5]), S(1)", "S(0,[3,5]),S(1)", "S(0, (3, 5)),S(1)"])
def test_a_ragged_placement_is_written_as_errors_write_it(text):
    mesh = Mesh(dp=2, tp=4)
    assert parse_layout(mesh, text) == Layout(mesh, [Ragged(0, (3, 5)), Shard(1)])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([*PLAN, "--src", "S(0),R", "--dst", "R,S(2)"], "mesh axis 'tp' shards dim 2"),
        ([*PLAN, "--src", "S(0),Q", "--dst", "R,R"], "'Q' is not a placement."),
        ([*PLAN, "--src", "S(0)", "--dst", "R,R"], "1 placements for a mesh that has 2 axes."),
        ([*PLAN, "--src", "[qp]", "--dst", "R,R"], "the mesh has no axis 'qp'."),
        (
            ["plan", "--mesh", "dp", "--shape", "8", "--src", "R", "--dst", "R"],
            "'dp' is not a mesh",
        ),
        (["plan", "--mesh", "a=2", "--shape", "x", "--src", "R", "--dst", "R"], "is not a shape"),
        ([*LARGE, "9" * 20, "--src", "R"], "has 2**63 bytes or more"),
        ([*LARGE, "9" * 9999, "--src", "R"], "is not a shape"),
        ([*LARGE, "9", "--src", "S(" + "9" * 9999 + ")"], "is not a placement"),
        (["plan", "--mesh", f"a={2**63}", "--shape", "9", "--src", "R", *LARGE[3:5]], "too large"),
        (["plan", "--mesh", "a=2"], "arguments are required: --shape, --src, --dst"),
        (["dance"], "invalid choice"),
        ([*PLAN, "--src", "R,R", "--dst", "R,R", "--dtype", "f7"], "'f7' is not a dtype."),
        ([*PLAN, "--src", "R,R", "--dst", "R,R", "--max-bytes", "7"], "no plan fits in 7 bytes"),
        (["demo", "--simulate", "dp=0"], "mesh axis 'dp' has size 0."),
        (["demo", "--simulate", "dp=2", "--mesh", "dp=2"], "--simulate has a mesh"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_bad_input_gets_one_sentence_and_status_2(arguments, sentence, capsys):
    try:
        status = main(arguments)
    except SystemExit as stop:
        status = stop.code
    said = capsys.readouterr()
    assert status == 2
    assert said.err.startswith("fdtensor: ")
    assert sentence in said.err
    assert said.out == ""


def test_the_demo_walks_a_simulated_mesh(capsys):
    assert main(["demo", "--simulate", "dp=2,tp=2", "--verbose"]) == 0
    out = capsys.readouterr().out
    assert "every block is right." in out
    used = {line.split("[")[0].strip() for line in out.split("\n") if line.startswith("  ")}
    every = {"slice", "mask", "pad", "scale", "all_gather", "all_to_all", "all_reduce"}
    assert every | {"reduce_scatter", "exchange"} <= used


def test_without_verbose_the_demo_prints_a_table_a_plan_and_a_picture(capsys):
    assert main(["demo", "--simulate", "dp=2,tp=2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 40
    assert lines[-1].endswith("every block is right.")
    assert sum(line.startswith(("i64[", "f64[")) for line in lines) == 5
    assert sum("+-----" in line for line in lines) == 3


def test_the_demo_fails_on_a_wrong_block(capsys, monkeypatch):
    right = demo.block
    monkeypatch.setattr(demo, "block", lambda *args: right(*args) + 1)
    assert main(["demo", "--simulate", "dp=2"]) == 1
    assert "has a wrong block of" in capsys.readouterr().out


TRAIN = ["train", "--steps", "2", "--layers", "1", "--width", "16", "--heads", "2", "--length", "8"]


def test_train_prints_a_summary_and_losses(capsys):
    assert main([*TRAIN, "--simulate", "--mesh", "dp=2,tp=2"]) == 0
    out = capsys.readouterr().out
    assert "train_step on Mesh(dp=2, tp=2): " in out
    assert "2 steps in " in out


@pytest.mark.mesh
def test_train_runs_on_the_processes_of_torchrun():
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
    done = shell(*TRAIN, "--mesh", "fsdp=2", program=(*torchrun, "-m", "fdtensor"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("2 steps in ") == 1


@pytest.mark.mesh
def test_the_demo_runs_on_processes_of_its_own():
    done = shell("demo", "-v")
    assert done.returncode == 0, done.stderr
    assert "right on 4 ranks" in done.stdout
    assert "every block is right." in done.stdout


@pytest.mark.mesh
def test_the_demo_runs_on_the_processes_of_torchrun():
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
    done = shell("demo", program=(*torchrun, "-m", "fdtensor"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("every block is right.") == 1


def test_importing_is_quick_to_load_little():
    code = (
        "import sys, fdtensor; print([m for m in ('hypothesis', 'rich', 'cloudpickle', "
        "'torch.distributed.tensor') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


PRINTED = """\
bf16[8192@dp,8192]{sum:tp} -> bf16[8192,8192@tp] on Mesh(dp=2, tp=4)
  reduce_scatter[axis=tp dim=1 reduce_op=sum]  bf16[8192@dp,8192@tp]  48 MiB
  all_gather[axis=dp dim=0]                    bf16[8192,8192@tp]     16 MiB
2 steps, 64 MiB received per rank
  bound    64 MiB
  peak     144 MiB
  seconds  0.00185 by the cost model 'nccl'
"""


@pytest.mark.parametrize("saved", [False, True])
def test_ctrl_c_is_told_in_a_line_with_where_to_go_on(saved, monkeypatch, capsys):
    def train(mesh, options):
        raise KeyboardInterrupt

    monkeypatch.setattr("fdtensor.train.command.train", train)
    more = ["--checkpoint", "kept"] if saved else []
    assert main(["train", "--mesh", "dp=2", *more]) == 130
    after = " The same command goes on from the last checkpoint in 'kept'." if saved else ""
    assert capsys.readouterr().err == f"fdtensor: interrupted.{after}\n"
