"""The GPT, its text, optimizer and layouts by themselves, and trained on simulated meshes."""

import argparse
import itertools

import attrs
import pytest
import torch

from fdtensor import FdtensorError, Mesh, Replicate, Shard, SimulatedComm, TensorType
from fdtensor.layouts.errors import MeshError
from fdtensor.train import (
    GPT,
    AdamW,
    Job,
    Size,
    activation_layout,
    batches,
    clipped,
    initial,
    plain_losses,
    tokens_layout,
    training,
    weight_layouts,
)
from fdtensor.train.command import add_arguments, train
from fdtensor.train.job import types
from fdtensor.train.layouts import STYLES
from fdtensor.train.loop import losses
from fdtensor.train.text import corpus, files
from tests.support.training import assert_trains_as_alone

MESHES = [
    Mesh(dp=4),
    Mesh(tp=4),
    Mesh(sp=4),
    Mesh(fsdp=4),
    Mesh(dp=2, tp=2),
    Mesh(dp=2, sp=2),
    Mesh(fsdp=2, tp=2),
    Mesh(tp=2, fsdp=2),
    Mesh(dp=2, fsdp=2),
]
"""Four ranks each: every style alone, and those that go together."""

TINY = Job(Size(layers=1, width=16, heads=4, length=8), steps=3, batch=4, dtype=torch.float64)


def shapes(size=Size()):  # noqa: B008
    return {name: tuple(p.shape) for name, p in initial(size, 0).items()}


# --- text ------------------------------------------------------------------------------------


def test_the_text_is_the_source_of_the_standard_library():
    names = {path.name for path in files()}
    assert {"argparse.py", "tokenize.py", "zipfile.py"} <= names
    assert len(corpus()) > 5_000_000
    assert b"def parse_args(self" in bytes(corpus().numpy())


def test_batches_depend_on_the_seed_and_the_step_only():
    three = list(batches(7, 3, 4, 16))
    assert all(torch.equal(a, b) for a, b in zip(three, batches(7, 5, 4, 16)))
    assert not torch.equal(three[0], three[1])
    assert not torch.equal(three[0], next(batches(8, 1, 4, 16)))
    assert {(t.shape, t.dtype) for t in three} == {((4, 17), torch.int64)}


def test_a_batch_is_made_of_excerpts():
    text = bytes(corpus().numpy())
    assert all(bytes(row) in text for row in next(batches(0, 1, 8, 64)).tolist())


# --- model -----------------------------------------------------------------------------------


def test_the_default_model_has_a_million_parameters():
    assert sum(p.numel() for p in initial(Size(), 0).values()) == 1_032_576


def test_a_prediction_depends_on_earlier_tokens_only():
    model = GPT(Size(layers=2, width=16, heads=2, length=8))
    a = torch.randint(256, (1, 8))
    b = a.clone()
    b[0, 5:] = (b[0, 5:] + 1) % 256
    torch.testing.assert_close(model(a)[:, :5], model(b)[:, :5])
    assert not torch.allclose(model(a)[:, 5:], model(b)[:, 5:])


def test_the_initial_parameters_fit_the_model_and_follow_from_the_seed():
    model = GPT(TINY.model)
    a, b, c = initial(TINY.model, 1), initial(TINY.model, 1), initial(TINY.model, 2)
    model.load_state_dict(a)
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a["token.weight"], c["token.weight"])


def test_a_caller_may_pin_the_activations():
    seen = []

    def pin(x, name):
        seen.append((name, tuple(x.shape)))
        return x

    GPT(Size(layers=3, width=16, heads=2, length=8), pin)(torch.zeros(2, 8, dtype=torch.int64))
    residual, heads, hidden = (
        ("residual", (2, 8, 16)),
        ("heads", (2, 2, 8, 8)),
        ("hidden", (2, 8, 64)),
    )
    assert seen == [residual, *[heads, heads, heads, residual, hidden, residual] * 3]


