"""`Checked`: an op's program on given layouts, run on every rank and compared with the plain op."""

from __future__ import annotations

import functools
import random
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch

from fdtensor.layouts.errors import DataDependentError, FdtensorError, TraceError
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.layouts.tree import flatten
from fdtensor.ops.graph import Full, Graph
from fdtensor.ops.line_checks import debug
from fdtensor.ops.recorder import record
from fdtensor.ops.rewrite import rewritten
from fdtensor.plans.collectives import Step, is_local
from fdtensor.plans.cost import NCCL
from fdtensor.programs.assembly import assembled
from fdtensor.programs.program import Program, op_name
from fdtensor.runtime.all_ranks import run_lines
from fdtensor.runtime.simulator import SimulatedComm
from fdtensor.tensors.call import call
from fdtensor.tensors.distribution import distribute
from fdtensor.tensors.dtensor import DTensor
from fdtensor.testing.strides import Strides, strided
from fdtensor.testing.values import block, scatter
from tests.hunt.values import forms_of, stored
from tests.operators.samples import Sample, float_tensors

__all__ = ["Checked", "Result", "even", "gradient_of", "sharded", "tensors_in"]

BYTES = attrs.evolve(NCCL, name="bytes", bandwidth=NCCL.bandwidth / 1e6)
"""Prices by which bytes decide, as they do for larger tensors than those of the database."""


@attrs.frozen
class Result:
    """What came of a sample on some layouts."""

    kind: str
    """`right`, `wrong`, `error`, `refused`; `random` and `none` where there is nothing to check."""
    layouts: str = ""
    text: str = ""
    moves: str = ""
    """`none`, `slice`, `reduce` (or all-to-all) or `gather`: the costliest of the forward."""
    bytes: int = 0
    """Received by the busiest rank in the forward."""
    fallback: str = ""
    """The ops that run on replicated operands for want of a rule, or `data` for want of a shape."""
    sharded: bool = False
    even: bool = False
    peak: float = 1.0
    """Of the forward, against that on replicated operands."""


def tensors_in(out: Any) -> list[torch.Tensor]:
    """The tensors of a pytree."""
    return [t for t in flatten(out)[0] if isinstance(t, torch.Tensor)]


