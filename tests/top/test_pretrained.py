"""Published models trained on simulated meshes: from a folder of Hugging Face and back to one."""

import argparse
import json
import sys
from pathlib import Path

import pytest
import torch

from fdtensor import FdtensorError, Mesh, Replicate, Shard, SimulatedComm
from fdtensor.train import Job, Pretrained, plain_losses
from fdtensor.train.command import add_arguments, train
from fdtensor.train.loop import losses
from tests.support.llama import SIZES, small_llama
from tests.support.training import assert_trains_as_alone

tf = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:transformers.*")


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return small_llama(tmp_path_factory.mktemp("llama"))


def job_of(folder, **fields):
    return Job(Pretrained(folder, length=8), steps=3, batch=4, dtype=torch.float64, **fields)


def test_the_losses_of_one_process_are_those_of_the_model_itself(llama):
    job = job_of(llama)
    model = tf.LlamaForCausalLM.from_pretrained(llama, dtype=torch.float64)
    tokens = next(job.text())
    logits = model(tokens[:, :-1]).logits.flatten(0, 1)
    wanted = torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())
    assert next(plain_losses(job)) == pytest.approx(wanted.item(), rel=1e-9)


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "mesh",
    [Mesh(dp=4), Mesh(fsdp=3), Mesh(tp=4), Mesh(sp=2), Mesh(fsdp=2, tp=2), Mesh(dp=2, sp=2)],
    ids=str,
)
def test_the_losses_on_a_mesh_are_those_of_one_process(llama, mesh):
    assert_trains_as_alone(job_of(llama), mesh)


def test_matrices_are_cut_as_the_plan_of_the_model_says(llama):
    placed = Pretrained(llama).placement
    layer = "model.layers.1"
    assert placed("model.embed_tokens.weight") == Shard(0) == placed("lm_head.weight")
    assert placed(f"{layer}.self_attn.q_proj.weight") == Shard(0)
    assert placed(f"{layer}.mlp.down_proj.weight") == Shard(1)
    assert placed(f"{layer}.mlp.down_proj.bias") == Replicate()
    assert placed(f"{layer}.input_layernorm.weight") == Replicate()


def test_a_tied_head_is_one_parameter(tmp_path):
    job = job_of(small_llama(tmp_path, tie_word_embeddings=True, num_hidden_layers=1))
    assert "lm_head.weight" not in job.shapes
    found = list(losses(job, SimulatedComm(Mesh(tp=2))))
    assert found == pytest.approx(list(plain_losses(job)), rel=1e-9)


def test_parameters_are_not_held_by_the_module_and_buffers_are(llama):
    module = Pretrained(llama).module()
    assert all(p.is_meta for p in module.parameters())
    assert not any(b.is_meta for b in module.buffers())
    assert torch.nn.Linear(2, 2).weight.device.type == "cpu"


# --- the command -----------------------------------------------------------------------------


def run(mesh, *arguments):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return train(
        mesh, parser.parse_args(["--simulate", "--length", "8", "--batch", "4", *arguments])
    )


def last_loss(capsys):
    return capsys.readouterr().out.rstrip().rpartition("loss ")[2]


def test_the_command_trains_a_folder_goes_on_elsewhere_and_writes_one(llama, tmp_path, capsys):
    given = ["--model", llama, "--bf16", "--cosine", "--steps", "4"]
    assert run(Mesh(dp=2), *given) == 0
    through = last_loss(capsys)
    saving = ["--checkpoint", str(tmp_path / "run"), "--save-every", "2"]
    run(Mesh(dp=2), *given, *saving)
    # the checkpoint of step 4 is left out, as if the job had been stopped before
    for path in (tmp_path / "run").glob("step_000004*"):
        path.rename(tmp_path / path.name)
    capsys.readouterr()
    written = tmp_path / "trained"
    run(Mesh(fsdp=3), *given, *saving, "--save", str(written))
    out = capsys.readouterr().out
    assert "goes on at step 2" in out
    assert float(out.rstrip().rpartition("loss ")[2]) == pytest.approx(float(through), abs=2e-3)
    model = tf.AutoModelForCausalLM.from_pretrained(written)
    assert json.loads(Path(written, "config.json").read_text())["architectures"] == [
        "LlamaForCausalLM"
    ]
    before = tf.AutoModelForCausalLM.from_pretrained(llama)
    same = [torch.equal(a, b) for a, b in zip(model.parameters(), before.parameters(), strict=True)]
    assert not any(same)
    tokens = next(Job(Pretrained(llama, 8), batch=4).text())
    assert model(tokens, labels=tokens).loss < before(tokens, labels=tokens).loss


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--model", "nowhere"], "'nowhere' has no configuration of a model"),
        (["--save", "there"], "only a model of a folder is saved."),
    ],
    ids=str,
)
def test_what_cannot_be_trained_is_refused(arguments, sentence):
    with pytest.raises(FdtensorError) as error:
        run(Mesh(dp=2), *arguments)
    assert sentence in str(error.value)


def test_the_text_is_in_the_tokens_of_the_folder(tmp_path, monkeypatch):
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.models.WordLevel({"?": 0, "import": 1, "torch": 2}, unk_token="?")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    folder = small_llama(tmp_path / "llama", vocab_size=3)
    source = tmp_path / "source.py"
    source.write_text("import torch as torch")
    monkeypatch.setattr("fdtensor.train.pretrained.files", lambda: [source, source])
    with pytest.raises(FdtensorError, match="has 3 tokens, too few for one a byte"):
        Pretrained(folder).text()
    tokenizer.save(f"{folder}/tokenizer.json")
    assert Pretrained(folder).text().tolist() == [1, 2, 0, 2] * 2


def test_a_plan_that_is_not_known_is_refused(tmp_path):
    sizes = {**SIZES, "num_local_experts": 2, "num_hidden_layers": 1}
    tf.MixtralForCausalLM(tf.MixtralConfig(**sizes)).save_pretrained(tmp_path)
    with pytest.raises(FdtensorError, match=r"experts' as '.*', which is not known"):
        Job(Pretrained(str(tmp_path))).layouts(Mesh(tp=2))


def test_without_transformers_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(FdtensorError, match="needs transformers"):
        Pretrained(str(tmp_path)).module()


def test_a_model_is_not_written_over_another(llama):
    with pytest.raises(FdtensorError, match="has a model already"):
        run(Mesh(dp=2), "--model", llama, "--save", llama)


def test_a_model_without_a_plan_is_cut_by_data_alone(tmp_path):
    sizes = {"vocab_size": 256, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16}
    tf.GPT2LMHeadModel(tf.GPT2Config(**sizes)).save_pretrained(tmp_path)
    job = job_of(str(tmp_path))
    found = list(losses(job, SimulatedComm(Mesh(fsdp=2))))
    assert found == pytest.approx(list(plain_losses(job)), rel=1e-9)
    with pytest.raises(FdtensorError, match="GPT2LMHeadModel has no plan of tensor parallelism"):
        list(losses(job, SimulatedComm(Mesh(tp=2))))