@pytest.mark.parametrize(
    ("size", "sentence"),
    [
        ({"width": 10, "heads": 4}, "4 heads cannot share a width of 10."),
        ({"layers": 0}, "a GPT cannot have layers 0."),
        ({"dropout": 1}, "a GPT cannot drop 1 of its activations."),
    ],
)
def test_a_size_that_cannot_be_is_refused(size, sentence):
    with pytest.raises(FdtensorError) as error:
        Size(**size)
    assert error.value.sentence == sentence


def test_a_job_without_steps_is_refused():
    with pytest.raises(FdtensorError) as error:
        Job(steps=0)
    assert error.value.sentence == "a job cannot have 0 as its steps."


# --- optimizer -------------------------------------------------------------------------------


def test_adamw_with_clipping_is_that_of_torch():
    torch.manual_seed(0)
    numbers = AdamW(lr=0.1, warmup=1, clip=0.5)
    ours = {"w": torch.randn(3, 4), "b": torch.randn(4)}
    theirs = {name: torch.nn.Parameter(p.clone()) for name, p in ours.items()}
    groups = [
        {"params": [theirs["w"]], "weight_decay": numbers.decay},
        {"params": [theirs["b"]], "weight_decay": 0.0},
    ]
    torchs = torch.optim.AdamW(groups, lr=numbers.lr, betas=numbers.betas, eps=numbers.eps)
    optimizer = numbers.optimizer(ours)
    state = optimizer.init(ours)
    for i in range(5):
        grads = {name: torch.randn_like(p) * (0.05 if i == 2 else 1) for name, p in ours.items()}
        for name, p in theirs.items():
            p.grad = grads[name].clone()
        torch.nn.utils.clip_grad_norm_(theirs.values(), numbers.clip)
        torchs.step()
        given = clipped(grads, numbers.clip)
        ours, state = optimizer.step(ours, given, state, lr=numbers.rate(i))
        for name, p in ours.items():
            torch.testing.assert_close(p, theirs[name].detach())
    assert state["w"]["step"].item() == state["b"]["step"].item() == 5


