"""The step of an optimizer of torch as a pure function of one full parameter, traced or not.

torch's own class does it: it is built on a copy of the parameter, its state is put in, it steps,
and parameter and state are taken out.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from fdtensor.layouts.errors import ValueTreeError
from fdtensor.layouts.torch_private import as_if_compiling, has_init_group, init_group
from fdtensor.tensors.optim.numbers import Numbers
from fdtensor.tensors.optim.special import State, special_of

__all__ = ["Kind", "Options", "built", "fresh", "is_lazy", "misfit", "shapes", "stepped"]

Kind = type[torch.optim.Optimizer]
Options = Mapping[str, Any]


def built(kind: Kind, options: Options, param: torch.Tensor) -> Any:
    """The optimizer of torch on this parameter."""
    special = special_of(kind)
    known = inspect.signature(kind).parameters
    own = {name: value for name, value in options.items() if name not in special.own}
    if "lr" in known and known["lr"].default is inspect.Parameter.empty:
        own = {"lr": 1.0, **own}  # a number of the step comes in its place
    return kind([param], **{**own, **special.options})  # type: ignore[call-arg]


def is_lazy(kind: Kind) -> bool:
    """Whether nothing says what the state is before the first step makes it, as in torch's own."""
    return not has_init_group(kind)


def fresh(kind: Kind, options: Options, param: torch.Tensor) -> State:
    """The state of a parameter before the first step."""
    with _running(kind, options):
        p = _own(param, options)
        p.grad = torch.zeros_like(p)
        optimizer = built(kind, options, p)
        group = optimizer.param_groups[0]
        if not is_lazy(kind):
            init = init_group(optimizer)
            lists = len(inspect.signature(init).parameters) - 1
            init(group, *[[] for _ in range(lists)])
        entries = {**special_of(kind).fresh(group, p), **optimizer.state[p]}
        state = {name: t for name, t in entries.items() if isinstance(t, torch.Tensor)}
        return {name: _like(param, t) for name, t in sorted(state.items())}


def stepped(
    kind: Kind,
    options: Options,
    param: torch.Tensor,
    grad: torch.Tensor,
    state: State,
    numbers: Mapping[str, torch.Tensor],
) -> tuple[torch.Tensor, State]:
    """A parameter and its state after a step; `numbers` are options that are 0-d tensors."""
    values = {name: number.double().reshape(()) for name, number in numbers.items()}
    counts = _counts(kind, options, param, state)
    with _running(kind, options, list(values.values())):
        p = _own(param, options)
        p.grad = _own(grad, options)
        optimizer = built(kind, options, p)
        group = optimizer.param_groups[0]
        group.update(values)
        copies = {n: _own(t, options, n in counts) for n, t in state.items()}
        special_of(kind).before(group, copies)
        optimizer.state[p] = copies
        try:
            inspect.unwrap(kind.step)(optimizer)
        except KeyError as error:  # its own code looks for state
            raise misfit(kind, state, {*state, *error.args}) from error
        after = {n: t for n, t in optimizer.state[p].items() if isinstance(t, torch.Tensor)}
    if after.keys() != state.keys() and (state or not is_lazy(kind)):
        raise misfit(kind, state, after)
    return p.reshape(param.shape), {
        n: _like(param, t.to(state[n].dtype) if n in state else t) for n, t in sorted(after.items())
    }


def misfit(kind: Kind, state: Iterable[str], expected: Iterable[str]) -> ValueTreeError:
    """The error for state that is not that of the optimizer."""
    return ValueTreeError(
        f"this is no state of {kind.__name__}.",
        has=", ".join(sorted(state)) or "nothing",
        needs=", ".join(sorted(expected)) or "nothing",
        hint="Pass what init returned, or the step before, with the same options.",
    )


def shapes(
    kind: Kind, options: Options, shape: Sequence[int], dtype: torch.dtype
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """The shape and dtype of the state of a parameter, by name."""
    state = fresh(kind, options, torch.empty(tuple(shape), dtype=dtype, device="meta"))
    return {name: (tuple(t.shape), t.dtype) for name, t in state.items()}


def _counts(kind: Kind, options: Options, param: torch.Tensor, state: State) -> set[str]:
    """The names of state that is one number for a parameter of any shape, such as "step"."""
    if param.ndim == 0:
        state = fresh(kind, options, param.reshape(1))
    return {name for name, t in state.items() if t.ndim == 0}


def _own(t: torch.Tensor, options: Options, count: bool = False) -> torch.Tensor:
    """A copy to write to; one number is a vector, so that it is not taken for a Python number."""
    copy = (t if options.get("differentiable") else t.detach()).clone()
    if count:
        return copy.double()
    return copy.reshape(1) if t.ndim == 0 else copy


def _like(param: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """State of a parameter that is one number, as one number again."""
    return t.reshape(()) if param.ndim == 0 and t.shape == (1,) else t


@contextlib.contextmanager
def _running(kind: Kind, options: Options, nonzero: Sequence[torch.Tensor] = ()) -> Iterator[None]:
    """Lets torch's code run on tensors that stand for numbers, whether traced or not."""
    names = special_of(kind).names if options.get("exact", True) else {}
    module = inspect.unwrap(kind.step).__globals__
    before = {name: module[name] for name in names if name in module}
    module.update(names)
    grad = torch.set_grad_enabled(bool(options.get("differentiable")))
    try:
        with as_if_compiling(), grad, Numbers(nonzero):
            yield
    finally:
        for name in names:
            module.pop(name)
        module.update(before)
