"""`Case` and `Outcome`: a call, and what it gives for plain tensors or on the ranks of a mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any

import attrs
import torch

from fdtensor.layouts.errors import TraceError
from fdtensor.layouts.tree import argument, flatten, paths, unflatten
from fdtensor.programs.options import OnMissingRule, Options
from fdtensor.programs.recording import name_of
from fdtensor.tensors.calls.function import Spmd
from fdtensor.tensors.distribution import from_local
from fdtensor.tensors.dtensor import DTensor, is_dtensor
from fdtensor.testing.layout_case import alone

__all__ = ["Case", "Outcome"]


@attrs.frozen(eq=False)
class Outcome:
    """The outcome of a call: the leaves of its result, and gradients by its floating tensors."""

    tree: Any
    leaves: list[Any]
    grads: list[Any]
    faults: tuple[tuple[str, str], ...] = ()
    """The changes to arguments: which one, and what happened to it."""


@attrs.frozen(eq=False)
class Case:
    """That a function of DTensors gives what a plain function gives for the same tensors."""

    f: Callable[..., Any]
    tree: Any
    given: tuple[Any, ...]
    """The leaves of `(args, kwargs)`."""
    spread: Callable[..., Any] | None = None
    """The function of DTensors; None is `spmd(f)`."""
    grad: bool = False
    key: Any = None
    on_missing_rule: OnMissingRule = "replicate"

    @classmethod
    def of(cls, f: Callable[..., Any], args: Any, kwargs: Any, **options: Any) -> Case:
        """The case of a call with these arguments."""
        leaves, tree = flatten((args, kwargs))
        if isinstance(f, Spmd):
            options["spread"] = options.get("spread") or f
            f = f.f
        case = cls(f, tree, tuple(leaves), **options)
        if not case.places:
            raise TraceError(
                f"{case.name} was given no tensor, so there is nothing to lay out.",
                hint="Pass the tensors of an example call: plain ones, with values.",
            )
        return case

    @property
    def name(self) -> str:
        """The name of the function."""
        return name_of(self.f)

    @property
    def places(self) -> list[int]:
        """Which leaves are tensors."""
        return [i for i, leaf in enumerate(self.given) if isinstance(leaf, torch.Tensor)]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors among the arguments."""
        return [self.given[i].detach() for i in self.places]

    def where(self) -> list[str]:
        """The name of each tensor among the arguments: `argument 0['w']`."""
        names = paths(self.tree, "args")
        return [argument(names[i]) for i in self.places]

    def with_tensors(self, tensors: Sequence[torch.Tensor]) -> Case:
        """The case about other tensors."""
        leaves = list(self.given)
        for i, tensor in zip(self.places, tensors, strict=True):
            leaves[i] = tensor
        return attrs.evolve(self, given=tuple(leaves))

    def function(self) -> Callable[..., Any]:
        """The function of DTensors."""
        if self.spread is None:
            return Spmd(self.f, Options(on_missing_rule=self.on_missing_rule))
        if isinstance(self.spread, Spmd):  # without what it has kept, so that it can travel
            return Spmd(self.spread.f, self.spread.options)
        return self.spread

    def arguments(self, tensors: Sequence[Any], key: Any = None) -> tuple[Any, Any]:
        """The arguments of the call, with these in place of its tensors."""
        leaves = list(self.given)
        for i, tensor in zip(self.places, tensors, strict=True):
            leaves[i] = tensor
        args, kwargs = unflatten(self.tree, leaves)
        return args, kwargs if key is None else {**kwargs, "key": key}

    def plain(self, tensors: Sequence[torch.Tensor]) -> Outcome:
        """The outcome of the plain function; with a key, its outcome on one rank."""
        if self.key is not None:
            case = attrs.evolve(self, spread=None)
            outcome = case.on(alone(tensors).spread(tensors), case.function())
            return Outcome(outcome.tree, _wholes(outcome.leaves), _wholes(outcome.grads))
        leaves = [t.detach().clone() for t in tensors]
        if self.grad:
            leaves = [t.requires_grad_(_smooth(t)) for t in leaves]
        with torch.set_grad_enabled(self.grad or torch.is_grad_enabled()):
            args, kwargs = self.arguments([t.clone() for t in leaves])
            out, tree = flatten(self.f(*args, **kwargs))
        grads = self._gradients([t for t in out if isinstance(t, torch.Tensor)], leaves)
        cut = [t.detach() if isinstance(t, torch.Tensor) else t for t in out]
        return Outcome(tree, cut, grads)

    def on(self, tensors: Sequence[DTensor[Any]], function: Callable[..., Any]) -> Outcome:
        """The outcome of the function of DTensors on these, on simulated or real ranks."""
        inputs = list(tensors)
        comm = inputs[0].comm
        leaves_held: list[torch.Tensor] = []
        for i, x in enumerate(tensors if self.grad else ()):
            leaves = [t.detach().requires_grad_(_smooth(t)) for t in comm.leaves(x.local)]
            inputs[i] = from_local(comm.value(leaves), x.type, comm)
            leaves_held += leaves
        args, kwargs = self.arguments(inputs, self.key)
        before = [[t.detach().clone() for t in comm.leaves(x.local)] for x in inputs]
        out, tree = flatten(function(*args, **kwargs), is_leaf=is_dtensor)
        faults = tuple(self._faults(inputs, before, out))
        out = [_settled(x) if isinstance(x, DTensor) else x for x in out]
        results = [_whole(x) for x in out if isinstance(x, DTensor)] if self.grad else []
        gradients = iter(self._gradients(results, leaves_held))
        grads = []
        for x in inputs if self.grad else ():
            if _smooth(x):
                local = [next(gradients) * _terms(x) for _ in comm.leaves(x.local)]
                grads.append(DTensor(comm.value(local), x.type.cotangent(), comm))
        leaves = [x.detach() if isinstance(x, DTensor) else x for x in out]
        return Outcome(tree, leaves, grads, faults)

    def _faults(
        self,
        tensors: Sequence[DTensor[Any]],
        before: Sequence[Sequence[torch.Tensor]],
        results: Sequence[Any],
    ) -> Iterator[tuple[str, str]]:
        """Arguments that were changed, or whose memory a result has: a DTensor never changes."""
        memory = {
            local.untyped_storage().data_ptr()
            for x in results
            if isinstance(x, DTensor) and not any(x is t for t in tensors)
            for local in x.comm.leaves(x.local)
            if local.numel()
        }
        for name, x, copies in zip(self.where(), tensors, before, strict=True):
            blocks = x.comm.leaves(x.local)
            if not all(map(_same, blocks, copies)):
                yield name, "was changed by the call"
            elif any(t.untyped_storage().data_ptr() in memory for t in blocks if t.numel()):
                yield name, "shares its memory with a result"

    def _gradients(
        self, results: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """The derivatives of a random combination of the results, by each tensor that has them."""
        smooth = [t for t in leaves if t.requires_grad]
        loss = [(t * _weights(t, i)).sum() for i, t in enumerate(results) if t.requires_grad]
        if not self.grad or not smooth:
            return []
        if not loss:
            raise TraceError(
                f"no result of {self.name} depends on a floating tensor by a derivative.",
                hint="Leave grad=True out, or let it return what is to be differentiated.",
            )
        total = sum(term.real if term.is_complex() else term.double() for term in loss)
        return list(
            torch.autograd.grad(total, smooth, allow_unused=True, materialize_grads=True)  # type: ignore[arg-type]
        )


def _whole(x: DTensor[Any]) -> torch.Tensor:
    """The full tensor, by the ranks of its mesh: those outside of it are not asked."""
    return x.comm.leaves(x.redistribute(x.mesh.layout()).local)[0]


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same bits, nan among them."""
    fresh = (t.clone(memory_format=torch.contiguous_format).reshape(-1) for t in (a, b))
    return torch.equal(*(t.view(torch.uint8) for t in fresh))


def _smooth(tensor: torch.Tensor | DTensor[Any]) -> bool:
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex


def _terms(x: DTensor[Any]) -> int:
    """How many terms share a cotangent: those of an average."""
    return prod(x.mesh.axis_size(axis) for axis, op in x.layout.partial.items() if op == "avg")


def _settled(x: DTensor[Any]) -> DTensor[Any]:
    """The value without pending terms."""
    layout = x.layout
    return x.redistribute(layout.reduced()) if layout.partial else x


def _weights(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    """A weight for each element of a result."""
    drawn = torch.randint(1, 4, tensor.shape, generator=torch.Generator().manual_seed(seed))
    return drawn.to(tensor.dtype)


def _wholes(leaves: Sequence[Any]) -> list[Any]:
    return [x.full() if isinstance(x, DTensor) else x for x in leaves]
