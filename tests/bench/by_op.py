"""`python -m tests.bench by-op`: what programs move that run op by op, beside PyTorch's DTensor.

The same functions run on both, on one rank of a pretended world of 4 whose collectives do nothing:
models with the layouts of tensor, sequence and data parallelism, forward and then backward, until
the loss is a number on every rank and each gradient is laid out as its parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch.distributed import tensor as there
from torch.distributed.tensor.parallel import loss_parallel

from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.plans.cost import NCCL
from fdtensor.runtime.funcol import FuncolComm
from fdtensor.tensors.distribution import from_local
from fdtensor.testing.pool import GlooPool
from tests.bench import planning
from tests.bench.count import Received
from tests.bench.traffic import as_torch, device_mesh

__all__ = ["PROGRAMS", "Effort", "Found", "Program", "Side", "Traffic", "measure", "show", "total"]

MESH = Mesh(tp=4)
BATCH, SEQUENCE, WIDTH, HIDDEN, WORDS, HEAD = 4, 16, 64, 256, 128, 8

Cut = int | None
"""The dim that the axis cuts; None where it cuts none."""


def _layout(cut: Cut, ndim: int) -> Layout:
    return MESH.layout(*["tp" if d == cut else None for d in range(ndim)])


class Ours:
    """fdtensor's DTensors."""

    name = "fdtensor"

    def __init__(self) -> None:
        self.comm = FuncolComm(MESH, cost=NCCL)

    def tensor(self, block: torch.Tensor, type: TensorType) -> Any:
        """A tensor of which every rank holds this block."""
        return from_local(block, type, self.comm)

    def moved(self, x: Any, cut: Cut) -> Any:
        """The same tensor in another layout."""
        return x.redistribute(_layout(cut, x.ndim))

    def number(self, loss: Any) -> torch.Tensor:
        """A loss as a number that every rank has."""
        return loss.full()

    def gradients(self, loss: Any, leaves: Sequence[Any]) -> Sequence[Any]:
        """The gradients, in the layouts of the tensors."""
        return torch.autograd.grad(loss.local, [x.local for x in leaves])


class Torch:
    """Those of `torch.distributed.tensor`."""

    name = "DTensor"

    def __init__(self) -> None:
        self.mesh = device_mesh(MESH)

    def tensor(self, block: torch.Tensor, type: TensorType) -> Any:
        """A tensor of which every rank holds this block."""
        placements = as_torch(type.layout)
        return there.DTensor.from_local(block, self.mesh, placements, run_check=False).detach()

    def moved(self, x: Any, cut: Cut) -> Any:
        """The same tensor in another layout."""
        return x.redistribute(self.mesh, as_torch(_layout(cut, x.ndim)))

    def number(self, loss: Any) -> torch.Tensor:
        """A loss as a number that every rank has."""
        return loss.full_tensor()

    def gradients(self, loss: Any, leaves: Sequence[Any]) -> Sequence[Any]:
        """The gradients, in the layouts of the tensors."""
        grads = torch.autograd.grad(loss, leaves)
        pairs = zip(grads, leaves, strict=True)
        return [grad.redistribute(self.mesh, x.placements) for grad, x in pairs]


Side = Ours | Torch


# --- programs ------------------------------------------------------------------------------------

Shape = tuple[int, ...]

Parameters = Mapping[str, tuple[Shape, Cut]]
"""The shape of each, and the dim that the axis cuts."""


@attrs.frozen
class Program:
    """A function of parameters, an input and a target, as it is written for either side."""

    name: str
    function: Callable[..., Any]
    """`(side, params, x) -> y`"""
    parameters: Parameters
    x: tuple[Shape, Cut]
    of_words: bool = False
    """Whether x is of indices, and the loss the likelihood of others; else it is a mean square."""


def _mlp(side: Side, p: Any, x: Any, enter: Cut = None, leave: Cut = None) -> Any:
    h = F.relu(F.linear(side.moved(x, enter), p["up"], p["up_bias"]))
    return side.moved(F.linear(h, p["down"]), leave) + p["down_bias"]


def _sequence_mlp(side: Side, p: Any, x: Any) -> Any:
    return _mlp(side, p, x, leave=1)


def _plain_mlp(_: Side, p: Any, x: Any) -> Any:
    return F.linear(F.relu(F.linear(x, p["up"], p["up_bias"])), p["down"]) + p["down_bias"]


def _block(side: Side, p: Any, x: Any, leave: Cut = None) -> Any:
    def normed(name: str, x: Any) -> Any:
        return side.moved(F.layer_norm(x, (WIDTH,), p[name], p[f"{name}_bias"]), None)

    def heads(name: str) -> Any:
        return F.linear(h, p[name]).unflatten(-1, (-1, HEAD)).transpose(1, 2)

    h = normed("norm1", x)
    q, k, v = heads("query"), heads("key"), heads("value")
    seen = (q @ k.transpose(-1, -2) * HEAD**-0.5).softmax(-1) @ v
    x = x + side.moved(F.linear(seen.transpose(1, 2).flatten(2), p["out"]), leave)
    return x + _mlp(side, p, normed("norm2", x), leave=leave)


def _sequence_block(side: Side, p: Any, x: Any) -> Any:
    return _block(side, p, x, leave=1)


def _language(side: Side, p: Any, x: Any) -> Any:
    h = side.moved(F.embedding(x, p["words"]), None)
    return F.linear(F.layer_norm(h, (WIDTH,), p["norm1"], p["norm1_bias"]), p["out"])


