"""`selected`: the results of two functions, of which a predicate says which one counts.

Both run, and no value or derivative of the other one gets through: what a function reads from
around it passes a gate that lets no cotangent back where its function does not count. A gradient
that is infinite there is left out, and not multiplied by zero.
"""

# pyright: reportIncompatibleMethodOverride=false
# the static methods of an autograd.Function have the parameters that torch names

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fdtensor.layouts.callsite import user_line
from fdtensor.layouts.errors import TraceError
from fdtensor.layouts.tree import flatten, unflatten
from fdtensor.ops.call_recorder import CallRecorder
from fdtensor.ops.functional import innermost
from fdtensor.ops.mapped import mapped
from fdtensor.ops.select import select, zeros_beside
from fdtensor.ops.transparent import control_flow

__all__ = ["selected"]


def selected(
    which: torch.Tensor,
    functions: tuple[Callable[..., Any], Callable[..., Any]],
    operands: Sequence[Any],
) -> Any:
    """The pytree that the first function gives where `which` holds, else that of the second."""
    leaves, spec = flatten(list(operands))
    results = []
    for holds, f in ((which, functions[0]), (~which, functions[1])):
        with _counting(holds), _Gates(holds) as gates:
            results.append(flatten(f(*unflatten(spec, [gates.of(t) for t in leaves]))))
            gates.refuse_written()
    (first, tree), (second, other) = results
    _refuse_different(first, second, tree == other)
    chosen = [
        select(which, a, b) if isinstance(a, torch.Tensor) else a
        for a, b in zip(first, second, strict=True)
    ]
    return unflatten(tree, chosen)


def _counting(holds: torch.Tensor) -> contextlib.AbstractContextManager[None]:
    """A context in which faults of values count where a branch does."""
    checks = CallRecorder.running[-1].checks
    return contextlib.nullcontext() if checks is None else checks.where(holds)


def _refuse_different(first: Sequence[Any], second: Sequence[Any], alike: bool) -> None:
    """Raises `TraceError` where two branches give other structures, shapes, dtypes or values."""
    told = [", ".join(map(_told, leaves)) or "nothing" for leaves in (first, second)]
    if told[0] != told[1] or not alike:
        raise TraceError(
            "the branches of cond give different results.",
            true=told[0],
            false=told[1],
            line=user_line() or "not known",
            hint="Both return one structure, with tensors of the same shapes and dtypes.",
        )


def _told(leaf: Any) -> str:
    """What must be alike of a result."""
    return f"{tuple(leaf.shape)} {leaf.dtype}" if isinstance(leaf, torch.Tensor) else repr(leaf)


class _Gates(TorchFunctionMode):
    """A context in which tensors from around it are read through gates.

    Every function of torch is called with them, so it does not matter how a tensor came inside: as
    an argument, from a closure or as a parameter of a module.
    """

    def __init__(self, counts: torch.Tensor) -> None:
        super().__init__()
        self.counts = counts
        self.inside: dict[int, torch.Tensor] = {}
        """The tensors that were made inside, by their ids, alive."""
        self.gates: dict[int, tuple[torch.Tensor, torch.Tensor, Any]] = {}
        """The tensors from around, each with its gate and the value that is recorded for that."""

    def of(self, t: Any) -> Any:
        """The gate of a tensor from around; anything else as it is."""
        if not isinstance(t, torch.Tensor) or id(t) in self.inside:
            return t  # a number, or what was made inside
        if id(t) not in self.gates:
            smooth = t.is_floating_point() or t.is_complex()
            gate = _Gate.apply(self.counts, t) if smooth else t.clone()
            self.gates[id(t)] = t, gate, _recorded(gate)
            self.inside[id(gate)] = gate
        return self.gates[id(t)][1]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name in _OF_TENSORS_THEMSELVES:
            # a view of one from around gets its gate where it is read
            out = func(*args, **kwargs)
            return mapped(out, self._note) if args and id(args[0]) in self.inside else out
        flow = control_flow(func)
        if flow is not None:
            with self:  # its functions run here too
                return mapped(flow(*args, **kwargs), self._note)
        self._refuse_write(name, args, kwargs)
        args, kwargs = mapped((args, kwargs), self.of)
        out = func(*args, **kwargs)
        mapped(out, self._note)
        return out

    def _note(self, t: torch.Tensor) -> torch.Tensor:
        self.inside[id(t)] = t
        return t

    def _refuse_write(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        writes = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        written = [*args[:1]] if writes else []
        written += [kwargs["out"]] if kwargs.get("out") is not None else []
        for t in written:
            if isinstance(t, torch.Tensor) and id(t) not in self.inside:
                raise _writes(f"by {name} ", t)

    def refuse_written(self) -> None:
        """Raises `TraceError` where a tensor from around was written to, as through a view."""
        for t, gate, value in self.gates.values():
            if _recorded(gate) != value:
                raise _writes("", t)


_OF_TENSORS_THEMSELVES = {
    *("__get__", "__set__", "__len__", "__hash__", "size", "dim", "ndimension", "stride"),
    *("numel", "element_size", "is_floating_point", "is_complex"),
}
"""Functions that read no element of a tensor."""


def _recorded(t: torch.Tensor) -> Any:
    """The value that stands for a tensor at this time."""
    recorder = CallRecorder.running[-1]
    return recorder.known(recorder.fake(innermost(t)))


def _writes(how: str, t: torch.Tensor) -> TraceError:
    return TraceError(
        f"a branch of cond writes {how}to a tensor from around it.",
        tensor=f"{tuple(t.shape)} {t.dtype}",
        line=user_line() or "not known",
        hint="Return the new value from both branches.",
    )


class _Gate(torch.autograd.Function):
    """A value for a branch; its cotangent is zero where the branch does not count."""

    generate_vmap_rule = True

    @staticmethod
    def forward(counts: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.save_for_forward(inputs[0])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (counts,) = ctx.saved_tensors
        return None, select(counts, grad, zeros_beside(grad))

    @staticmethod
    def jvp(ctx: Any, _: Any, x: torch.Tensor) -> torch.Tensor:
        (counts,) = ctx.saved_tensors
        return _Gate.apply(counts, x)  # type: ignore[return-value]
