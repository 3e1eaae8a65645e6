"""Published models of `transformers`, unmodified: forward and gradient without a fallback."""

import pytest
import torch

from fdtensor import SimulatedComm, TensorType, distribute, spmd, trace
from fdtensor.layouts.mesh import Mesh
from fdtensor.ops.random_bits import key

tf = pytest.importorskip("transformers")

MESH = Mesh(dp=2)
IDS = torch.randint(0, 64, (2, 6), generator=torch.Generator().manual_seed(0))
TEXT = {"input_ids": IDS, "labels": IDS}
IMAGE = {
    "pixel_values": torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0)),
    "labels": torch.tensor([0, 3]),
}

WIDTHS = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
HEADS = {"num_attention_heads": 4, "max_position_embeddings": 32}
GROUPED = {**WIDTHS, **HEADS, "num_key_value_heads": 2}
GPT2 = {"vocab_size": 64, "n_embd": 16, "n_layer": 1, "n_head": 4, "n_positions": 32}
T5 = {"vocab_size": 64, "d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 1, "num_heads": 4}
VIT = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "image_size": 8}

MODELS = {
    "Llama": lambda: (tf.LlamaForCausalLM(tf.LlamaConfig(**GROUPED)), TEXT),
    "Mixtral": lambda: (
        tf.MixtralForCausalLM(tf.MixtralConfig(**GROUPED, num_local_experts=4)),
        TEXT,
    ),
    "Qwen2": lambda: (tf.Qwen2ForCausalLM(tf.Qwen2Config(**GROUPED)), TEXT),
    "GPT-2": lambda: (tf.GPT2LMHeadModel(tf.GPT2Config(**GPT2)), TEXT),
    "BERT": lambda: (tf.BertForMaskedLM(tf.BertConfig(**WIDTHS, **HEADS)), TEXT),
    "T5": lambda: (
        tf.T5ForConditionalGeneration(tf.T5Config(**T5, decoder_start_token_id=0)),
        TEXT,
    ),
    "ViT": lambda: (
        tf.ViTForImageClassification(
            tf.ViTConfig(**VIT, num_attention_heads=4, patch_size=4, num_labels=5)
        ),
        IMAGE,
    ),
}


def parts(name):
    """A model's loss as a function of its parameters and a batch, and both of these."""
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    model.eval()

    def loss(params, batch):
        return torch.func.functional_call(model, params, (), batch).loss

    params = {name: p.detach() for name, p in model.named_parameters()}
    return model, loss, params, batch


def spread(tensors, comm):
    """Rows over the axis, where there are enough."""
    layouts = {n: MESH.layout("dp" if t.shape[0] > 1 else None) for n, t in tensors.items()}
    return {name: distribute(t, layouts[name], comm) for name, t in tensors.items()}


@pytest.mark.few(4)
@pytest.mark.filterwarnings("ignore::UserWarning:transformers.*")
@pytest.mark.parametrize("name", MODELS)
def test_a_published_model_has_the_loss_and_gradient_of_one_process(name):
    _, loss, params, batch = parts(name)
    expected, grads = torch.func.grad_and_value(loss)(params, batch)[::-1]
    comm = SimulatedComm(MESH)
    step = spmd(torch.func.grad_and_value(loss))  # a fallback is an error: it warns
    inputs = spread(params, comm), spread(batch, comm)

    found, value = step(*inputs)

    torch.testing.assert_close(value.full(), expected, rtol=1e-5, atol=1e-5)
    for n, grad in grads.items():
        assert found[n].layout is inputs[0][n].layout
        torch.testing.assert_close(found[n].full(), grad, rtol=1e-4, atol=1e-5)
    assert "no rule" not in str(step.trace(*inputs))


def test_a_published_model_trains_with_dropout():
    model, loss, params, batch = parts("BERT")
    model.train()
    rows = {n: TensorType(t.shape, t.dtype, MESH.layout()) for n, t in params.items()}
    data = {n: TensorType(t.shape, t.dtype, MESH.layout("dp")) for n, t in batch.items()}
    program = trace(torch.func.grad(loss), rows, data, key=key(0))
    assert "draw" in str(program)
    assert "no rule" not in str(program)
