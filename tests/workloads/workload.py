"""`Workload`: a function at its real size beside a program by hand; `measured`: what both cost."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping
from contextvars import ContextVar
from typing import Any

import attrs
import optree
import torch

from fdtensor import Layout, Mesh, Program, TensorType, cost, func, shard_map, trace

__all__ = [
    "Cost",
    "Function",
    "Laid",
    "Measured",
    "Workload",
    "at",
    "exact",
    "half",
    "measured",
    "single",
    "widest",
]

Sizes = Mapping[str, int]
Function = Callable[..., Any]
Laid = Callable[[Mesh], Layout]


def at(*dims: Any) -> Laid:
    """The layout of a mesh that cuts dims by these axes."""
    return lambda mesh: mesh.layout(*dims)


# --- precision -----------------------------------------------------------------------------------

_EXACT: ContextVar[bool] = ContextVar("exact", default=False)


@contextlib.contextmanager
def exact() -> Generator[None]:
    """A context in which workloads compute in float64, so that results can be compared closely."""
    token = _EXACT.set(True)
    try:
        yield
    finally:
        _EXACT.reset(token)


def half(t: torch.Tensor) -> torch.Tensor:
    """The tensor in bf16."""
    return t if _EXACT.get() else t.bfloat16()


def single(t: torch.Tensor) -> torch.Tensor:
    """The tensor in float32."""
    return t if _EXACT.get() else t.float()


def widest(t: torch.Tensor) -> torch.Tensor:
    """An argument as workloads take it: in float64 or complex128 where they are exact."""
    if not _EXACT.get() or not (t.is_floating_point() or t.is_complex()):
        return t
    return t.to(torch.complex128 if t.is_complex() else torch.float64)


# --- workloads -----------------------------------------------------------------------------------


@attrs.frozen
class Workload:
    """A plain function of torch, its arguments, and what one would write by hand for it."""

    name: str
    mesh: Mesh
    f: Function
    """The function of full tensors, which knows nothing of ranks."""
    by_hand: Function
    """The function of this rank's blocks, which calls the collectives."""
    args: Callable[[Sizes], tuple[Any, ...]]
    """Its arguments at these sizes: full tensors."""
    layouts: Any
    """Those of the arguments, a prefix: a layout for each leaf or for all below."""
    outs: Any
    """Those of the result, a prefix."""
    real: Sizes
    small: Sizes
    grad: int | tuple[int, ...] | None = None
    """The arguments whose gradients are asked for; `f` and `by_hand` then give a loss."""
    max_bytes: int | None = None
    at_most: float = 1.1
    """What the automatic program may receive for each byte of the one by hand."""
    slower: float = 1.1
    """What it may take for each second of that one."""
    why: str = ""
    """Why one of these is more than 1.1."""

    @property
    def small_mesh(self) -> Mesh:
        """The mesh of a small run: four ranks at most."""
        sizes = dict(zip(self.mesh.axes, self.mesh.sizes, strict=True))
        while (largest := max(sizes, key=lambda a: sizes[a])) and Mesh(**sizes).size > 4:
            sizes[largest] //= 2
        return Mesh(**sizes)

    @property
    def function(self) -> Function:
        return self.f if self.grad is None else torch.func.grad(self.f, self.grad)

    def hand(self, mesh: Mesh) -> Function:
        """The function of full tensors that the one by hand is on a mesh."""
        ins, outs = _on(mesh, self.layouts), _on(mesh, self.outs)
        if self.grad is None:
            return shard_map(self.by_hand, mesh, ins, outs)
        return func.grad(shard_map(self.by_hand, mesh, ins, mesh.layout()), self.grad)

    def types(self, sizes: Sizes, mesh: Mesh) -> tuple[Any, ...]:
        """The types of the arguments; nothing of that size is held."""
        with torch.device("meta"):
            args = self.args(sizes)
        layouts = optree.tree_broadcast_prefix(self.layouts, args, none_is_leaf=True)

        def typed(leaf: torch.Tensor, laid: Laid) -> TensorType:
            return TensorType(leaf.shape, widest(leaf).dtype, laid(mesh))

        return optree.tree_map(typed, args, layouts)  # type: ignore[return-value]

    def budget(self, mesh: Mesh) -> int | None:
        """What a rank may hold: more of fewer ranks, and four times as much in float64."""
        if self.max_bytes is None:
            return None
        return self.max_bytes * self.mesh.size // mesh.size * (4 if _EXACT.get() else 1)

    def program(self, sizes: Sizes, mesh: Mesh, as_if: Program | None = None) -> Program:
        """What fdtensor makes of the plain function."""
        types, outs = self.types(sizes, mesh), _on(mesh, self.outs)
        options = {"max_bytes": self.budget(mesh)} if as_if is None else {"as_if": as_if}
        return trace(self.function, *types, out_layouts=outs, **options)

    def program_by_hand(self, sizes: Sizes, mesh: Mesh) -> Program:
        """The program by hand, by the same cost model."""
        return trace(self.hand(mesh), *self.types(sizes, mesh), out_layouts=_on(mesh, self.outs))


def _on(mesh: Mesh, tree: Any) -> Any:
    return optree.tree_map(lambda laid: laid(mesh), tree)


# --- what they cost ------------------------------------------------------------------------------


@attrs.frozen
class Cost:
    """What a program receives on a rank, takes and holds."""

    received: int
    """Bytes."""
    seconds: float
    """By the cost model: collectives and arithmetic, of which some overlap."""
    peak: int
    """Bytes of the rank that holds the most, arguments and results counted."""
    collectives: int

    @classmethod
    def of(cls, program: Program) -> Cost:
        seconds = cost.timeline(program).seconds
        return cls(program.received_bytes, seconds, program.peak_bytes, len(program.collectives))


@attrs.frozen
class Measured:
    """The cost of the automatic program, and of the one by hand."""

    workload: Workload
    automatic: Cost
    by_hand: Cost

    @property
    def of_bytes(self) -> float:
        """What the automatic program receives for each byte of the one by hand."""
        return _ratio(self.automatic.received, self.by_hand.received)

    @property
    def of_seconds(self) -> float:
        """How long it takes for each second of the one by hand."""
        return _ratio(self.automatic.seconds, self.by_hand.seconds)


def _ratio(a: float, b: float) -> float:
    return 1.0 if a == b else a / b if b else float("inf")


def measured(workload: Workload) -> Measured:
    """Both programs of a workload at its real size, beside one another."""
    automatic = workload.program(workload.real, workload.mesh)
    by_hand = workload.program_by_hand(workload.real, workload.mesh)
    return Measured(workload, Cost.of(automatic), Cost.of(by_hand))
