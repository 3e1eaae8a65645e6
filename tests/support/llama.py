"""A small Llama in a folder, as `transformers` writes it: the same numbers on every machine."""

import pytest
import torch

SIZES = {
    "vocab_size": 256,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
}


def small_llama(folder, **sizes):
    """Writes the model, and returns the folder."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**SIZES, **sizes})
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)