class Checked:
    """A sample, recorded once: forward alone, and forward with gradients."""

    def __init__(self, sample: Sample, derivatives: bool, form: str = "contiguous") -> None:
        self.sample, self.form = sample, form
        self.due = tensors_in(sample.f(*sample.tensors))
        self.fulls = [Full(tuple(t.shape), t.dtype) for t in sample.tensors]
        self.gradient = None
        self.due_gradient: list[torch.Tensor] = []
        smooth = float_tensors(sample.tensors)
        if derivatives and smooth and any(map(_smooth, self.due)):
            self.gradient = gradient_of(sample.f, smooth)
            try:
                self.due_gradient = list(self.gradient(*sample.tensors))
            except (RuntimeError, NotImplementedError):
                self.gradient = None
        self.graphs: dict[bool, Graph | FdtensorError] = {}

    def graph(self, backward: bool) -> Graph:
        """What the forward, or the gradients, record; raises what that raises."""
        if backward not in self.graphs:
            f: Any = self.gradient if backward else self.sample.f
            try:
                made = record(lambda tensors: tensors_in(f(*tensors)), self.fulls)
                self.graphs[backward] = rewritten(made)
            except FdtensorError as error:
                self.graphs[backward] = error
        found = self.graphs[backward]
        if isinstance(found, FdtensorError):
            raise found
        return found

    def result(self, layouts: Sequence[Layout]) -> Result:
        """The sample on these layouts: its values, its gradients and what its forward moves."""
        named = " ".join(f"{'x'.join(map(str, lay.placements))}" for lay in layouts)
        about = functools.partial(Result, layouts=named)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return self._result(layouts, about)
        except Mismatch as wrong:
            return about("wrong", text=str(wrong)[:400])
        except TraceError as error:
            if "random" in str(error):
                return about("random")
            return about("refused", text=str(error)[:400])
        except FdtensorError as error:
            return about("refused", text=str(error)[:400])
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            said = f"{type(error).__name__}: {error} ({where.filename}:{where.lineno})"
            return about("error", text=said[-400:])

    def _result(self, layouts: Sequence[Layout], about: Callable[..., Result]) -> Result:
        sample = self.sample
        types = [TensorType(f.shape, f.dtype, layout) for f, layout in zip(self.fulls, layouts)]
        try:
            program = self.program(False, types)
        except DataDependentError:
            self._on_replicas(types, sample.f, self.due)
            return about("right", moves="gather", fallback="data", sharded=sharded(types))
        self._compare(program, types, self.due, sample.unset, "output")
        if self.gradient is not None:
            try:
                both = self.program(True, types)
                self._compare(both, types, self.due_gradient, sample.unset, "gradient")
            except DataDependentError:
                self._on_replicas(types, self.gradient, self.due_gradient)
        alone = self._alone(layouts[0].mesh)
        return about(
            "right",
            moves=moves_of(program),
            bytes=program.received_bytes,
            fallback=" ".join(sorted({op_name(eqn.op) for eqn in program.eqns if eqn.note})),
            sharded=sharded(types),
            even=all(map(even, types)),
            peak=program.peak_bytes / max(1, alone),
        )

    @functools.cache  # noqa: B019
    def _alone(self, mesh: Any) -> int:
        """The peak of the program on replicated operands."""
        return self.program(
            False, [TensorType(f.shape, f.dtype, mesh.layout()) for f in self.fulls]
        ).peak_bytes

    def program(self, backward: bool, types: Sequence[TensorType]) -> Program:
        graph = self.graph(backward)
        wants = [None] * len(graph.outs)
        return assembled(graph, types[0].mesh, types, wants, BYTES, name=self.sample.f.__name__)

    def _compare(
        self,
        program: Program,
        types: Sequence[TensorType],
        due: Sequence[torch.Tensor],
        unset: bool,
        what: str,
    ) -> None:
        comm = SimulatedComm(program.mesh)
        values = self._blocks(types)
        with debug():
            made = run_lines(program, values, comm)
        if len(made) != len(due):
            raise Mismatch(f"{len(made)} tensors, not {len(due)}")
        for k, (value, type, full) in enumerate(zip(made, program.out_types, due)):
            if (type.shape, type.dtype) != (tuple(full.shape), full.dtype):
                raise Mismatch(f"{what} {k} is {type}, not {full.dtype}{list(full.shape)}")
            if type.layout.partial:
                raise Mismatch(f"{what} {k} is pending: {type}")
            for rank, local in zip(program.mesh.ranks, value, strict=True):
                part = block(full, type, rank)
                if local.shape != part.shape or local.dtype != part.dtype:
                    raise Mismatch(
                        f"{what} {k} {type} on rank {rank} is {local.dtype}{list(local.shape)}, "
                        f"not {part.dtype}{list(part.shape)}"
                    )
                if not unset and not _close(local, part):
                    raise Mismatch(
                        f"{what} {k} {type} on rank {rank}: {_few(local)}, not {_few(part)}"
                    )

    def _blocks(self, types: Sequence[TensorType]) -> list[tuple[torch.Tensor, ...]]:
        """The operands of all ranks, in the memory format that is asked for where they can be."""
        given = []
        for i, (t, type) in enumerate(zip(self.sample.tensors, types)):
            blocks = scatter(t, type, i)
            if self.form == "any":
                blocks = strided(blocks, _drawn(t, i, types))
            elif self.form in forms_of(type.shape, type.dtype, pending=True):
                blocks = tuple(stored(b, self.form) for b in blocks)
            given.append(blocks)
        return given

    def _on_replicas(
        self, types: Sequence[TensorType], f: Callable[..., Any], due: Sequence[torch.Tensor]
    ) -> None:
        """A function whose shapes depend on data, as `call` runs it."""
        comm = SimulatedComm(types[0].mesh)
        args = []
        for i, (t, type) in enumerate(zip(self.sample.tensors, types)):
            if type.layout.partial:
                args.append(DTensor(scatter(t, type, i), type, comm))
            else:
                args.append(distribute(t, type.layout, comm))
        out = flatten(call(f, *args), is_leaf=lambda x: isinstance(x, DTensor))[0]
        made = [t.full() for t in out if isinstance(t, DTensor)]
        if len(made) != len(due):
            raise Mismatch(f"{len(made)} tensors, not {len(due)}")
        for k, (a, b) in enumerate(zip(made, due)):
            if a.shape != b.shape or a.dtype != b.dtype or not _close(a, b):
                raise Mismatch(f"output {k}, on replicas: {_few(a)}, not {_few(b)}")


