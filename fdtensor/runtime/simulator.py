"""`SimulatedComm`: every rank of a mesh in this process. A value is a tuple of tensors."""

# pyright: reportIncompatibleMethodOverride=false
# what a Comm answers as a property is an attribute here

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.plans.collectives import Step, is_local
from fdtensor.plans.cost import NCCL, CostModel
from fdtensor.plans.local_tensors import copied, own
from fdtensor.runtime.comm import Check, Comm, contained, kind_of, misfit, mistakes, refuse_no_place
from fdtensor.runtime.replication import storage_of

__all__ = ["SimulatedComm", "unshared"]

Tensors = tuple[torch.Tensor, ...]


class SimulatedComm(Comm[tuple[torch.Tensor, ...]]):
    """All ranks of a mesh in one process; it counts what a real mesh would move.

    A value is a tuple with each rank's local tensor, in mesh order. `received` counts the bytes
    that arrived at each rank from others, `calls` the collectives by name. A pickle of it is one
    that has run nothing yet; all DTensors of a pickle share it.

    >>> mesh = Mesh(x=2)
    >>> comm = SimulatedComm(mesh)
    >>> x = distribute(torch.arange(4), mesh.layout("x"), comm)
    >>> x.redistribute(mesh.layout()).local
    (tensor([0, 1, 2, 3]), tensor([0, 1, 2, 3]))
    >>> comm.calls, comm.received
    (Counter({'all_gather': 1}), Counter({0: 16, 1: 16}))
    """

    rank: None = None
    device: None = None

    def __init__(self, mesh: Mesh, *, cost: CostModel = NCCL, check: Check = "first") -> None:
        refuse_no_place(mesh, cost, check)
        self.mesh = mesh
        self.cost = cost
        self.check: Check = check
        self.received: Counter[int] = Counter()
        self.calls: Counter[str] = Counter()
        self.agreed: set[Any] = set()
        self.compiled: dict[Any, Any] = {}

    def __repr__(self) -> str:
        return f"SimulatedComm({self.mesh!r})"

    def __reduce__(self) -> Any:
        return partial(type(self), cost=self.cost, check=self.check), (self.mesh,)

    def share(self, numbers: Sequence[int], src_rank: int) -> list[int]:
        return list(numbers)

    def agree(self, about: str, digest: str, mesh: Sequence[Mesh], mistake: str | None) -> None:
        contained(about, mesh, self.mesh)
        if mistake is not None:
            self.refuse(about, mistake)

    def refuse(self, about: str, mistake: str, meshes: Sequence[Mesh] = ()) -> None:
        raise misfit(about, mistake)

    def width(self, type: TensorType) -> int:
        return type.mesh.size

    def mistake(self, value: object, type: TensorType) -> str | None:
        count = type.mesh.size
        if not isinstance(value, (tuple, list)) or len(value) != count:
            has = kind_of(value)
            if isinstance(value, (tuple, list)):
                has = f"{has} of {len(value)}"
            return f"a simulated value is a tuple of {count} tensors, one a rank, not {has}"
        for rank, local in zip(type.mesh.order, value, strict=True):
            mistake = mistakes(local, type, rank, _device(value))
            if mistake:
                return mistake
        return None

    def each(self, type: TensorType, make: Callable[[int], torch.Tensor]) -> Tensors:
        return tuple([make(rank) for rank in type.mesh.order])

    def leaves(self, value: Tensors) -> Tensors:
        return tuple(value)

    def value(self, leaves: Sequence[torch.Tensor]) -> Tensors:
        return tuple(leaves)

    def copy(self, value: Tensors) -> Tensors:
        return tuple([copied(local) for local in value])

    def perform(self, step: Step, value: Tensors, owned: bool = False) -> Tensors:
        self._count([step])
        return unshared([self._after(step, value)])[0]

    def perform_together(self, steps: Sequence[Step], values: Sequence[Tensors]) -> list[Tensors]:
        """The values after steps in one message; ranks may share what they get alike.

        After exchanges each rank has memory of its own.
        """
        self._count(steps[:1])
        return [self._after(step, value) for step, value in zip(steps, values, strict=True)]

    def _count(self, steps: Sequence[Step]) -> None:
        self.calls.update(step.collective.name for step in steps if not is_local(step))

    def _after(self, step: Step, value: Tensors) -> Tensors:
        before = dict(zip(step.src.mesh.order, value, strict=True))
        after, received = step.collective.simulate(step, before)
        self.received.update(received)
        return tuple([after[rank] for rank in step.dst.mesh.order])


def unshared(values: Sequence[Tensors]) -> list[Tensors]:
    """The values, each of whose tensors has memory of its own: copied on the first write."""
    seen: set[int] = set()

    def alone(local: torch.Tensor) -> torch.Tensor:
        number = storage_of(local)
        if number is None:
            return local
        if number in seen:
            return own(local)
        seen.add(number)
        return local

    return [tuple([alone(local) for local in value]) for value in values]


def _device(value: object) -> torch.device:
    tensors = [t for t in value if isinstance(t, torch.Tensor)]  # type: ignore[attr-defined]
    return tensors[0].device if tensors else torch.device("cpu")
