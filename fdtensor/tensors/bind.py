"""`bind`: a module together with DTensors for its parameters, as a function of DTensors."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch

from fdtensor.layouts.errors import TraceError, ValueTreeError
from fdtensor.layouts.expected import no_argument
from fdtensor.layouts.opaque import opaque
from fdtensor.layouts.tree import flatten, unflatten
from fdtensor.layouts.words import near
from fdtensor.ops.again import given_within
from fdtensor.ops.transparent import recording
from fdtensor.programs.options import Like, Options
from fdtensor.programs.program import Program
from fdtensor.programs.tracer import is_typed
from fdtensor.tensors.calls.function import Spmd
from fdtensor.tensors.dtensor import DTensor
from fdtensor.tensors.tied import first_names, tensors_by_name

__all__ = ["Bound", "bind"]


@attrs.frozen(eq=False, repr=False)
class Bound:
    """A module with DTensors for its parameters: call it as the module, with DTensors."""

    module: torch.nn.Module
    params: Mapping[str, DTensor[Any]]
    """By the names that `module.named_parameters()` and `named_buffers()` give."""
    function: Spmd[..., Any] = attrs.field(alias="function")
    """The forward as a function of `params` and the arguments."""
    updating: Spmd[..., Any]
    """The same, which gives the new buffers too."""

    @opaque
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self.params, *args, **kwargs)

    @opaque
    def updated(self, *args: Any, **kwargs: Any) -> tuple[Any, Bound]:
        """The result of a call, and the module with what the call has written to its buffers.

        They are those among `params`, such as the running statistics of a batch norm in training.

        >>> mesh = Mesh(x=2)
        >>> comm = SimulatedComm(mesh)
        >>> norm = torch.nn.BatchNorm1d(3)
        >>> held = [*norm.named_parameters(), *norm.named_buffers()]
        >>> params = {n: distribute(t.detach(), mesh.layout(), comm) for n, t in held}
        >>> x = distribute(torch.ones(4, 3), mesh.layout("x"), comm)
        >>> y, bound = bind(norm, params).updated(x)
        >>> bound.params["running_mean"].full()
        tensor([0.1000, 0.1000, 0.1000])
        """
        result, written = self.updating(self.params, *args, **kwargs)
        placed = {n: x.redistribute(self.params[n].layout) for n, x in written.items()}
        return result, attrs.evolve(self, params={**self.params, **placed})

    def trace(self, *args: Any, **kwargs: Any) -> Program:
        """The program that a call with these arguments runs."""
        return self.function.trace(self.params, *args, **kwargs)

    def with_params(self, params: Mapping[str, DTensor[Any]]) -> Bound:
        """The same module with other parameters, by the programs that this one has."""
        return attrs.evolve(self, params=_by_first_names(self.module, params))

    def __repr__(self) -> str:
        kind = type(self.module).__name__
        lines = [f"  {name}: {x.type}" for name, x in self.params.items()]
        return "\n".join([f"Bound({kind}, {len(lines)} tensors)", *lines])


def bind(module: torch.nn.Module, params: Mapping[str, DTensor[Any]], **options: Any) -> Bound:
    """`module` as a function of DTensors, with these for its parameters. Differentiable.

    `params` has a DTensor for each name of `module.named_parameters()`, and may have some for those
    of `named_buffers()`; buffers that it lacks are the module's own, the same on all ranks. All
    names of one parameter may have its DTensor. The module stays as it is. `options` are those of
    `spmd`: names and positions of arguments are those of the module's `forward`, of which 0 is the
    first, and "params" is `params`. Raises `ValueTreeError` for a parameter that is missing, is no
    DTensor or has two, and for a name that the module does not have.

    >>> mesh = Mesh(x=2)
    >>> comm = SimulatedComm(mesh)
    >>> module = torch.nn.Linear(6, 4)
    >>> rows = mesh.layout("x")
    >>> params = {n: distribute(p.detach(), rows, comm) for n, p in module.named_parameters()}
    >>> layer = bind(module, params)
    >>> layer
    Bound(Linear, 2 tensors)
      weight: f32[4@x,6]
      bias: f32[4@x]
    >>> x = distribute(torch.ones(3, 6), mesh.layout(), comm)
    >>> torch.allclose(layer(x).full(), module(torch.ones(3, 6)), atol=1e-6)
    True
    """
    params = _by_first_names(module, params)
    wanted = _by_names(Options(**options), _arguments_of(module))
    asked = wanted.out_layouts
    of_both = wanted if asked is None else attrs.evolve(wanted, out_layouts=(asked, None))
    of_module = functools.partial(_of_module, module)
    return Bound(module, params, of_module(_forward, wanted), of_module(_updating, of_both))


def _of_module(module: torch.nn.Module, f: Any, options: Options) -> Spmd[..., Any]:
    own: Any = functools.partial(f, module)  # a closure would not pickle
    own.__name__ = type(module).__name__
    arguments = _arguments_of(module)
    if arguments:
        own_name = any(p.name == "params" for p in arguments)
        name = "params_of_module" if own_name else "params"
        first = inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY)
        own.__signature__ = inspect.Signature([first, *arguments])
    return Spmd(own, options)


def _arguments_of(module: torch.nn.Module) -> list[inspect.Parameter]:
    """The arguments of a module's `forward`, which pickle; none where they are not known."""
    try:
        known = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return []
    none = inspect.Parameter.empty
    return [p.replace(annotation=none, default=none if p.default is none else None) for p in known]


