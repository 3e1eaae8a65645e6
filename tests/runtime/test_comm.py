"""`Comm` is a protocol: a third one, which only counts bytes, runs what the others run."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from fdtensor import (
    Comm,
    DTensor,
    Mesh,
    Plan,
    TensorType,
    plan,
    redistribute,
    run,
    spmd,
)
from fdtensor.cost import NCCL
from fdtensor.plans.collectives import Step
from fdtensor.testing.strategies import redistributions
from fdtensor.testing.values import full_tensor, scatter

Values = tuple[torch.Tensor, ...]


class CountingComm:
    """All ranks of a mesh without their numbers: local tensors are on the meta device."""

    rank, device, cost, check = None, torch.device("meta"), NCCL, "first"

    def __init__(self, mesh: Mesh) -> None:
        self.mesh, self.agreed, self.compiled = mesh, set(), {}
        self.received: Counter[int] = Counter()

    def share(self, numbers: Sequence[int], src_rank: int) -> list[int]:
        return list(numbers)

    def agree(self, about: str, digest: str, mesh: Sequence[Mesh], mistake: str | None) -> None:
        assert mistake is None, mistake

    def refuse(self, about: str, mistake: str, meshes: Sequence[Mesh] = ()) -> None:
        raise AssertionError(mistake)

    def meet(self, about: str, mesh: Mesh) -> None: ...

    def watched(self, what: Any, function: Any) -> Any:
        return function

    def failed(self, meshes: Sequence[Mesh], error: BaseException) -> BaseException:
        return error

    def mistake(self, value: Values, type: TensorType) -> str | None:
        shapes = [type.local_shape(rank) for rank in type.mesh.order]
        return None if [tuple(t.shape) for t in value] == shapes else "another shape"

    def each(self, type: TensorType, make: Any) -> Values:
        return self.value([make(rank) for rank in type.mesh.order])

    def leaves(self, value: Values) -> Values:
        return value

    def value(self, leaves: Sequence[torch.Tensor]) -> Values:
        return tuple(leaf.to("meta") for leaf in leaves)

    def width(self, type: TensorType) -> int:
        return type.mesh.size

    def copy(self, value: Values) -> Values:
        return tuple(torch.empty_like(t) for t in value)

    def perform(self, step: Step, value: Values, owned: bool = False) -> Values:
        alone = Plan(step.src, step.dst, (step,), NCCL)
        for rank in {*step.src.mesh.order, *step.dst.mesh.order}:
            self.received[rank] += alone.received_bytes_at(rank)
        dst = step.dst
        shapes = [dst.local_shape(rank) for rank in dst.mesh.order]
        return tuple(torch.empty(shape, dtype=dst.dtype, device="meta") for shape in shapes)

    def perform_together(self, steps: Sequence[Step], values: Sequence[Values]) -> list[Values]:
        return [self.perform(step, value) for step, value in zip(steps, values, strict=True)]


@given(redistributions(), st.integers(0, 99))
def test_another_comm_counts_the_bytes_of_a_plan(case, seed):
    src, dst = case
    ranks = sorted({*src.mesh.order, *dst.mesh.order})
    comm: Comm[Values] = CountingComm(Mesh.from_ranks(ranks, "all"))
    moved = plan(src, dst)
    out = run(moved, comm.value(scatter(full_tensor(src, seed), src, seed)), comm)
    assert [tuple(t.shape) for t in out] == [dst.local_shape(rank) for rank in dst.mesh.order]
    assert max(comm.received.values(), default=0) == moved.received_bytes


def test_programs_run_on_another_comm():
    mesh = Mesh(dp=2, tp=2)
    comm = CountingComm(mesh)
    types = [
        TensorType((8, 6), torch.float32, mesh.layout("dp", "tp")),
        TensorType((6, 4), torch.float32, mesh.layout("tp")),
    ]
    x, w = [
        DTensor(comm.each(t, lambda r, t=t: torch.empty(t.local_shape(r))), t, comm) for t in types
    ]

    def loss(x, w):
        return torch.relu(x @ w).sum()

    f = spmd(torch.func.grad(loss, argnums=(0, 1)))
    grads = f(x, w)
    assert [g.shape for g in grads] == [(8, 6), (6, 4)]
    assert max(comm.received.values()) == f.trace(x, w).received_bytes
    redistribute({"x": x, "w": w}, mesh.layout())
