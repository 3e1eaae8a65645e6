"""The options of an optimizer: those of its class in torch, each one value or a pytree of them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import optree
import torch

from fdtensor.layouts.errors import FdtensorError, ValueTreeError
from fdtensor.layouts.expected import no_argument
from fdtensor.layouts.tree import broadcast_prefix, flatten, mismatches, unflatten
from fdtensor.layouts.words import first_sentence, near, shown
from fdtensor.tensors.optim.special import special_of
from fdtensor.tensors.optim.update import Kind, built

__all__ = ["checked", "defaults_of", "numbers_of", "per_leaf", "plain"]

LAUNCHES = {
    "foreach": "a program is of one parameter",
    "fused": "a program is made of ops that say what they compute",
}
"""Options that say how kernels are launched, without another result, and why they cannot be on."""


def defaults_of(kind: Kind) -> dict[str, Any]:
    """The options of an optimizer and their defaults, None where there is none."""
    parameters = list(inspect.signature(kind).parameters.values())[1:]
    defaults = {p.name: None if p.default is p.empty else p.default for p in parameters}
    return {**defaults, **special_of(kind).own}


def plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options without tensors: those of one element as Python numbers."""
    if not isinstance(options, Mapping):
        hint = "Write Optimizer(torch.optim.AdamW, {'lr': 1e-3})."
        raise no_argument("options", options, "mapping of options by name", hint)
    return {name: _plain(name, option) for name, option in options.items()}


def _plain(name: str, option: Any) -> Any:
    """An option without tensors."""
    leaves, spec = flatten(option, is_leaf=lambda x: x is None)
    for x in leaves:
        if isinstance(x, torch.Tensor) and x.numel() != 1:
            hint = "Give a Python number, a tensor of one element, or a pytree of them."
            raise no_argument(name, x, "single number", hint)
    return unflatten(spec, [x.item() if isinstance(x, torch.Tensor) else x for x in leaves])


def numbers_of(kind: Kind) -> list[str]:
    """The options that are one number, which may change from step to step."""
    numbers = {int, float}
    return [n for n, default in defaults_of(kind).items() if n == "lr" or type(default) in numbers]


def checked(kind: Kind, options: Mapping[str, Any]) -> None:
    """Raises `FdtensorError` for an optimizer or options that cannot be."""
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise FdtensorError(
            f"{shown(kind)} is no optimizer of torch.",
            hint="Pass its class and its options: Optimizer(torch.optim.AdamW, {'lr': 1e-3}).",
        )
    name, special, defaults = kind.__name__, special_of(kind), defaults_of(kind)
    if special.refused:
        raise FdtensorError(
            f"{name} cannot step on DTensors: {special.refused}.", hint=special.instead
        )
    for option, value in options.items():
        if option not in defaults:
            raise FdtensorError(
                f"{name} has no option {option!r}.",
                options=", ".join(defaults),
                hint=f"{near(option, defaults)}Parameters are not among them: opt.init(params) "
                "takes those.",
            )
        reason = {**LAUNCHES, **special.without}.get(option)
        if reason is not None and value:
            raise FdtensorError(
                f"{option}={value!r} is not for {name} on DTensors: {reason}.",
                hint=f"Leave {option} out.",
            )
    for chosen in _combinations(options, defaults):
        try:
            built(kind, chosen, torch.zeros(2, 2))
        except (ValueError, TypeError, RuntimeError, IndexError) as error:
            text = ", ".join(f"{n}={v!r}" for n, v in chosen.items())
            raise FdtensorError(
                f"{name}({text}) cannot be: {first_sentence(error)}.",
                hint=f"Give it the values that torch.optim.{name} takes.",
            ) from error


def _combinations(
    options: Mapping[str, Any], defaults: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """The options for torch to check: all of one value, and one value of a pytree at a time."""
    values = {name: _values(value, defaults[name]) for name, value in options.items()}
    single = {name: entries[0] for name, entries in values.items() if len(entries) == 1}
    yield single
    for name, entries in values.items():
        for value in entries[1:] and entries:
            yield {**single, name: value}


def _values(option: Any, default: Any) -> list[Any]:
    if not _splits(option):
        return [option]
    return flatten(option, is_leaf=lambda x: _is_value(x, default))[0]


def _splits(value: Any) -> bool:
    return isinstance(value, (Mapping, list, tuple))


def _is_value(x: Any, default: Any) -> bool:
    """Whether this is one value of an option: a tuple only where the default is one, as long."""
    if isinstance(default, tuple) and isinstance(x, (tuple, list)):
        return len(x) == len(default) and all(n is None or isinstance(n, (int, float)) for n in x)
    return not _splits(x)


def per_leaf(name: str, option: Any, default: Any, spec: optree.PyTreeSpec) -> Sequence[Any]:
    """The value of an option for each parameter, of whose pytree it may be a prefix."""
    if not _splits(option):
        return [option] * spec.num_leaves
    skeleton = unflatten(spec, [object()] * spec.num_leaves)  # no numbers: those may be an option

    def is_leaf(x: Any) -> bool:
        return _is_value(x, default)

    try:
        per_param = broadcast_prefix(option, skeleton, is_leaf)
    except ValueError as error:
        raise ValueTreeError(
            f"{name} is no prefix of the pytree of parameters.",
            **mismatches(option, skeleton, is_leaf, name),
            hint="Give one value, or a pytree of values like the parameters or a prefix of them.",
        ) from error
    return [tuple(value) if isinstance(value, list) else value for value in per_param]
