"""`Special`: what single optimizers of torch need, beside what is done for all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch

from fdtensor.layouts.torch_private import NEWTON_SCHULZ
from fdtensor.tensors.optim.numbers import greatest, least
from fdtensor.tensors.optim.orthogonal import orthogonalized

__all__ = ["Special", "special_of"]

Group = dict[str, Any]
State = dict[str, torch.Tensor]


def _nothing(_group: Group, _param: torch.Tensor) -> State:
    return {}


def _unchanged(group: Group, state: State) -> None:
    pass


@attrs.frozen
class Special:
    """How one optimizer differs from the others."""

    refused: str = ""
    """Why there is none for DTensors."""
    instead: str = ""
    """The hint where it is refused."""
    options: Mapping[str, Any] = attrs.field(factory=dict)
    """Options that give the same without asking a tensor for its value."""
    without: Mapping[str, str] = attrs.field(factory=dict)
    """Options that cannot be on, and why."""
    names: Mapping[str, Callable[..., Any]] = attrs.field(factory=dict)
    """Names in the module of the optimizer that mean something else while it steps."""
    own: Mapping[str, Any] = attrs.field(factory=dict)
    """Options that torch does not have, with their defaults."""
    note: str = ""
    """The note on them."""
    fresh: Callable[[Group, torch.Tensor], State] = _nothing
    """State that torch makes in the first step, as it is before that."""
    before: Callable[[Group, State], None] = _unchanged
    """Changes the options of a step, and the state, before it."""


def special_of(kind: type[torch.optim.Optimizer]) -> Special:
    """The needs of an optimizer, by its class or the first of its bases in the table."""
    return next((TABLE[k.__name__] for k in kind.__mro__ if k.__name__ in TABLE), Special())


def _momentum(group: Group, param: torch.Tensor) -> State:
    """The momentum of SGD, and a count of steps where all but the first are damped."""
    if not group["momentum"]:
        return {}
    count = {"step": torch.zeros(())} if group["dampening"] else {}
    return {"momentum_buffer": torch.zeros_like(param), **count}


def _undamped_at_first(group: Group, state: State) -> None:
    if "step" in state:
        step = state["step"]
        group["dampening"] = torch.where(step == 0, torch.zeros_like(step), group["dampening"])
        step += 1


def _from_the_first_rate(name: str) -> Callable[[Group, State], None]:
    """State that torch makes in the first step of the rate that this step has."""

    def before(group: Group, state: State) -> None:
        own = state[name]
        own.copy_(torch.where(state["step"] == 0, group["lr"], own))

    return before


TABLE: Mapping[str, Special] = {
    "Adafactor": Special(names={"min": least, "max": greatest}),
    "ASGD": Special(
        options={"capturable": True},
        without={"differentiable": "torch overwrites the rate that derivatives need"},
        before=_from_the_first_rate("eta"),
    ),
    "LBFGS": Special(
        refused="it calls the loss as often as the values of losses tell it to",
        instead="Write its loop around spmd(torch.func.grad_and_value(loss)), or replicate the "
        "parameters and give torch.optim.LBFGS their local tensors.",
    ),
    "Muon": Special(
        names={NEWTON_SCHULZ: orthogonalized},
        own={"exact": True},
        note="With `exact` each rank makes whole matrices orthogonal, to the bits of one process. "
        "Without it they may be cut: less work a rank, more traffic, and other rounding.",
    ),
    "RAdam": Special(options={"capturable": True}),
    "Rprop": Special(before=_from_the_first_rate("step_size")),
    "SGD": Special(fresh=_momentum, before=_undamped_at_first),
    "SparseAdam": Special(
        refused="it is for sparse gradients, and those of DTensors are dense",
        instead="Adam takes them; rows without a gradient then decay with the others.",
    ),
}
"""By the name of the class; what is not here needs nothing special."""
