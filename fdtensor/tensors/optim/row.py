"""`Row`: one parameter with its gradient, state and options, and what a step makes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch

from fdtensor.layouts.errors import FdtensorError
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.layouts.words import shown
from fdtensor.programs.options import EVERY_CALL
from fdtensor.tensors.agreement import agreed, noted
from fdtensor.tensors.connect import redistribute
from fdtensor.tensors.dtensor import DTensor
from fdtensor.tensors.optim.states import Settings, settings, step_program
from fdtensor.tensors.optim.update import Kind, stepped

__all__ = ["Row", "settled"]


@attrs.frozen(eq=False)
class Row:
    """One parameter and what belongs to it: DTensors, or plain tensors."""

    param: Any
    grad: Any
    state: Mapping[str, Any]
    fixed: Settings
    """The options that are part of the program."""
    numbers: Mapping[str, Any]
    """The options that are inputs of it."""

    @classmethod
    def of(
        cls,
        param: Any,
        grad: Any,
        state: Any,
        options: Mapping[str, Any],
        changing: Mapping[str, Any],
    ) -> Row:
        """The row of a parameter with these options, of which `given` are those of this step.

        A learning rate is always an input. What is 0 is none: it takes lines out of the program.
        """
        zeros = {n: v for n, v in changing.items() if n != "lr" and _is_zero(v)}
        fixed = {n: v for n, v in {**options, **zeros}.items() if n != "lr"}
        return cls(
            param, grad, state, settings(fixed), {n: changing[n] for n in changing.keys() - zeros}
        )

    @property
    def differentiable(self) -> bool:
        """Whether what comes out has derivatives with respect to what goes in."""
        return ("differentiable", True) in self.fixed

    @property
    def held(self) -> Layout:
        """The layout of the parameter after the step."""
        layout = self.param.layout
        return self.param.type.cotangent().layout if layout.partial else layout

    @property
    def astray(self) -> dict[str, DTensor[Any]]:
        """The parameter and the gradient, where they are not in this layout."""
        both, layout = {"param": self.param, "grad": self.grad}, self.held
        return {n: x for n, x in both.items() if self.grad is not None and x.layout is not layout}

    def after(self, kind: Kind) -> tuple[Any, Any]:
        """The parameter and its state after a step."""
        if self.grad is None:
            return self.param, self.state
        if isinstance(self.param, DTensor):
            return self._distributed(kind)
        tensors = {n: v for n, v in self.numbers.items() if isinstance(v, torch.Tensor)}
        python = {n: v for n, v in self.numbers.items() if n not in tensors}
        options = {**dict(self.fixed), **python}
        return stepped(kind, options, self.param, self.grad, dict(self.state), tensors)

    def _distributed(self, kind: Kind) -> tuple[DTensor[Any], dict[str, DTensor[Any]]]:
        inputs = {"param": self.param, "state": dict(self.state)}
        with torch.set_grad_enabled(self.differentiable):
            out = step_program(kind, self.fixed)(inputs, self.grad, dict(self.numbers))
        param, leaves = out["param"], self.param.comm.leaves(self.param.local)
        if not self.differentiable and any(leaf.requires_grad for leaf in leaves):
            param.requires_grad_()
        return param, out["state"]


def _is_zero(value: Any) -> bool:
    return isinstance(value, (int, float)) and value == 0


def _is_one(value: Any) -> bool:
    """Whether a value has one element, if it is a tensor."""
    if isinstance(value, DTensor):
        return value.type.numel == 1
    return not isinstance(value, torch.Tensor) or value.numel() == 1


def settled(about: str, rows: Sequence[Row]) -> list[Row]:
    """Rows of DTensors that are ready to step, once all ranks agree on them.

    Gradients are in the layouts of their parameters, and numbers on every rank.
    """
    live = [row for row in rows if row.grad is not None]
    if not live:
        return list(rows)
    always = live[0].param.comm.check in EVERY_CALL
    keys = [(row.fixed, repr(row.numbers) if always else sorted(row.numbers)) for row in live]
    agreed(about, [x for row in live for x in (row.param, row.grad)], repr(keys))
    values = [row.numbers[name] for row in live for name in sorted(row.numbers)]
    noted(f"the numbers of {about}", values, [row.param for row in live])
    return _with_numbers(_moved(rows))


def _moved(rows: Sequence[Row]) -> list[Row]:
    moving = {(i, name): x for i, row in enumerate(rows) for name, x in row.astray.items()}
    to = {place: rows[place[0]].held for place in moving}
    moved = list(rows)
    with torch.set_grad_enabled(any(row.differentiable for row in rows)):
        for (i, name), x in redistribute(moving, to).items():
            moved[i] = attrs.evolve(moved[i], **{name: x})
    return moved


def _with_numbers(rows: Sequence[Row]) -> list[Row]:
    known: dict[Any, DTensor[Any]] = {}

    def on(name: str, value: Any, param: DTensor[Any]) -> DTensor[Any]:
        key = value if isinstance(value, (int, float)) else id(value), param.mesh
        if key not in known:
            known[key] = _everywhere(name, value, param)
        return known[key]

    return [
        attrs.evolve(row, numbers={n: on(n, v, row.param) for n, v in row.numbers.items()})
        for row in rows
    ]


def _everywhere(name: str, value: Any, param: DTensor[Any]) -> DTensor[Any]:
    """A number on every rank of the mesh of a parameter."""
    if isinstance(value, DTensor) and _is_one(value):
        return value
    comm = param.comm
    device = comm.device or comm.leaves(param.local)[0].device
    if not isinstance(value, (torch.Tensor, int, float)) or not _is_one(value):
        raise FdtensorError(
            f"{name}={shown(value)} is no number that changes from step to step.",
            hint="Give a Python number or a tensor of one element, as in lr=1e-3.",
        )
    if not isinstance(value, torch.Tensor):
        value = torch.full((), float(value), dtype=torch.float64, device=device)
    value = value.to(device, torch.float64).reshape(())
    type = TensorType((), torch.float64, param.mesh.layout())
    return DTensor(comm.value([value] * comm.width(type)), type, comm)