def test_the_rate_warms_up():
    numbers = AdamW(lr=1.0, warmup=4)
    assert [numbers.rate(i) for i in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_the_rate_falls_to_a_tenth_along_half_a_cosine():
    numbers = AdamW(lr=1.0, warmup=2, until=10)
    assert [numbers.rate(i) for i in range(3)] == [0.5, 1.0, 1.0]
    assert numbers.rate(6) == pytest.approx(0.55)
    assert numbers.rate(10) == numbers.rate(99) == pytest.approx(0.1)


def test_a_step_in_bf16_keeps_parameters_state_and_loss_in_f32():
    job = attrs.evolve(TINY, dtype=torch.float32, precision=torch.bfloat16)
    params, state = job.start_alone()
    params, state, loss = job.step()(params, state, next(job.text()), 0.01)
    kept = [
        *params.values(),
        *itertools.chain(*(s.values() for s in state.values() if isinstance(s, dict))),
    ]
    assert {t.dtype for t in kept if t.is_floating_point()} == {torch.float32} == {loss.dtype}
    halves, singles = list(plain_losses(job)), list(plain_losses(TINY))
    assert halves != singles
    assert halves == pytest.approx(singles, abs=0.05)


def test_a_step_changes_nothing_in_place():
    params, state = TINY.start_alone()
    before = {name: p.clone() for name, p in params.items()}
    after, _, loss = training(TINY.model, TINY.numbers)(params, state, next(TINY.text()), 1.0)
    assert all(torch.equal(before[name], p) for name, p in params.items())
    assert all(not torch.equal(before[name], p) for name, p in after.items())
    assert loss.shape == ()


def test_a_small_model_learns():
    small = Job(Size(layers=1, width=32, heads=2, length=32), AdamW(lr=1e-2), steps=60)
    found = list(plain_losses(small))
    assert found[0] > 5
    assert sum(found[-5:]) / 5 < 3.6


@pytest.mark.deep
@pytest.mark.slow
def test_the_default_model_learns_in_200_steps():
    found = list(plain_losses(Job()))
    assert found[0] > 5.2
    assert sum(found[-5:]) / 5 < 2.7


# --- layouts ---------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_parameter_state_and_batch_has_a_type_of_even_blocks(mesh):
    params, state, tokens, rate = types(Job(), mesh)
    assert params.keys() == state.keys()
    for name, type in params.items():
        assert state[name]["exp_avg"] is state[name]["exp_avg_sq"] is type
        assert state[name]["step"] == TensorType((), torch.float32, mesh.layout())
        assert len({type.local_shape(rank) for rank in mesh.order}) == 1, name
    assert rate.shape == ()
    assert tokens.shape == (16, 65)


@pytest.mark.parametrize("count", [2, 3, 4])
def test_zero_leaves_each_rank_its_share(count):
    mesh = Mesh(fsdp=count)
    held = whole = 0
    known = shapes()
    for name, layout in weight_layouts(mesh, known).items():
        type = TensorType(known[name], torch.float32, layout)
        held, whole = held + type.local_nbytes(0), whole + type.nbytes
    assert held <= whole / count * 1.01


def test_tensor_parallel_layouts_are_those_of_megatron():
    found = weight_layouts(Mesh(tp=4), shapes(Size(layers=1)))
    assert {name: layout["tp"] for name, layout in found.items()} == {
        "token.weight": Shard(0),
        "position.weight": Replicate(),
        "blocks.0.norm1.weight": Replicate(),
        "blocks.0.norm1.bias": Replicate(),
        "blocks.0.attention.query.weight": Shard(0),
        "blocks.0.attention.query.bias": Shard(0),
        "blocks.0.attention.key.weight": Shard(0),
        "blocks.0.attention.key.bias": Shard(0),
        "blocks.0.attention.value.weight": Shard(0),
        "blocks.0.attention.value.bias": Shard(0),
        "blocks.0.attention.out.weight": Shard(1),
        "blocks.0.attention.out.bias": Replicate(),
        "blocks.0.norm2.weight": Replicate(),
        "blocks.0.norm2.bias": Replicate(),
        "blocks.0.mlp.up.weight": Shard(0),
        "blocks.0.mlp.up.bias": Shard(0),
        "blocks.0.mlp.down.weight": Shard(1),
        "blocks.0.mlp.down.bias": Replicate(),
        "norm.weight": Replicate(),
        "norm.bias": Replicate(),
    }


@pytest.mark.parametrize("mesh", [Mesh(fsdp=2, tp=2), Mesh(tp=2, fsdp=2)], ids=str)
def test_zero_cuts_what_tensor_parallel_left(mesh):
    found = weight_layouts(mesh, {"x.mlp.up.weight": (8, 4), "x.mlp.down.weight": (4, 8)})
    assert found["x.mlp.up.weight"] is mesh.layout(("tp", "fsdp"))
    assert found["x.mlp.down.weight"] is mesh.layout("fsdp", "tp")


def test_zero_takes_the_largest_dim_it_divides_where_the_first_is_uneven():
    found = weight_layouts(Mesh(fsdp=4), {"a": (3, 8, 16), "b": (8, 16), "c": (3,)})
    assert [layout["fsdp"] for layout in found.values()] == [Shard(2), Shard(0), Shard(0)]


def test_the_batch_is_cut_by_the_axes_of_data():
    mesh = Mesh(dp=2, fsdp=2, tp=2)
    assert tokens_layout(mesh) is mesh.layout(("dp", "fsdp"))
    assert tokens_layout(Mesh(tp=2)) is Mesh(tp=2).layout()


def test_activations_are_pinned_where_megatron_has_them():
    found = {
        (axis, name): activation_layout(Mesh(**{"dp": 2, axis: 2}), name).per_dim()
        for axis in ("tp", "sp")
        for name in ("residual", "heads", "hidden")
    }
    assert found == {
        ("tp", "residual"): ("dp",),
        ("tp", "heads"): ("dp", "tp"),
        ("tp", "hidden"): ("dp", None, "tp"),
        ("sp", "residual"): ("dp", "sp"),
        ("sp", "heads"): ("dp", "sp"),
        ("sp", "hidden"): ("dp", None, "sp"),
    }


def test_an_axis_with_another_name_is_refused():
    with pytest.raises(MeshError) as error:
        weight_layouts(Mesh(dp=2, ep=2), shapes())
    assert str(error.value) == REFUSED


# --- training on a mesh ----------------------------------------------------------------------


@pytest.mark.few(4)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_the_losses_on_a_mesh_are_those_of_one_process(mesh):
    assert_trains_as_alone(TINY, mesh)


@pytest.mark.parametrize("mesh", [Mesh(dp=3), Mesh(tp=3), Mesh(sp=3), Mesh(fsdp=3)], ids=str)
def test_the_losses_are_right_where_blocks_are_uneven(mesh):
    found = list(losses(TINY, SimulatedComm(mesh)))
    assert found == pytest.approx(list(plain_losses(TINY)), rel=1e-9)


DROPPING = attrs.evolve(TINY, model=attrs.evolve(TINY.model, dropout=0.3))


@pytest.mark.few(2)
@pytest.mark.parametrize("mesh", MESHES[1:8:2], ids=str)
def test_with_dropout_the_losses_on_a_mesh_are_those_of_one_rank(mesh):
    alone = list(losses(DROPPING, SimulatedComm(Mesh(dp=1))))
    assert list(losses(DROPPING, SimulatedComm(mesh))) == pytest.approx(alone, rel=1e-9)
    assert alone != pytest.approx(list(plain_losses(TINY)), rel=1e-3)


@pytest.mark.few(2)
@pytest.mark.mesh
@pytest.mark.parametrize("mesh", MESHES[:5], ids=str)
def test_the_losses_on_real_ranks_are_those_of_one_process(mesh, pool4):
    def everyone(job, mesh):
        from fdtensor import FuncolComm

        return list(losses(job, FuncolComm(mesh)))

    alone = list(plain_losses(TINY))
    for found in pool4.run(everyone, TINY, mesh):
        assert found == pytest.approx(alone, rel=1e-9)


# --- the command -----------------------------------------------------------------------------


def options(*arguments):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(arguments)


SMALL = ["--layers", "1", "--width", "16", "--heads", "2", "--length", "8", "--batch", "4"]


def test_the_command_prints_the_summary_and_the_losses(capsys):
    given = options("--simulate", *SMALL, "--steps", "3", "--every", "2")
    assert train(Mesh(dp=2, tp=2), given) == 0
    out = capsys.readouterr().out
    assert out.startswith("a GPT of 7,536 parameters, ")
    assert "\ntrain_step on Mesh(dp=2, tp=2): " in out
    assert " received per rank, peak " in out
    job = Job(Size(1, 16, 2, 8), steps=3, batch=4)
    first, _, last = plain_losses(job)
    assert f"step     0  {first:.4f}\n  step     2  {last:.4f}\n3 steps in " in out


@pytest.mark.mesh
def test_the_command_starts_processes_of_its_own(capfd):
    assert train(Mesh(dp=2), options(*SMALL, "--steps", "2")) == 0
    assert capfd.readouterr().out.count("train_step on Mesh(dp=2): ") == 1


def test_the_command_refuses_a_mesh_before_it_starts_processes():
    with pytest.raises(MeshError, match="mesh axis 'x' says nothing"):
        train(Mesh(x=2), options())


def test_every_style_is_tried():
    assert {*STYLES} - {"pp"} == set(itertools.chain(*(mesh.axes for mesh in MESHES)))


REFUSED = """\
mesh axis 'ep' says nothing about how to train.

  mesh: Mesh(dp=2, ep=2)

Name the axes after what they do: dp, fsdp, tp, sp, pp."""
