"""The transforms of `torch.func` around functions of DTensors, as in torch, and `scan`.

fd.grad(loss)(params, x)  # as all names of `fd.func`, from `fd` itself too
"""

from __future__ import annotations

from fdtensor.tensors.scan import scan
from fdtensor.tensors.transforms import (
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    vmap,
)
from fdtensor.tensors.vjp import vjp

__all__ = ["grad", "grad_and_value", "hessian", "jacfwd", "jacrev", "jvp", "scan", "vjp", "vmap"]
