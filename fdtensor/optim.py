"""The optimizers of torch for pytrees of DTensors, and what stands around them.

opt = fd.optim.AdamW(lr=1e-3, weight_decay=0.1)
state = opt.init(params)
grads, norm = fd.optim.clip_grad_norm(fd.gradients(params), 1.0)
params, state = opt.step(params, grads, state)
"""

from __future__ import annotations

from fdtensor.tensors.grad_norms import (
    clip_grad_norm,
    clip_grad_norm_,
    found_inf,
    gradients,
    local_tensors,
    total_norm,
)
from fdtensor.tensors.optim import (
    ASGD,
    LBFGS,
    SGD,
    Adadelta,
    Adafactor,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    Muon,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
    SparseAdam,
)
from fdtensor.tensors.scaling import GradScaler, LossScale

__all__ = [
    "ASGD",
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "GradScaler",
    "LBFGS",
    "LossScale",
    "Muon",
    "NAdam",
    "Optimizer",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
    "SparseAdam",
    "clip_grad_norm",
    "clip_grad_norm_",
    "found_inf",
    "gradients",
    "local_tensors",
    "total_norm",
]
