"""The types of an optimizer's state, and the programs that make and change it."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch

from fdtensor.layouts.free_type import FreeType
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.placement import Cut, Replicate
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.programs.options import Options
from fdtensor.tensors.calls.function import Spmd
from fdtensor.tensors.optim.special import State
from fdtensor.tensors.optim.update import Kind, fresh, shapes, stepped

__all__ = ["Settings", "fresh_program", "settings", "state_types", "step_program"]

Settings = tuple[tuple[str, Any], ...]
"""Options as a key: each name and value."""

CACHED = 256
"""How many functions of DTensors are kept."""


def settings(options: Mapping[str, Any]) -> Settings:
    """Options as a key."""
    return tuple(sorted(options.items()))


def state_types(kind: Kind, options: Settings, param: TensorType) -> dict[str, TensorType]:
    """The types of the state of a parameter, by name; free ones of a free one."""
    return dict(_state_types(kind, options, param, torch.get_default_dtype()))


@functools.lru_cache(maxsize=CACHED)
def _state_types(
    kind: Kind, options: Settings, param: TensorType | FreeType, _default_dtype: torch.dtype
) -> tuple[tuple[str, Any], ...]:
    kinds = shapes(kind, dict(options), param.shape, param.dtype)
    if isinstance(param, FreeType):
        return tuple((name, FreeType(*of)) for name, of in kinds.items())
    return tuple(
        (name, TensorType(shape, dtype, _state_layout(param, shape)))
        for name, (shape, dtype) in kinds.items()
    )


def _state_layout(param: TensorType, shape: tuple[int, ...]) -> Layout:
    """The cuts of the parameter in the dims that state of this shape shares with it."""
    layout = param.cotangent().layout
    if len(shape) != len(param.shape):
        return layout.mesh.layout()
    for axis, placement in zip(layout.mesh.axes, layout.placements, strict=True):
        if isinstance(placement, Cut) and shape[placement.dim] != param.shape[placement.dim]:
            layout = layout.placed(axis, Replicate())
    return layout


@functools.lru_cache(maxsize=CACHED)
def fresh_program(kind: Kind, options: Settings, param: TensorType) -> Spmd[..., Any]:
    """The function from a parameter of this type to its state before the first step."""

    def init(x: torch.Tensor) -> State:
        return fresh(kind, dict(options), x)

    types = state_types(kind, options, param)
    layouts = {name: type.layout for name, type in types.items()}
    return Spmd(init, Options(out_layouts=layouts))


@functools.lru_cache(maxsize=CACHED)
def step_program(kind: Kind, options: Settings) -> Spmd[..., Any]:
    """The function from a parameter with its state, its gradient and numbers to what is after."""

    def step(
        inputs: dict[str, Any], grad: torch.Tensor, numbers: dict[str, torch.Tensor]
    ) -> dict[str, Any]:
        param, state = stepped(kind, dict(options), inputs["param"], grad, inputs["state"], numbers)
        return {"param": param, "state": state}  # like `held`: so it keeps the layouts

    step.__name__ = kind.__name__
    return Spmd(step)
