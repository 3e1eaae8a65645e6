"""`script`: a call under chosen layouts as a program of Python text that runs as it stands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fdtensor.layouts.errors import LayoutError
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.layouts.tree import unflatten
from fdtensor.testing.case import Case
from fdtensor.testing.compare import Tolerance
from fdtensor.testing.layout_case import LayoutCase
from fdtensor.testing.source_text import literal
from fdtensor.testing.sources import Names
from fdtensor.testing.values import full_tensor

__all__ = ["integers", "script", "simple_values"]

_LITERAL = 24
"""Larger tensors are not written out where a seed makes them."""


def simple_values(case: Case, fails: Callable[[Case], bool]) -> Case:
    """The case with small integers for values, for each tensor with which it still `fails`."""
    tensors = case.tensors
    for i in sorted(range(len(tensors)), key=lambda i: tensors[i].dtype == torch.bool):
        simple = list(tensors)
        simple[i] = _seeded(tensors[i], i)
        other = case.with_tensors(simple)
        if not torch.equal(simple[i], tensors[i]) and fails(other):
            case, tensors = other, simple
    return case


def integers(case: Case) -> Case:
    """The case with small integers for all floats."""
    floats = [t.is_floating_point() or t.is_complex() for t in case.tensors]
    pairs = enumerate(zip(case.tensors, floats, strict=True))
    return case.with_tensors([_seeded(t, i) if smooth else t for i, (t, smooth) in pairs])


def script(case: Case, setting: LayoutCase, tolerance: Tolerance) -> str:
    """The text of a program that calls `assert_same_on_layouts`."""
    names = Names()
    function = names.spelled(case.f, "f")
    leaves, drawn = list(case.given), case.tensors
    for i, (place, tensor) in enumerate(zip(case.places, drawn, strict=True)):
        leaves[place] = tensor
        name = names.known[id(tensor)] = names.fresh(f"x{i}")
        names.kept.append(tensor)
        names.lines.append(f"{name} = {_tensor(tensor, i, names)}")
    args, kwargs = unflatten(case.tree, leaves)
    call = [function, *(names.spelled(value, "value") for value in args)]
    call += [f"{name}={names.spelled(value, name)}" for name, value in kwargs.items()]
    layouts = "".join(f"        {layout!r},\n" for layout in setting.layouts)
    options: dict[str, Any] = {"seed": setting.seed if _pending(setting) else 0}
    if any(strides is not None for strides in setting.strides):
        options["strides"] = list(setting.strides)
        names.imports["from fdtensor.testing import Strides"] = None
    options |= {"grad": case.grad, "rtol": tolerance.rtol, "atol": tolerance.atol}
    plain = {"seed": 0, "grad": False, "rtol": None, "atol": None, "strides": None}
    call += [f"{name}={value!r}" for name, value in options.items() if value != plain[name]]
    if case.key is not None:
        call.append(f"key={names.spelled(case.key, 'key')}")
    if case.on_missing_rule != "replicate":
        call.append(f"on_missing_rule={case.on_missing_rule!r}")
    if case.spread is not None:
        call.append(f"spread={names.spelled(case.spread, 'spread')}")
    head = [
        *names.imports,
        "from fdtensor import *",
        "from fdtensor.testing import assert_same_on_layouts",
    ]
    body = "".join(f"    {part},\n" for part in call)
    end = f"assert_same_on_layouts(\n{body}    layouts=[\n{layouts}    ],\n)"
    return "\n".join(["import torch", *head, "", *names.lines, "", end])


def _pending(setting: LayoutCase) -> bool:
    return any(layout.partial for layout in setting.layouts)


def _seeded(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    """Small integers in place of a tensor."""
    try:
        whole = TensorType(tuple(tensor.shape), tensor.dtype, Mesh(one=1).layout())
    except LayoutError:
        return tensor
    return full_tensor(whole, seed)


def _tensor(tensor: torch.Tensor, seed: int, names: Names) -> str:
    """A tensor as source: its values, or its type and the seed that makes them, or its file."""
    shape, dtype = tuple(tensor.shape), tensor.dtype
    if tensor.numel() <= _LITERAL:
        return literal(tensor)
    if torch.equal(_seeded(tensor, seed), tensor):
        names.imports["from fdtensor.testing import full_tensor"] = None
        return f"full_tensor(TensorType({shape!r}, {dtype!r}, Mesh(one=1).layout()), seed={seed})"
    return names.filed(tensor, "tensor")
