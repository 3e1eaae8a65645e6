"""The parameters of a pytree beside their gradients and state; every mistake at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import optree
import torch

from fdtensor.layouts.errors import ValueTreeError
from fdtensor.layouts.free_type import FreeType
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.layouts.tree import flatten, mismatches, paths, unflatten
from fdtensor.layouts.words import a_kind
from fdtensor.tensors.dtensor import DTensor
from fdtensor.tensors.optim.states import settings, state_types
from fdtensor.tensors.optim.update import Kind, is_lazy

__all__ = ["Params", "alike", "expected", "params_of"]


@attrs.frozen
class Params:
    """The parameters of a pytree: DTensors, or plain tensors, or types."""

    leaves: Sequence[Any]
    spec: optree.PyTreeSpec
    places: Sequence[str]
    """Where each is, as source."""

    @property
    def distributed(self) -> list[DTensor[Any]]:
        """Those that are DTensors: all or none."""
        return [x for x in self.leaves if isinstance(x, DTensor)]

    def refused(self, kind: Kind, problems: Mapping[str, str]) -> None:
        """Raises `ValueTreeError` where a parameter has a problem, named by its place."""
        if problems:
            raise ValueTreeError(
                f"{len(problems)} of {len(self.leaves)} parameters cannot be those of "
                f"{kind.__name__}.",
                **problems,
                hint="Parameters are DTensors, or inside of a traced function plain tensors, of "
                "floating point or complex numbers.",
            )

    def by_leaf(self, columns: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
        """For each parameter its entry of every column."""
        return [
            {name: column[i] for name, column in columns.items()} for i in range(len(self.leaves))
        ]

    def beside(self, tree: Any, name: str) -> list[Any]:
        """The leaves of a pytree in place of each parameter."""
        try:
            return self.spec.flatten_up_to(tree)
        except ValueError as error:
            skeleton = unflatten(self.spec, range(len(self.leaves)))
            facts = mismatches(skeleton, tree, _is_value, name, is_tree=True)
            raise ValueTreeError(
                f"{name} does not have the structure of the parameters.",
                **(facts or {"problem": str(error)}),
                hint="Pass a pytree like that of the parameters.",
            ) from error


def params_of(kind: Kind, tree: Any) -> Params:
    """The parameters of a pytree. Raises `ValueTreeError` for what are none."""
    leaves, spec = flatten(tree, is_leaf=_is_value)
    params = Params(leaves, spec, paths(spec, "params"))
    mixed = len({_class(x) for x in leaves}) > 1
    problems = {place: _problem(x, mixed) for place, x in zip(params.places, leaves, strict=True)}
    params.refused(kind, {place: problem for place, problem in problems.items() if problem})
    return params


def expected(
    kind: Kind, params: Params, options: Sequence[Mapping[str, Any]]
) -> list[dict[str, TensorType]]:
    """The types of the state of each parameter, without which the learning rate is known.

    Raises `ValueTreeError` for parameters that torch's optimizer refuses, with what it says.
    """
    types, problems = [], {}
    for place, x, own in zip(params.places, params.leaves, options, strict=True):
        fixed = settings({name: value for name, value in own.items() if name != "lr"})
        try:
            type = x.type if isinstance(x, DTensor) else x
            types.append(state_types(kind, fixed, type))
        except (ValueError, TypeError, RuntimeError) as error:
            problems[place] = str(error).rstrip(".")
    params.refused(kind, problems)
    return types


def alike(
    kind: Kind,
    params: Params,
    grads: Sequence[Any],
    states: Sequence[Any],
    types: Sequence[Mapping[str, TensorType]],
) -> None:
    """Raises `ValueTreeError` where gradients or state are not those of the parameters."""
    wrong: dict[str, str] = {}
    for place, x, grad, state, expected_types in zip(
        params.places, params.leaves, grads, states, types, strict=True
    ):
        wrong |= _unlike(f"grads{place.removeprefix('params')}", grad, x.type)
        at = f"state{place.removeprefix('params')}"
        if is_lazy(kind) and isinstance(state, Mapping):
            continue
        if not isinstance(state, Mapping) or state.keys() != expected_types.keys():
            wrong[at] = f"has {_names(state)}, expected {_names(expected_types)}"
            continue
        for name, type in expected_types.items():
            wrong |= _unlike(f"{at}[{name!r}]", state[name], type, optional=False)
    if wrong:
        raise ValueTreeError(
            f"gradients or state do not fit the parameters of {kind.__name__}.",
            **wrong,
            hint="Gradients have the shape, dtype and mesh of their parameters; state is what init "
            "or the step before returned, with the same options.",
        )


def _unlike(place: str, x: Any, type: TensorType, optional: bool = True) -> dict[str, str]:
    if x is None and optional:
        return {}
    if not isinstance(x, DTensor):
        return {place: f"is of type {x.__class__.__name__}, expected {type}"}
    if (x.shape, x.dtype) != (type.shape, type.dtype):
        return {place: f"is {x.type}, expected {type}"}
    if x.mesh is not type.mesh:
        return {place: f"is on {x.mesh!r}, expected {type.mesh!r}"}
    return {}


def _names(state: Any) -> str:
    if not isinstance(state, Mapping):
        return a_kind(state)
    return ", ".join(sorted(map(str, state))) or "nothing"


def _problem(x: Any, mixed: bool) -> str | None:
    if not _is_value(x):
        return f"is of type {type(x).__name__}"
    if mixed and isinstance(x, torch.Tensor):
        return f"is a plain tensor of shape {tuple(x.shape)} beside DTensors"
    if not (x.dtype.is_floating_point or x.dtype.is_complex):
        return f"is of {x.dtype}, which has no gradients"
    return None


def _class(x: Any) -> type:
    return next((k for k in _VALUES if isinstance(x, k)), type(x))


_VALUES = (DTensor, TensorType, FreeType, torch.Tensor)


def _is_value(x: Any) -> bool:
    return isinstance(x, _VALUES)
