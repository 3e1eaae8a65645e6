"""Loss scaling: `LossScale`, a record, and `GradScaler`, that of torch with ranks that agree.

Small gradients of half precision vanish, so that losses are scaled up before the backward. Where a
gradient of any rank is infinite or nan, the step is left out on all ranks, and the scale shrinks:
Micikevicius et al., "Mixed Precision Training" (2018), arXiv:1710.03740.
"""

from __future__ import annotations

from typing import Any, TypeVar

import attrs
import torch

from fdtensor.layouts.errors import ArgumentError, FdtensorError
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.placement import Partial
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.layouts.torch_private import ScalerWithHook
from fdtensor.layouts.tree import flatten, unflatten
from fdtensor.plans.planner import plan
from fdtensor.runtime.comm import Comm, refuse_no_comm
from fdtensor.runtime.interpreter import run
from fdtensor.tensors.call import call
from fdtensor.tensors.dtensor import DTensor, is_dtensor
from fdtensor.tensors.grad_norms import found_inf

__all__ = ["GradScaler", "LossScale"]

Tree = TypeVar("Tree")

_HALVES = (torch.float16, torch.bfloat16)

_LARGEST = torch.finfo(torch.float32).max
"""The largest scale, as torch has it."""


@attrs.frozen
class LossScale:
    """The factor of losses, and how it changes from step to step.

    loss = scale.scaled(loss)
    grads, skip = scale.unscaled(grads)
    scale = scale.after(skip)

    >>> scale = fd.optim.LossScale(value=8.0)
    >>> scale.value
    8.0
    """

    value: float = 2.0**16
    growth: float = 2.0
    """The factor of the scale after `interval` steps in a row without inf or nan."""
    backoff: float = 0.5
    """The factor of the scale after a step that was left out."""
    interval: int = 2000
    streak: int = 0
    """How many steps in a row have had neither inf nor nan."""

    def __attrs_post_init__(self) -> None:
        counts = (self.interval, self.streak)
        fields = (self.value, self.growth, self.backoff, *counts)
        if (
            not all(isinstance(n, (int, float)) for n in fields)
            or not all(isinstance(n, int) for n in counts)
            or not (0 < self.value <= _LARGEST and 0 < self.backoff <= 1 <= self.growth)
            or not (self.interval >= 1 and self.streak >= 0)
        ):
            raise FdtensorError(
                f"{self!r} cannot be.",
                hint="Let value be above 0 and within float32, growth 1 or more, backoff above 0 "
                "and 1 or less, interval and streak ints of at least 1 and 0.",
            )

    def scaled(self, loss: Any) -> Any:
        """A loss times the scale: a tensor or a DTensor.

        A loss of one number in half precision becomes float32, as with `torch.amp.GradScaler`.
        """
        if isinstance(loss, (torch.Tensor, DTensor)) and not loss.shape and loss.dtype in _HALVES:
            loss = loss.float()
        return call(torch.mul, loss, self.value) if isinstance(loss, DTensor) else loss * self.value

    def unscaled(self, grads: Tree) -> tuple[Tree, bool]:
        """The gradients of the loss itself, and whether any on any rank is infinite or nan.

        Collective; see `found_inf`.
        """
        leaves, spec = flatten(grads, is_leaf=is_dtensor)
        skip = found_inf(grads)
        return unflatten(spec, [self._unscaled(x) for x in leaves]), skip

    def _unscaled(self, x: Any) -> Any:
        if not isinstance(x, DTensor):
            return x
        with torch.no_grad():
            scaled = [t.detach() * (1 / self.value) for t in x.comm.leaves(x.local)]
        return DTensor(x.comm.value(scaled), x.type, x.comm)

    def after(self, skipped: bool) -> LossScale:
        """The scale for the next step."""
        if skipped:
            return attrs.evolve(self, value=self.value * self.backoff, streak=0)
        if self.streak + 1 < self.interval:
            return attrs.evolve(self, streak=self.streak + 1)
        grown = self.value * self.growth
        return attrs.evolve(self, value=grown if grown <= _LARGEST else self.value, streak=0)


class GradScaler(ScalerWithHook):
    """`torch.amp.GradScaler` for optimizers on the local tensors of DTensors.

    Ranks of the Comm's mesh agree on whether a gradient is infinite or nan, whatever they hold, so
    that all of them step or none, and their scales stay the same. Unscaling, and a step that has
    not been unscaled, are collective. Options are those of torch.

    >>> mesh = Mesh(x=2)
    >>> w = distribute(torch.ones(4), mesh.layout("x"), SimulatedComm(mesh))
    >>> blocks = [block.requires_grad_() for block in w.local]
    >>> scaler = fd.optim.GradScaler(w.comm, init_scale=8.0)
    >>> scaler.scale(call(torch.sum, w).full()).backward()
    >>> scaler.step(torch.optim.SGD(blocks, lr=0.5))
    >>> w.full()
    tensor([0.5000, 0.5000, 0.5000, 0.5000], grad_fn=<_RunBackward>)
    """

    def __init__(self, comm: Comm[Any], **options: Any) -> None:
        refuse_no_comm(comm)
        device = comm.device or torch.device("cpu")
        super().__init__(device.type, **options)
        self.comm = comm

    def scale(self, outputs: Any) -> Any:
        """A tensor, or an iterable of tensors, times the scale."""
        if is_dtensor(outputs):
            raise ArgumentError(
                f"a GradScaler scales tensors, and this is a DTensor of type {outputs.type}.",
                hint="Pass loss.full(), or use fd.optim.LossScale, which scales DTensors.",
            )
        return super().scale(outputs)

    def unscaled(self, flags: dict[torch.device, torch.Tensor]) -> dict[torch.device, torch.Tensor]:
        """The flag of all ranks, in place of those of this one."""
        comm: Any = self.comm
        if comm.rank is None:  # one optimizer has the gradients of all ranks
            return flags
        device = comm.device
        scalars = [flag.to(device).reshape(()) for flag in flags.values()]
        flag = torch.stack(scalars).amax() if scalars else torch.zeros((), device=device)
        pending = Layout(comm.mesh, [Partial("max")] * comm.mesh.ndim)
        src = TensorType((), torch.float32, pending)
        agreed = run(plan(src, comm.mesh.layout(), cost=comm.cost), flag, comm)
        return {device: agreed}
