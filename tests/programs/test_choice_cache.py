"""Choices kept on disk: the same ones are read again, and no file gives anything but a choice."""

import contextlib
import fcntl
import json
import os
import stat
import time
from importlib.metadata import requires
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch.library import custom_op

from fdtensor import Mesh, Ragged, Shard, TensorType, like, rule, trace
from fdtensor.cost import GLOO, NCCL
from fdtensor.errors import FdtensorError
from fdtensor.layouts.json_fields import Malformed, parsed
from fdtensor.layouts.remembered import forget
from fdtensor.ops.notation import core
from fdtensor.programs import choice_cache, together
from fdtensor.programs.choice_text import decode
from tests.support.audit import nothing_runs
from tests.support.depth import times
from tests.support.mutants import mutants
from tests.support.programs import CASES, Setting, checked, settings_of, traced

MESH = Mesh(dp=2, tp=2)
kept_anew = settings(
    phases=[Phase.generate], suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The folder of a test, where all choices are kept, however little time they took."""
    monkeypatch.setattr(choice_cache, "OF_OTHERS", set())  # other tests register rules
    monkeypatch.setenv("FDTENSOR_CACHE", str(tmp_path))
    monkeypatch.setattr(together, "LONG", -1.0)
    return tmp_path / "choices"


@pytest.fixture
def chosen(monkeypatch):
    """The calls of graphs that were chosen, not read."""
    calls = []
    choose = together._chosen
    monkeypatch.setattr(
        together, "_chosen", lambda joint, axes: calls.append(joint) or choose(joint, axes)
    )
    return calls


def mlp(mesh=MESH, n=64, f=torch.relu, dtype=torch.float32, **options):
    x = TensorType((n, 32), dtype, mesh.layout("dp"))
    w = TensorType((32, 32), dtype, mesh.layout(None, "tp"))
    return trace(lambda x, w: (f(x @ w) @ w.T).sum(0), x, w, **options)


def has_ragged(program):
    """Whether a call was chosen on blocks of listed sizes."""
    taken = [o for choice in program.origin.choices.values() for o in choice.calls]
    return any(isinstance(p, Ragged) for o in taken for p in (*o.ins, *o.outs))


@kept_anew
@given(setting=st.sampled_from(sorted(CASES)).flatmap(settings_of))
def test_what_is_read_is_what_was_chosen(setting, chosen):
    forget()
    first = traced(setting)
    del chosen[:]
    forget()
    second = traced(setting)
    assert not chosen or has_ragged(first)  # rows for ragged blocks depend on what else is open
    assert str(second) == str(first)
    assert str(second.explain()) == str(first.explain())


@pytest.mark.parametrize("name", ["gradients", "attention", "cross_entropy", "sort", "convolution"])
def test_three_axes_and_their_order_are_kept(name, chosen):
    mesh, sizes = Mesh(a=2, b=2, c=2), dict.fromkeys(CASES[name].names, 16)
    count = len(CASES[name].takes.split(","))
    layouts = tuple([mesh.layout(("a", "c"))] * count)
    setting = Setting(name, sizes, mesh, layouts, NCCL, (None,) * count)
    first = checked(setting)
    del chosen[:]
    assert str(checked(setting)) == str(first)
    assert not chosen


def test_free_layouts_are_kept(chosen):
    x = TensorType((64, 32), torch.float32, MESH.layout("dp"))
    w = TensorType((32, 32), torch.float32, layout="free")
    first, second = (trace(torch.matmul, x, w) for _ in range(2))
    assert len(chosen) == 1
    assert first.in_types == second.in_types


def test_another_question_is_another_choice(chosen):
    mlp()
    asked = [
        lambda: mlp(n=65),
        lambda: mlp(dtype=torch.float64),
        lambda: mlp(f=torch.tanh),
        lambda: mlp(mesh=Mesh(tp=2, dp=2)),
        lambda: mlp(mesh=Mesh(dp=2, tp=2, links={"dp": "infiniband"})),
        lambda: mlp(mesh=Mesh.from_ranks([[0, 2], [1, 3]], ("dp", "tp"))),
        lambda: mlp(cost=GLOO),
        lambda: mlp(choice="follow"),
        lambda: mlp(deterministic=True),
        lambda: mlp(out_layouts=MESH.layout("tp")),
        lambda: mlp(f=lambda x: x * 2),
        lambda: mlp(f=lambda x: x * 2.0),
    ]
    for ask in asked:
        del chosen[:]
        ask()
        assert chosen
        del chosen[:]
        ask()
        assert not chosen


def test_every_process_gives_a_choice_the_same_name(gloo_ranks, folder):
    mlp()
    (file,) = folder.iterdir()

    def on_a_rank(name):
        before, os.environ["FDTENSOR_CACHE"] = os.environ["FDTENSOR_CACHE"], name
        together.LONG = -1.0
        try:
            mlp()
        finally:
            together.LONG = 0.1
            os.environ["FDTENSOR_CACHE"] = before

    def hashed():
        return hash("a name")

    ranks = gloo_ranks(2)
    assert len(set(ranks.run(hashed))) == 2, "this test sees nothing"
    ranks.run(on_a_rank, str(folder.parent))
    assert list(folder.iterdir()) == [file]


def test_ranks_of_a_machine_choose_once(gloo_ranks, folder):
    def on_a_rank(name):
        before, os.environ["FDTENSOR_CACHE"] = os.environ["FDTENSOR_CACHE"], name
        choose, calls = together._chosen, []

        def slow(joint, axes):
            calls.append(axes)
            time.sleep(1.0)
            return choose(joint, axes)

        together.LONG, together._chosen = -1.0, slow
        try:
            torch.distributed.barrier()
            return str(mlp()), len(calls)
        finally:
            together.LONG, together._chosen = 0.1, choose
            os.environ["FDTENSOR_CACHE"] = before

    texts, counts = zip(*gloo_ranks(4).run(on_a_rank, str(folder.parent)), strict=True)
    assert sorted(counts) == [0, 0, 0, 1]
    assert set(texts) == {str(mlp())}
    assert len(list(folder.iterdir())) == 1, "a lock was left"


def test_what_another_process_does_not_end_is_chosen(monkeypatch, folder, chosen):
    monkeypatch.setattr(choice_cache, "PATIENCE", 0.1)
    mlp()
    (file,) = folder.iterdir()
    file.unlink()
    with file.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        mlp()
        assert len(chosen) == 2
    file.unlink()
    mlp()
    assert len(chosen) == 3


def test_a_folder_without_locks_is_one_for_each_to_choose(monkeypatch, folder, chosen):
    def none(*_):
        raise OSError("no locks")

    monkeypatch.setattr(fcntl, "flock", none)
    mlp(), mlp()
    assert len(chosen) == 1


def test_a_choice_of_other_versions_is_not_read(chosen, monkeypatch):
    mlp()
    monkeypatch.setattr(choice_cache, "_versions", lambda: "others")
    mlp()
    assert len(chosen) == 2


def test_what_takes_no_time_is_not_kept(monkeypatch, folder):
    monkeypatch.setattr(together, "LONG", 60.0)
    mlp()
    assert not list(folder.iterdir())


@pytest.mark.parametrize("off", ["off", "OFF", "0", ""])
def test_one_variable_turns_it_off(off, monkeypatch, tmp_path, chosen):
    monkeypatch.setenv("FDTENSOR_CACHE", off)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    mlp(), mlp()
    assert len(chosen) == 2
    assert not list(tmp_path.rglob("*.json"))


def test_the_folder_is_that_of_caches_and_no_one_elses(monkeypatch, tmp_path):
    monkeypatch.delenv("FDTENSOR_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    mlp()
    (file,) = (tmp_path / "cache" / "fdtensor" / "choices").iterdir()
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_folder_that_cannot_be_written_keeps_nothing(monkeypatch, tmp_path, chosen):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FDTENSOR_CACHE", str(tmp_path / "file"))
    mlp(), mlp()
    assert len(chosen) == 2


@pytest.mark.parametrize("few", [False, True])
def test_files_that_nobody_reads_go_first(few, monkeypatch, folder):
    mlp()
    (first,) = folder.iterdir()
    mlp(n=65)
    (second,) = set(folder.iterdir()) - {first}
    for i, file in enumerate((second, first)):
        os.utime(file, (1000 + i, 1000 + i))
    mlp(n=65)  # reads the second: the first is the older one now
    if few:
        monkeypatch.setattr(choice_cache, "MOST_FILES", 3)  # with the lock of the third
    else:
        monkeypatch.setattr(choice_cache, "MOST_BYTES", 2 * second.stat().st_size)
    mlp(n=66)
    assert second.exists()
    assert not first.exists()


def test_what_rules_of_others_decide_is_not_kept(monkeypatch, folder):
    for registry in ("_RULES", "OF_OTHERS"):
        monkeypatch.setattr(core, registry, type(getattr(core, registry))(getattr(core, registry)))
    monkeypatch.setattr(choice_cache, "OF_OTHERS", core.OF_OTHERS)
    core.OF_OTHERS.clear()
    tripled = custom_op("test_choice_cache::tripled", lambda x: x * 3, mutates_args=(), schema=ONE)
    tripled.register_fake(torch.empty_like)
    rule(tripled)(lambda x: [((Shard(0),), Shard(0))])
    mlp(f=tripled)
    assert not folder.exists()
    mlp(f=torch.relu)
    assert len(list(folder.iterdir())) == 1
    rule(torch.ops.aten.relu.default)(lambda x: [])
    mlp(f=torch.tanh)
    assert len(list(folder.iterdir())) == 1


ONE = "(Tensor x) -> Tensor"


def test_the_versions_are_of_packages_that_every_user_has():
    needed = [r for r in requires("fdtensor") or () if "extra ==" not in r]
    assert all(any(r.startswith(name) for r in needed) for name in choice_cache.CHOOSING)


def _setting(name: str) -> Setting:
    mesh, case = Mesh(a=2, b=2), CASES[name]
    count = len(case.takes.split(","))
    layouts = tuple([mesh.layout(("a", "b")), mesh.layout("b")][i % 2] for i in range(count))
    return Setting(name, dict.fromkeys(case.names, 8), mesh, layouts, NCCL, (None,) * count)


FORGED = [_setting(name) for name in ("gradients", "sort", "cumsum", "attention", "mlp")]


def test_no_file_breaks_a_program_or_makes_it_wrong(folder):
    texts: dict[Path, str] = {}
    for setting in FORGED:
        traced(setting)
        (new,) = set(folder.iterdir()) - set(texts)
        texts[new] = new.read_text()
    files = list(texts)
    for i, text in enumerate(mutants(list(texts.values()), times(60, 2000), seed=7)):
        setting, file = FORGED[i % len(FORGED)], files[i % len(FORGED)]
        file.write_bytes(text.encode(errors="surrogatepass"))
        checked(setting)
        file.write_text(texts[file])


def test_what_is_read_runs_nothing(folder):
    graph = traced(FORGED[0]).origin.graph
    (file,) = folder.iterdir()
    with nothing_runs():
        for text in mutants([file.read_text()], times(500, 20000), seed=8):
            with contextlib.suppress(Malformed, FdtensorError):
                decode(parsed(text), graph, FORGED[0].mesh)


def test_a_choice_that_is_dearer_is_read_and_right(folder):
    """The law above sees something: what a file says is taken where it is a choice."""
    setting = FORGED[-1]
    first = checked(setting)
    (file,) = folder.iterdir()
    tree = json.loads(file.read_text())
    for axis in tree["axes"].values():
        axis["options"] = [[["R"] * len(i), ["R"] * len(o), None] for i, o, _ in axis["options"]]
        axis["outs"] = ["R"] * len(axis["outs"])
    tree["nested"] = None
    file.write_text(json.dumps(tree))
    assert checked(setting).seconds > first.seconds


@pytest.mark.parametrize(("side", "place"), [("ins", "R"), ("outs", "P(sum)"), ("outs", "P(max)")])
def test_what_is_given_or_not_allowed_is_not_read(side, place, folder, chosen):
    """A file says that an argument comes in another layout, or that a result is left pending."""
    x = TensorType((64, 32), torch.float32, MESH.layout("dp"))
    first = trace(lambda x: x.sum(0), x, out_layouts=like(None))
    (file,) = folder.iterdir()
    tree = json.loads(file.read_text())
    for axis in tree["axes"].values():
        axis[side] = [place]
    tree["nested"] = None
    file.write_text(json.dumps(tree))
    assert str(trace(lambda x: x.sum(0), x, out_layouts=like(None))) == str(first)
    assert len(chosen) == 2


def test_a_huge_file_is_not_read(monkeypatch, folder, chosen):
    mlp()
    monkeypatch.setattr(choice_cache, "MOST_BYTES", 10)
    mlp()
    assert len(chosen) == 2


def test_large_models_are_chosen_once(chosen):
    from tests.bench.choice_cases import CASES as LARGE

    case = next(c for c in LARGE if "Llama" in c.name)
    mesh = Mesh(fs=2, tp=2)
    first, second = (trace(case.f, *case.types(mesh)) for _ in range(2))
    assert len(chosen) == 1
    assert str(first) == str(second)
