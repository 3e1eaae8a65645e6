"""The optimizers of torch for pytrees of DTensors, as pure functions.

    opt = optim.AdamW(lr=1e-3, weight_decay=0.1)
    state = opt.init(params)
    params, state = opt.step(params, grads, state, lr=schedule(i))

Names and options are those of `torch.optim`, whose own code is traced: each step is a program on
full tensors, and so right in any layout. State is a pytree of DTensors. Each file has one thing:

    numbers     tensors where torch's code has Python numbers, so that no step is traced twice
    orthogonal  what Muon does to a matrix, as one op
    special     what single optimizers need
    update      a step as a function of one full parameter
    states      the types of state, and the programs
    options     options, and pytrees of them
    leaves      parameters, gradients and state beside each other
    row         one parameter with all that belongs to it
    optimizer   `init` and `step`
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from fdtensor.layouts.errors import ArgumentError
from fdtensor.tensors.optim.optimizer import Optimizer
from fdtensor.tensors.optim.options import defaults_of
from fdtensor.tensors.optim.special import special_of

__all__ = [
    "ASGD",
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "LBFGS",
    "Muon",
    "NAdam",
    "Optimizer",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
    "SparseAdam",
]


def _of(kind: type[torch.optim.Optimizer]) -> Callable[..., Optimizer]:
    """A function of the options of an optimizer of torch that gives an `Optimizer`."""

    def make(*params: Any, **options: Any) -> Optimizer:
        if params:
            raise ArgumentError(
                f"{kind.__name__} takes options by name, and no parameters.",
                hint=f"Write opt = {kind.__name__}(lr=...), then state = opt.init(params).",
            )
        return Optimizer(kind, options)

    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [
        inspect.Parameter(name, keyword, default=default)
        for name, default in defaults_of(kind).items()
    ]
    make.__name__ = make.__qualname__ = kind.__name__
    make.__doc__ = _doc(kind)
    make.__signature__ = inspect.Signature(parameters, return_annotation=Optimizer)  # type: ignore
    return make


def _doc(kind: type[torch.optim.Optimizer]) -> str:
    special = special_of(kind)
    if special.refused:
        said = f"Raises `FdtensorError`: {special.refused}.\n\n{special.instead}"
        return f"{said}\n\n{_REFUSED.format(name=kind.__name__)}"
    said = f"Returns torch's {kind.__name__} for pytrees of DTensors, as an `Optimizer`."
    options = f"Options are those of `torch.optim.{kind.__name__}`. {special.note}".rstrip()
    return f"{said}\n\n{options}\n\n{_EXAMPLE.format(name=kind.__name__)}"


_EXAMPLE = """\
>>> comm = SimulatedComm(Mesh(x=2))
>>> params = {{"w": distribute(torch.ones(4, 4), comm.mesh.layout("x"), comm)}}
>>> grads = {{"w": distribute(torch.eye(4), comm.mesh.layout("x"), comm)}}
>>> opt = fd.optim.{name}()
>>> params, state = opt.step(params, grads, opt.init(params))
>>> print(params["w"].type)
f32[4@x,4]
"""

_REFUSED = """\
>>> fd.optim.{name}()
Traceback (most recent call last):
    ...
fdtensor.FdtensorError: {name} ...
"""

ASGD = _of(torch.optim.ASGD)
Adadelta = _of(torch.optim.Adadelta)
Adafactor = _of(torch.optim.Adafactor)
Adagrad = _of(torch.optim.Adagrad)
Adam = _of(torch.optim.Adam)
AdamW = _of(torch.optim.AdamW)
Adamax = _of(torch.optim.Adamax)
LBFGS = _of(torch.optim.LBFGS)
Muon = _of(torch.optim.Muon)
NAdam = _of(torch.optim.NAdam)
RAdam = _of(torch.optim.RAdam)
RMSprop = _of(torch.optim.RMSprop)
Rprop = _of(torch.optim.Rprop)
SGD = _of(torch.optim.SGD)
SparseAdam = _of(torch.optim.SparseAdam)