def _sequence_language(side: Side, p: Any, x: Any) -> Any:
    h = side.moved(F.embedding(x, p["words"]), 1)
    h = side.moved(F.layer_norm(h, (WIDTH,), p["norm1"], p["norm1_bias"]), None)
    return F.linear(h, p["out"])


def _norm(name: str) -> Parameters:
    return {name: ((WIDTH,), None), f"{name}_bias": ((WIDTH,), None)}


MLP: Parameters = {
    "up": ((HIDDEN, WIDTH), 0),
    "up_bias": ((HIDDEN,), 0),
    "down": ((WIDTH, HIDDEN), 1),
    "down_bias": ((WIDTH,), None),
}
WHOLE: Parameters = {name: (shape, None) for name, (shape, _) in MLP.items()}
BLOCK: Parameters = {
    **_norm("norm1"),
    **_norm("norm2"),
    **dict.fromkeys(("query", "key", "value"), ((WIDTH, WIDTH), 0)),
    "out": ((WIDTH, WIDTH), 1),
    **MLP,
}
LANGUAGE: Parameters = {
    "words": ((WORDS, WIDTH), 0),
    **_norm("norm1"),
    "out": ((WORDS, WIDTH), 0),
}
ACTIVATIONS, INDICES = (BATCH, SEQUENCE, WIDTH), (BATCH, SEQUENCE)

PROGRAMS = (
    Program("MLP, tensor parallel", _plain_mlp, MLP, (ACTIVATIONS, None)),
    Program("MLP, sequence parallel", _sequence_mlp, MLP, (ACTIVATIONS, 1)),
    Program("MLP, data parallel", _plain_mlp, WHOLE, (ACTIVATIONS, 0)),
    Program("MLP, replicated", _plain_mlp, WHOLE, (ACTIVATIONS, None)),
    Program("transformer block, tensor parallel", _block, BLOCK, (ACTIVATIONS, None)),
    Program("transformer block, sequence parallel", _sequence_block, BLOCK, (ACTIVATIONS, 1)),
    Program("embedding and loss by words", _language, LANGUAGE, (INDICES, None), True),
    Program("the same, sequence parallel", _sequence_language, LANGUAGE, (INDICES, None), True),
)


# --- counts --------------------------------------------------------------------------------------


@attrs.frozen
class Traffic:
    """What a program moves on one side: the collectives, and the bytes that a rank receives."""

    program: str
    side: str
    forward: tuple[str, ...]
    forward_bytes: int
    backward: tuple[str, ...]
    backward_bytes: int


@attrs.frozen
class Effort:
    """How much a run measures: all of it."""


@attrs.frozen
class Found:
    """What a run counted."""

    rows: tuple[Traffic, ...]


def traffic(program: Program, side: Side) -> Traffic:
    """What a program moves on one side, once everything has run before."""

    def leaf(shape: Shape, cut: Cut, dtype: torch.dtype = torch.float32) -> Any:
        type = TensorType(shape, dtype, _layout(cut, len(shape)))
        block = torch.ones(type.local_shape(0), dtype=dtype)
        return side.tensor(block, type).requires_grad_(dtype.is_floating_point)

    params = {name: leaf(*of) for name, of in program.parameters.items()}
    x = leaf(*program.x, torch.int64 if program.of_words else torch.float32)
    target = leaf((BATCH * SEQUENCE,), None, torch.int64)
    leaves = [*params.values(), *([] if program.of_words else [x])]

    def forward() -> Any:
        y = program.function(side, params, x)
        of_words = program.of_words
        loss = F.cross_entropy(y.flatten(0, 1), target) if of_words else y.square().mean()
        side.number(loss.detach())
        return loss

    own_loss = loss_parallel() if isinstance(side, Torch) and program.of_words else nullcontext()
    with own_loss:
        side.gradients(forward(), leaves)
        with Received() as first:
            loss = forward()
        with Received() as second:
            side.gradients(loss, leaves)
    ops = tuple(first.ops), first.bytes, tuple(second.ops), second.bytes
    return Traffic(program.name, side.name, *ops)


def measure(alone: GlooPool, _: Effort, tick: Callable[..., None] = lambda *_: None) -> Found:
    """The traffic of all programs, on a pool of one rank, whose process group is replaced."""
    alone.run(planning.pretend, 0, MESH.size)
    rows: list[Traffic] = []
    for i, program in enumerate(PROGRAMS):
        tick(program.name, 0)
        rows += alone.run(_on_both, i, timeout=300)[0]
        tick(program.name, 1)
    return Found(tuple(rows))


def _on_both(number: int) -> list[Traffic]:
    return [traffic(PROGRAMS[number], side) for side in (Ours(), Torch())]


def total() -> int:
    """How many measurements a run has."""
    return len(PROGRAMS)


def show(console: Console, found: Found) -> None:
    """Prints the table."""
    table = Table(title="Collectives, and bytes that a rank receives")
    for column in ("program", "forward: fdtensor", "DTensor", "backward: fdtensor", "DTensor"):
        table.add_column(column, justify="left" if column == "program" else "right")
    for ours, theirs in zip(found.rows[::2], found.rows[1::2], strict=True):
        table.add_row(
            ours.program,
            *(f"{len(t.forward)}, {t.forward_bytes:,} B" for t in (ours, theirs)),
            *(f"{len(t.backward)}, {t.backward_bytes:,} B" for t in (ours, theirs)),
        )
    console.print(table)