class Mismatch(Exception):
    """A value that is not that of the plain op."""


def _smooth(t: torch.Tensor) -> bool:
    return t.dtype.is_floating_point or t.dtype.is_complex


def gradient_of(f: Callable[..., Any], smooth: Sequence[int]) -> Callable[..., Any]:
    """The gradients of a weighted sum of what `f` gives."""

    def loss(*tensors: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(())
        for out in tensors_in(f(*tensors)):
            if _smooth(out):
                real = torch.view_as_real(out.resolve_conj()) if out.is_complex() else out
                weights = torch.arange(real.numel(), dtype=torch.float32).cos().reshape(real.shape)
                total = total + (real * weights).sum()
        return total

    return torch.func.grad(loss, argnums=tuple(smooth))


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    if not _smooth(a):
        return torch.equal(a, b)
    if not b.numel():
        return True
    # sums in another order are off by a part of their largest term, which may be many times these
    known = b.abs()[b.isfinite()]
    largest = float(known.max()) if known.numel() else 0.0
    rough = max(3e-5, 4 * torch.finfo(b.dtype).eps)
    return torch.allclose(a, b, rtol=100 * rough, atol=rough * max(1.0, largest), equal_nan=True)


def _few(t: torch.Tensor) -> str:
    return str(t.reshape(-1)[:6].tolist())


def sharded(types: Sequence[TensorType]) -> bool:
    """Whether a tensor is cut."""
    return any(type.layout.cuts(d) for type in types for d in range(len(type.shape)))


def even(type: TensorType) -> bool:
    """Whether its axes divide every dim that they cut."""
    for d, n in enumerate(type.shape):
        count = 1
        for axis in type.layout.cuts(d):
            count *= type.mesh.axis_size(axis)
        if n == 0 or n % count:
            return False
    return True


def moves_of(program: Program) -> str:
    """`none`, `slice`, `reduce` or `gather`: the costliest kind of step that a program takes."""
    kinds = set()
    for step in program.steps:
        if is_local(step):
            kinds.add("slice")
        elif gathers(step):
            kinds.add("gather")
        else:
            kinds.add("reduce")
    for kind in ("gather", "reduce", "slice"):
        if kind in kinds:
            return kind
    return "none"


def gathers(step: Step) -> bool:
    """Whether a step makes ranks hold more of a tensor than before, pending terms aside."""
    if step.src.layout.partial or step.dst.layout.overlaps:  # a halo is no gather
        return False
    before, after = (sum(map(t.local_nbytes, t.mesh.order)) for t in (step.src, step.dst))
    return after > before


def _drawn(tensor: torch.Tensor, place: int, types: Sequence[TensorType]) -> Strides | None:
    """How the blocks of an operand lie in memory: any way, the same for the same layouts."""
    draw = random.Random(f"{place} {types}")
    if draw.random() < 0.3:
        return None
    order = draw.sample(range(tensor.ndim), tensor.ndim)
    return Strides(order, draw.choice((1, 1, 2)))
