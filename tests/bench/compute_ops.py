"""The time of an op when collectives are free: plain torch, `fdtensor.call` and torch DTensor.

One rank of a pretended world of 4, with blocks of 8 by 8: activations are sharded over rows and
weights replicated. Forward + backward takes the gradients of all operands. Those of weights are
pending after it: `call` reduces them, as the cotangent of a replicated tensor is replicated, and
DTensor leaves them for later; `collectives` tells how many each of them ran. First calls are
with types that the process has not seen, after another op has warmed up all three.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor as TorchDTensor

from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.plans.cost import NCCL
from fdtensor.runtime.funcol import FuncolComm
from fdtensor.tensors.call import call
from fdtensor.tensors.connect import from_local
from fdtensor.tensors.dtensor import DTensor
from tests.bench.timing import Counted, interleaved, once, ratio
from tests.bench.traffic import as_torch, device_mesh

__all__ = ["OPS", "Op", "OpTimes", "Three", "op_times"]

MESH = Mesh(tp=4)

WIDTH = 8

ROWS = 8
"""Rows of a block, but in first calls."""

NEW_ROWS = {False: (16, 24, 32), True: (40, 48, 56)}
"""Rows of a block in first calls, without backward and with: types that no cache knows."""


@attrs.frozen
class Operand:
    """An activation, `(rows, WIDTH)` on each rank, or a weight of `ndim` dims, replicated."""

    name: str
    ndim: int = 2
    weight: bool = False

    def type(self, rows: int) -> TensorType:
        """Its type where each rank has `rows` rows of activations."""
        if self.weight:
            return TensorType((WIDTH,) * self.ndim, torch.float32, MESH.layout(*[None] * self.ndim))
        return TensorType((rows * MESH.size, WIDTH), torch.float32, MESH.layout("tp", None))


X, Y = Operand("x"), Operand("y")
W, B, C = Operand("w", 2, True), Operand("b", 1, True), Operand("c", 1, True)


@attrs.frozen
class Op:
    """A torch function and its arguments, which may have operands in lists."""

    name: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    smooth: bool = True
    """Whether it has a derivative."""

    @property
    def operands(self) -> tuple[Operand, ...]:
        """The operands, in order."""
        flat = [a for arg in self.args for a in (arg if isinstance(arg, list) else [arg])]
        return tuple([a for a in flat if isinstance(a, Operand)])

    def filled(self, by: Mapping[Operand, Any]) -> tuple[Any, ...]:
        """The arguments with these tensors for its operands."""

        def one(arg: Any) -> Any:
            if isinstance(arg, list):
                return [one(a) for a in arg]
            return by[arg] if isinstance(arg, Operand) else arg

        return tuple([one(arg) for arg in self.args])


WARM = Op("neg", torch.neg, (X,))

OPS = (
    Op("detach", torch.detach, (X,), smooth=False),
    Op("view", torch.Tensor.view, (X, -1, 2, WIDTH // 2)),
    Op("transpose", torch.transpose, (X, 0, 1)),
    Op("add", torch.add, (X, Y)),
    Op("mul", torch.mul, (X, Y)),
    Op("relu", torch.relu, (X,)),
    Op("sum(1)", torch.sum, (X, 1)),
    Op("mm", torch.mm, (X, W)),
    Op("linear", F.linear, (X, W, B)),
    Op("layer_norm", F.layer_norm, (X, (WIDTH,), B, C)),
    Op("softmax", torch.softmax, (X, -1)),
    Op("split", torch.split, (X, WIDTH // 2, 1)),
    Op("cat", torch.cat, ([X, Y], 1)),
)
"""The ops that everyone is measured on."""


@attrs.frozen
class Three:
    """Microseconds of the three, medians; and the median ratio of rounds."""

    plain: float
    call: float
    dtensor: float
    dtensor_to_call: float


@attrs.frozen
class OpTimes:
    """What an op takes; `both` is forward + backward, None for what has no derivative."""

    op: str
    forward: Three
    both: Three | None
    first: Three
    first_both: Three | None
    collectives: tuple[int, int]
    """Of forward + backward: those of `call` and of DTensor."""


def op_times(op: Op, rounds: int, count: int) -> OpTimes:
    """The op on one rank of a pretended world of 4; `count` calls a loop."""
    for smooth in (False, True):
        for one in _calls(WARM, ROWS, smooth).values():
            one()
    first, forward = _measured(op, False, rounds, count)
    first_both = both = None
    collectives = (0, 0)
    if op.smooth:
        first_both, both = _measured(op, True, rounds, count)
        known = _calls(op, ROWS, True)
        known["call"]()  # agrees on its programs
        collectives = (Counted.during(known["call"])[1], Counted.during(known["dtensor"])[1])
    return OpTimes(op.name, forward, both, first, first_both, collectives)


def _measured(op: Op, smooth: bool, rounds: int, count: int) -> tuple[Three, Three]:
    """First calls, and calls later."""
    first: dict[str, list[float]] = {"plain": [], "call": [], "dtensor": []}
    for rows in NEW_ROWS[smooth]:
        for name, one in _calls(op, rows, smooth).items():
            first[name].append(once(one))
    return _three(first), _three(interleaved(_calls(op, ROWS, smooth), rounds, count))


def _three(taken: Mapping[str, list[float]]) -> Three:
    plain, ours, theirs = (taken[name] for name in ("plain", "call", "dtensor"))
    return Three(median(plain), median(ours), median(theirs), ratio(theirs, ours))


def _calls(op: Op, rows: int, smooth: bool) -> dict[str, Callable[[], Any]]:
    """The op, called in three ways; where it is `smooth`, with its backward."""
    comm = FuncolComm(MESH, cost=NCCL)
    types = {a: a.type(rows) for a in op.operands}
    blocks = {
        a: torch.randn(t.local_shape(comm.rank)).requires_grad_(smooth) for a, t in types.items()
    }
    ours = {a: _ours(blocks[a], t, comm) for a, t in types.items()}
    theirs = {a: _theirs(blocks[a], t).requires_grad_(smooth) for a, t in types.items()}
    fn = op.fn
    plain_args, our_args, their_args = map(op.filled, (blocks, ours, theirs))
    leaves, their_leaves = list(blocks.values()), list(theirs.values())
    return {
        "plain": _step(lambda: _list(fn(*plain_args)), leaves, smooth),
        "call": _step(lambda: _locals(call(fn, *our_args)), leaves, smooth),
        "dtensor": _step(lambda: _list(fn(*their_args)), their_leaves, smooth),
    }


def _ours(block: torch.Tensor, type: TensorType, comm: FuncolComm) -> DTensor[torch.Tensor]:
    made = from_local(block.detach(), type, comm)
    return attrs.evolve(made, local=block)  # the block is the leaf of autograd


def _theirs(block: torch.Tensor, type: TensorType) -> TorchDTensor:
    mesh = device_mesh(MESH)
    made: Any = TorchDTensor.from_local(
        block.detach(), mesh, as_torch(type.layout), run_check=False
    )
    return made.detach()


def _step(forward: Callable[[], list[Any]], leaves: list[Any], smooth: bool) -> Callable[[], Any]:
    if not smooth:
        return forward
    cotangents: list[Any] = []

    def both() -> Any:
        outs = forward()
        if not cotangents:
            cotangents.extend(torch.ones_like(out) for out in outs)
        return torch.autograd.grad(outs, leaves, cotangents)

    return both


def _list(made: Any) -> list[Any]:
    return list(made) if isinstance(made, (list, tuple)) else [made]


def _locals(made: Any) -> list[Any]:
    return [out.local for out in _list(made)]
