"""The proof on a real model: a GPT in plain torch, or a published one, trained on any mesh.

The model, the loss and the optimizer know nothing of meshes; `layouts` says how they are laid out.
"""

from fdtensor.train.gpt import GPT, Size, initial
from fdtensor.train.job import Job, program
from fdtensor.train.layouts import activation_layout, part_meshes, tokens_layout, weight_layouts
from fdtensor.train.loop import losses, plain_losses, steps
from fdtensor.train.model import Model, Part
from fdtensor.train.optimizer import AdamW, clipped
from fdtensor.train.pretrained import Pretrained
from fdtensor.train.saves import Saves
from fdtensor.train.step import training
from fdtensor.train.text import batches

__all__ = [
    "GPT",
    "AdamW",
    "Job",
    "Model",
    "Part",
    "Pretrained",
    "Saves",
    "Size",
    "batches",
    "clipped",
    "initial",
    "losses",
    "plain_losses",
    "program",
    "steps",
    "activation_layout",
    "part_meshes",
    "tokens_layout",
    "training",
    "weight_layouts",
]
