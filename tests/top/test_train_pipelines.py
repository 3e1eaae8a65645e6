"""Training with an axis "pp": parts of a model on meshes of their own, on simulated meshes."""

import argparse

import attrs
import pytest
import torch

from fdtensor import FdtensorError, Mesh, SimulatedComm
from fdtensor.errors import MeshError
from fdtensor.train import Job, Pretrained, Size, part_meshes, plain_losses, weight_layouts
from fdtensor.train.command import add_arguments, train
from fdtensor.train.loop import losses
from fdtensor.train.model import layer_runs
from fdtensor.train.pipelined import pipelined
from tests.support.llama import small_llama
from tests.support.training import assert_trains_as_alone

TINY = Job(Size(layers=3, width=16, heads=4, length=8), steps=3, batch=8, dtype=torch.float64)

MESHES = [
    *(Mesh(pp=3), Mesh(dp=2, pp=2), Mesh(pp=2, fsdp=2), Mesh(pp=2, tp=2), Mesh(sp=2, pp=2)),
    Mesh(pp=1),
]


# --- meshes and parts ------------------------------------------------------------------------


def test_each_rank_of_pp_has_a_mesh_of_the_other_axes():
    assert part_meshes(Mesh(dp=2, pp=2)) == (
        Mesh.from_ranks([0, 2], "dp"),
        Mesh.from_ranks([1, 3], "dp"),
    )
    assert part_meshes(Mesh(dp=2)) == (Mesh(dp=2),)
    assert [mesh.ranks for mesh in part_meshes(Mesh(pp=3))] == [(0,), (1,), (2,)]


def test_layers_are_shared_out():
    assert layer_runs(5, 2) == [range(3), range(3, 5)]
    assert layer_runs(3, 3) == [range(1), range(1, 2), range(2, 3)]
    with pytest.raises(FdtensorError, match="a model of 3 layers cannot be cut into 4 parts"):
        layer_runs(3, 4)


def composed(model, params, tokens, count):
    """What the parts give one after the other, each with the parameters that it names."""
    x = tokens
    for part in model.parts([None] * count):
        x = part.run({name: params[name] for name in part.names}, x)
    return x


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_parts_of_a_gpt_are_the_gpt(count):
    params, _ = TINY.start_alone()
    tokens = next(TINY.text())[:, :-1]
    wanted = TINY.model.logits(TINY.model.module(), params, tokens)
    assert torch.equal(composed(TINY.model, params, tokens, count), wanted)


@pytest.mark.parametrize("tied", [False, True])
def test_the_parts_of_a_llama_are_the_llama(tmp_path, tied):
    folder = small_llama(tmp_path, num_hidden_layers=3, tie_word_embeddings=tied)
    model = Pretrained(folder, length=8)
    job = Job(model, batch=2)
    params, _ = job.start_alone()
    tokens = next(job.text())[:, :-1]
    wanted = model.logits(model.module(), params, tokens)
    assert torch.equal(composed(model, params, tokens, 2), wanted)
    first, last = model.parts([None, None])
    assert set(first.names) | set(last.names) == set(job.shapes)
    assert len({*first.names} & {*last.names}) == tied


def test_a_model_that_does_more_than_its_layers_is_refused(tmp_path):
    tf = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 256}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
    tf.Gemma2ForCausalLM(tf.Gemma2Config(**sizes, **heads)).save_pretrained(tmp_path)
    with pytest.raises(FdtensorError, match="Gemma2ForCausalLM cannot be cut into parts"):
        Pretrained(str(tmp_path)).parts([None, None])


def test_a_model_without_a_plan_of_pipelines_is_refused(tmp_path):
    tf = pytest.importorskip("transformers")
    config = tf.GPT2Config(n_embd=16, n_head=2, n_layer=2, vocab_size=256, n_positions=32)
    tf.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    with pytest.raises(FdtensorError, match="it has no plan of pipelines"):
        Pretrained(str(tmp_path)).parts([None, None])


# --- training --------------------------------------------------------------------------------


@pytest.mark.few(3)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_the_losses_of_a_pipeline_are_those_of_one_process(mesh):
    assert_trains_as_alone(TINY, mesh)


@pytest.mark.parametrize("how", [{"schedule": "zero_bubble"}, {"microbatches": 2}])
def test_how_a_batch_goes_through_changes_no_loss(how):
    assert_trains_as_alone(TINY, Mesh(pp=2), **how)


