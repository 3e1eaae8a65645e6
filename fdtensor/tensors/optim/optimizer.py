"""`Optimizer`: one of torch's, as pure functions of pytrees of DTensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import attrs
import torch

from fdtensor.layouts.errors import FdtensorError, NotTorchError
from fdtensor.layouts.free_type import FreeType
from fdtensor.layouts.opaque import opaque
from fdtensor.layouts.signatures import named_arguments
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.layouts.tree import unflatten
from fdtensor.tensors.agreement import told
from fdtensor.tensors.dtensor import DTensor
from fdtensor.tensors.optim.leaves import Params, alike, expected, params_of
from fdtensor.tensors.optim.options import checked, defaults_of, numbers_of, per_leaf, plain
from fdtensor.tensors.optim.row import Row, settled
from fdtensor.tensors.optim.states import fresh_program, settings
from fdtensor.tensors.optim.update import Kind, fresh

__all__ = ["Optimizer"]

Tree = TypeVar("Tree")


@attrs.frozen(eq=False, repr=False)
class Optimizer:
    """An optimizer of torch with its options, as two functions; it holds no state itself.

        opt = fdtensor.optim.AdamW(lr=1e-3)
        state = opt.init(params)
        params, state = opt.step(params, grads, state)

    Parameters are a pytree of DTensors in any layouts, on any meshes of one Comm; inside of a
    traced function they are plain tensors, and the step is traced along. An option is one value, or
    a pytree of values that is a prefix of that of the parameters:
    `weight_decay={"norm": 0.0, "mlp": 0.1}`.

    >>> mesh = Mesh(x=2)
    >>> rows = mesh.layout("x")
    >>> comm = SimulatedComm(mesh)
    >>> params = {"w": distribute(torch.ones(4), rows, comm)}
    >>> opt = fd.optim.SGD(lr=0.5, momentum=0.5)
    >>> state = opt.init(params)
    >>> grads = {"w": distribute(torch.arange(4.0), rows, comm)}
    >>> params, state = opt.step(params, grads, state)
    >>> params["w"].full()
    tensor([ 1.0000,  0.5000,  0.0000, -0.5000])
    >>> print(params["w"].type)
    f32[4@x]
    """

    kind: Kind
    """The class in torch, or one of your own."""
    options: Mapping[str, Any] = attrs.field(converter=plain)
    """Those that were given, by name."""

    def __attrs_post_init__(self) -> None:
        checked(self.kind, self.options)

    if not TYPE_CHECKING:  # checkers know that these are not there

        def __getattr__(self, name: str) -> object:
            raise NotTorchError(
                f"an optimizer of fdtensor has no attribute {name!r}, as it holds no state.",
                hint=_INSTEAD.get(name, "It has init(params) and step(params, grads, state)."),
            )

    def __repr__(self) -> str:
        text = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        return f"{self.kind.__name__}({text})"

    @opaque
    @named_arguments
    def init(self, params: Any) -> Any:
        """The state before the first step: in place of each parameter a dict of tensors.

        State of the shape of the parameter has its layout. State that lacks a dim of it, such as
        rows and columns of Adafactor, is cut as the parameter in the dims that they share; numbers,
        such as counts of steps, are replicated. For `TensorType`s it gives those of the state,
        free ones for free ones.
        """
        parameters = params_of(self.kind, params)
        options = self._options(parameters)
        if any(isinstance(x, (TensorType, FreeType)) for x in parameters.leaves):
            return unflatten(parameters.spec, expected(self.kind, parameters, options))
        if parameters.distributed:
            expected(self.kind, parameters, options)  # raises where there is none
        return unflatten(
            parameters.spec,
            [self._fresh(x, o) for x, o in zip(parameters.leaves, options, strict=True)],
        )

    def _fresh(self, x: Any, options: dict[str, Any]) -> Any:
        if isinstance(x, DTensor):
            with torch.no_grad():
                return fresh_program(self.kind, settings(options), x.type)(x)
        return fresh(self.kind, options, x)

    @opaque
    @named_arguments
    def step(self, params: Tree, grads: Any, state: Any, **numbers: Any) -> tuple[Tree, Any]:
        """The parameters and the state after a step. Collective, where parameters are DTensors.

        `numbers` are options that change from step to step, such as `lr=schedule(i)`: Python
        numbers or one-element tensors, the same on all ranks, or prefix pytrees of them. They are
        inputs of the program, which is traced once. Where a gradient is None the parameter stays.
        Gradients may be pending or in other layouts: those are moved first, together. Parameters
        and state keep their layouts, but that pending parameters are reduced.
        Raises `ValueTreeError`, which names all that does not fit, before anything is sent.
        """
        about = f"a step of {self.kind.__name__}"
        try:
            parameters = params_of(self.kind, params)
            rows = self._rows(parameters, grads, state, numbers)
        except FdtensorError as error:
            told(about, params, error)
            raise
        if parameters.distributed:
            rows = settled(about, rows)
        after = [row.after(self.kind) for row in rows]
        return (
            unflatten(parameters.spec, [param for param, _ in after]),
            unflatten(parameters.spec, [state for _, state in after]),
        )

    def _rows(
        self, params: Params, grads: Any, state: Any, numbers: Mapping[str, Any]
    ) -> list[Row]:
        """Each parameter with what belongs to it."""
        grads, states = params.beside(grads, "grads"), params.beside(state, "state")
        options, per_param = self._options(params), self._numbers(params, numbers)
        rows = list(map(Row.of, params.leaves, grads, states, options, per_param))
        if params.distributed:
            alike(self.kind, params, grads, states, expected(self.kind, params, options))
        return rows

    def _options(self, params: Params) -> list[dict[str, Any]]:
        """The options of each parameter, as they were given once and for all."""
        defaults = defaults_of(self.kind)
        return params.by_leaf(
            {n: per_leaf(n, v, defaults[n], params.spec) for n, v in self._all().items()}
        )

    def _numbers(self, params: Params, numbers: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The numbers of each parameter in this step: its learning rate, and those given."""
        allowed = numbers_of(self.kind)
        for name, value in numbers.items():
            if name not in allowed:
                raise FdtensorError(
                    f"{name} of {self.kind.__name__} cannot change from step to step.",
                    given=repr(value),
                    numbers=", ".join(allowed),
                    hint=f"Give it to {self.kind.__name__}(...): another optimizer goes on with "
                    "the state of this one.",
                )
        rate = {name: value for name, value in self._all().items() if name == "lr"}
        values = {**rate, **numbers}
        return params.by_leaf({n: per_leaf(n, v, 0.0, params.spec) for n, v in values.items()})

    def _all(self) -> dict[str, Any]:
        """All options, given or not."""
        return {**defaults_of(self.kind), **self.options}


_STATE = "State is a value: opt.init(params) gives it, opt.step another; save_checkpoint stores it."
_INSTEAD = {
    "zero_grad": "Leave it out: gradients are values too, and none is added to another.",
    "state_dict": _STATE,
    "load_state_dict": _STATE,
    "state": _STATE,
    "param_groups": "Options may be pytrees by parameter, and numbers change in step(..., lr=...).",
}
"""What to write in place of what the optimizers of torch have."""