def _by_names(options: Options, arguments: Sequence[inspect.Parameter]) -> Options:
    """The options with the names of arguments in place of their positions."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [p.name for p in arguments if p.kind in positional]
    several = not arguments or any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in arguments)

    def named(argument: Any) -> Any:
        if not isinstance(argument, int) or argument < 0:
            return argument
        if argument >= len(names) and not several:
            raise TraceError(
                f"options of bind name argument {argument}, which the module does not have.",
                arguments=", ".join(names) or "none",
                hint="Count the arguments of its forward from 0, without self, or give names.",
            )
        return names[argument] if argument < len(names) else argument + 1  # params come first

    def placed(leaf: Any) -> Any:
        return Like(named(leaf.argument)) if isinstance(leaf, Like) else leaf

    leaves, spec = flatten(options.out_layouts)
    donate, dynamic = options.donate, options.dynamic
    return attrs.evolve(
        options,
        out_layouts=unflatten(spec, [*map(placed, leaves)]),
        donate=named(donate) if isinstance(donate, (int, str)) else tuple(map(named, donate)),
        dynamic=dynamic and {named(argument): d for argument, d in dynamic.items()},
    )


def _forward(
    module: torch.nn.Module, params: dict[str, torch.Tensor], /, *args: Any, **kwargs: Any
) -> Any:
    within = functools.partial(_within, module, params)
    with given_within(lambda f: functools.partial(within, f)):
        return torch.func.functional_call(module, params, args, kwargs)


class _Holder(torch.nn.Module):
    """A module whose parameters are those of another one, and that calls a function."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, f: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return f(*args, **kwargs)


def _within(
    module: torch.nn.Module,
    params: Mapping[str, torch.Tensor],
    f: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """The result of a function while the module has these parameters."""
    named = {f"module.{name}": x for name, x in params.items()}
    return torch.func.functional_call(_Holder(module), named, (f, args, kwargs))


def _updating(
    module: torch.nn.Module, params: dict[str, torch.Tensor], /, *args: Any, **kwargs: Any
) -> Any:
    result = _forward(module, params, *args, **kwargs)
    return result, {n: params[n] for n, _ in module.named_buffers() if n in params}


def _by_first_names(module: torch.nn.Module, params: Mapping[str, Any]) -> Mapping[str, Any]:
    """The DTensors by the first names of parameters and buffers.

    Raises where a parameter is missing or has two DTensors, and where a name is not of the module.
    """
    if not isinstance(module, torch.nn.Module):
        raise no_argument("module", module, "torch.nn.Module", "Write bind(module, params).")
    if not isinstance(params, Mapping):
        names = "Write {name: DTensor}, by the names of module.named_parameters()."
        raise no_argument("params", params, "mapping of names", names)
    first_of = first_names(tensors_by_name(module))
    given: dict[str, Any] = {}
    for name, x in params.items():
        given.setdefault(first_of.get(name, name), x)
    missing = [name for name, _ in module.named_parameters() if name not in given]
    unknown = [name for name in params if name not in first_of]
    if missing or unknown:
        sentences = [f"{len(missing)} parameters are missing"] if missing else []
        sentences += [f"{len(unknown)} names are not of {type(module).__name__}"] if unknown else []
        raise ValueTreeError(
            f"{' and '.join(sentences)}.",
            missing=", ".join(missing[:4]) or "none",
            unknown=", ".join(unknown[:4]) or "none",
            hint=f"{near(unknown[0], first_of) if unknown else ''}Give a DTensor for each name of "
            "module.named_parameters().",
        )
    for name, x in params.items():
        if x is not given[first_of[name]]:
            raise ValueTreeError(
                f"{first_of[name]!r} and {name!r} are one tensor of the module, with two DTensors.",
                hint="Give both the same one, or one of the names.",
            )
    _refuse_plain(params)
    return {first_of[name]: x for name, x in params.items()}


def _refuse_plain(params: Mapping[str, Any]) -> None:
    """Raises where a parameter is no DTensor, and no tensor of a function that is recorded."""
    plain = [name for name, x in params.items() if not is_typed(x)]
    if plain and not recording():
        raise ValueTreeError(
            f"{len(plain)} of {len(params)} parameters are no DTensors.",
            first=f"{plain[0]}: {type(params[plain[0]]).__name__}",
            hint="Write distribute(parameter.detach(), layout, comm) for each.",
        )