def test_half_precision_trains_in_a_pipeline_too():
    job = attrs.evolve(TINY, precision=torch.bfloat16, dtype=torch.float32)
    found = list(losses(job, SimulatedComm(Mesh(pp=2))))
    assert found == pytest.approx(list(plain_losses(job)), abs=0.02)


def test_gradients_of_a_linear_layer_are_reduced_once_for_all_parts():
    comm = SimulatedComm(Mesh(dp=2, pp=2))
    step = pipelined(TINY, comm)
    params, state = TINY.start(comm)
    plans = step.trace(params, state, step.given(next(TINY.text()), 0))
    for stage in plans.stages:
        assert stage.backward.program.received_bytes == 0
        weights = sum(g.wanted.nbytes for g in stage.gradients)
        assert stage.finish.received_bytes == weights  # an all_reduce over two ranks


def test_a_llama_trains_in_a_pipeline(tmp_path):
    folder = small_llama(tmp_path, tie_word_embeddings=True)
    job = Job(Pretrained(folder, length=8), steps=3, batch=4, dtype=torch.float64)
    found = list(losses(job, SimulatedComm(Mesh(pp=2, tp=2))))
    assert found == pytest.approx(list(plain_losses(job)), rel=1e-9)


# --- what cannot be --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "how", "sentence"),
    [
        ({"model": Size(layers=1)}, {}, "a model of 1 layers cannot be cut into 2 parts."),
        ({"model": Size(dropout=0.1)}, {}, "a pipeline has no key from which dropout could be"),
        ({"batch": 5}, {}, "a batch of 5 cannot be shared by 2 ranks."),
        ({}, {"microbatches": 3}, "a batch of 8 cannot be cut into 3 equal parts on each of 2"),
        ({}, {"microbatches": 0}, "a batch of 8 cannot be cut into 0 equal parts on each of 2"),
    ],
)
def test_what_cannot_go_through_a_pipeline_is_refused(change, how, sentence):
    with pytest.raises(FdtensorError) as error:
        pipelined(attrs.evolve(TINY, **change), SimulatedComm(Mesh(dp=2, pp=2)), **how)
    assert error.value.sentence.startswith(sentence)


def test_parameters_have_no_layout_on_the_mesh_that_has_the_axis():
    with pytest.raises(MeshError) as error:
        weight_layouts(Mesh(dp=2, pp=2), {"w": (4, 4)})
    assert error.value.hint == "part_meshes(mesh) has them."


def test_a_schedule_that_there_is_not_is_refused_before_anything_starts(capsys):
    with pytest.raises(SystemExit):
        run(Mesh(pp=2), "--schedule", "nonsense")
    assert "invalid choice: 'nonsense'" in capsys.readouterr().err
    with pytest.raises(FdtensorError, match="there is no pipeline"):
        run(Mesh(dp=2), "--microbatches", "2")
    with pytest.raises(FdtensorError, match="there is no pipeline"):
        run(Mesh(dp=2), "--schedule", "gpipe")
    with pytest.raises(FdtensorError, match="nan is no learning rate"):
        run(Mesh(dp=2), "--lr", "nan")


# --- the command -----------------------------------------------------------------------------


def run(mesh, *arguments):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    small = ["--layers", "2", "--width", "16", "--heads", "2", "--length", "8", "--batch", "4"]
    return train(mesh, parser.parse_args(["--simulate", *small, *arguments]))


def test_a_job_goes_on_from_a_pipeline_without_one_and_back(tmp_path, capsys):
    *_, through = plain_losses(Job(Size(2, 16, 2, 8), steps=6, batch=4))
    saving = ["--checkpoint", str(tmp_path / "run"), "--save-every", "2", "--every", "1"]
    run(Mesh(pp=2, fsdp=2), "--steps", "2", *saving)
    out = capsys.readouterr().out
    assert "1f1b: 2 stages on 2 meshes, 2 parts" in out
    run(Mesh(tp=2), "--steps", "4", *saving)
    run(Mesh(pp=2), "--steps", "6", *saving)
    out = capsys.readouterr().out
    assert "goes on at step 2" in out
    assert "goes on at step 4" in out
    assert float(out.rstrip().rpartition("loss ")[2]) == pytest.approx(through, abs=2e-4)
