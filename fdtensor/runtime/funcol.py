"""`FuncolComm`: this rank of a real mesh, on torch's functional collectives (gloo, NCCL).

Each collective says what a rank does (`plans/collectives/`), world.py how it reaches the others.
What a step needs on this rank is worked out once.
"""

# pyright: reportIncompatibleMethodOverride=false
# what a Comm answers as a property is an attribute here

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from fdtensor.layouts.errors import CommError
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.layouts.torch_private import below_autograd
from fdtensor.plans.collectives import Exchange, Step
from fdtensor.plans.collectives.base import Begin, OnRank
from fdtensor.plans.collectives.exchange import members
from fdtensor.plans.cost import NCCL, CostModel
from fdtensor.plans.local_tensors import copied
from fdtensor.runtime.comm import Check, Comm, contained, misfit, mistakes
from fdtensor.runtime.fused_exchange import begin_exchanges
from fdtensor.runtime.process_groups import backend_of, group_of
from fdtensor.runtime.world import ProcessWorld, functional

__all__ = ["FuncolComm"]

_all_gather = functional("all_gather_into_tensor")
_all_reduce = functional("all_reduce")
_broadcast = functional("broadcast")

_LIVING: weakref.WeakValueDictionary[Any, FuncolComm] = weakref.WeakValueDictionary()
"""Those of this process, by what makes two alike: DTensors from a pickle meet the others."""


def _joined(
    rank: int, mesh: Mesh, device: torch.device, cost: CostModel, check: Check
) -> FuncolComm:
    """The Comm that was pickled on `rank`, in the process that is this rank now."""
    up = dist.is_available() and dist.is_initialized()
    if not up or dist.get_rank() != rank:
        raise CommError(
            f"this was pickled on rank {rank} of a real mesh, and "
            + (f"this is rank {dist.get_rank()}." if up else "there is no process group."),
            mesh=mesh,
            hint="Read it on that rank. For other ranks or meshes use save_checkpoint, or pickle "
            "what x.full() gives.",
        )
    known = _LIVING.get((mesh, device, cost, check))
    if known is not None and known.world is dist.group.WORLD:
        return known
    return FuncolComm(mesh, device, cost=cost, check=check)


class FuncolComm(Comm[torch.Tensor]):
    """This rank's place on a mesh of processes. A value is this rank's local tensor.

    `check` says when ranks agree that they run the same plan. `cost` is what plans and programs are
    priced by: the same as on simulated ranks, so that both run the same ones, whatever the backend.
    `GLOO` is faster on gloo.
    Needs a default process group whose ranks include those of the mesh; `connect` brings one up.
    A pickle of it, or of a DTensor on it, is read on the same rank, where a process group is up.

    >>> with local_cluster(2) as ranks:
    ...     print(ranks.run(lambda: type(connect(Mesh(x=2))).__name__))
    ['FuncolComm', 'FuncolComm']
    """

    rank: int = -1
    device: torch.device = torch.device("cpu")

    def __init__(
        self,
        mesh: Mesh,
        device: str | torch.device = "cpu",
        *,
        cost: CostModel = NCCL,
        check: Check = "first",
    ) -> None:
        self.backend: str = _backend(mesh, torch.device(device))
        self.mesh = mesh
        self.device = torch.device(device)
        self.rank = dist.get_rank()
        self.check: Check = check
        self.agreed: set[Any] = set()
        self.compiled: dict[Any, Any] = {}
        self.cost = cost
        # not kept: a group that outlives `destroy_process_group` may abort Python at its end
        self._world = weakref.ref(dist.group.WORLD)  # type: ignore[arg-type]
        self.around = ProcessWorld(self.rank, self.device, self.backend, lambda: self.world)
        self.prepared = functools.lru_cache(maxsize=8192)(self._prepare)
        self.begun = functools.lru_cache(maxsize=8192)(self._begun)
        _LIVING[mesh, self.device, cost, check] = self

    def __repr__(self) -> str:
        return f"FuncolComm({self.mesh!r}, {str(self.device)!r})"

    def __reduce__(self) -> Any:
        return _joined, (self.rank, self.mesh, self.device, self.cost, self.check)

    @property
    def world(self) -> Any:
        """The default process group that this Comm was made in; None where it is gone."""
        return self._world()

    # --- agreement ---------------------------------------------------------------------------

    def agree(self, about: str, digest: str, mesh: Sequence[Mesh], mistake: str | None) -> None:
        contained(about, mesh, self.mesh)
        if self.world is None:
            raise CommError(
                "the process group of this Comm has ended.",
                comm=self.mesh,
                hint="Make a new Comm after init_process_group: connect(mesh).",
            )
        ranks = members(tuple(mesh))
        if self.rank not in ranks:
            return
        if len(ranks) == 1:
            if mistake is not None:
                self.refuse(about, mistake)
            return
        name = group_of(ranks)
        number = int(digest[:15], 16)
        facts = torch.tensor([number, -number, mistake is not None], device=self.device)
        most, least, wrong = _all_reduce(facts, "max", name).tolist()
        if not wrong and most == -least:
            return
        texts = self._tell(f"{digest[:12]}|{mistake or ''}", len(ranks), name)
        mistaken = [text.partition("|")[2] for text in texts if text.partition("|")[2]]
        if mistaken:
            self.refuse(about, "; ".join(mistaken))
        raise CommError(
            f"the ranks do not agree on {about}.",
            **{f"rank {r}": text.partition("|")[0] for r, text in zip(ranks, texts, strict=True)},
            hint="Every rank must run the same plans, of the same types, in the same order.",
        )

    def _tell(self, text: str, count: int, name: str) -> list[str]:
        """The texts of all ranks of a group, in the order of ranks."""
        data = torch.zeros(512, dtype=torch.uint8, device="cpu")
        encoded = text.encode()[:512]
        data[: len(encoded)] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
        gathered = _all_gather(data.to(self.device), count, name).cpu().view(count, 512)
        return [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in gathered]

    def refuse(self, about: str, mistake: str) -> None:
        raise misfit(about, mistake)

    def share(self, numbers: Sequence[int], src_rank: int) -> list[int]:
        """The 64 numbers that `src_rank` gives, on every rank of the mesh and on `src_rank`."""
        ranks = tuple(sorted({*self.mesh.order, src_rank}))
        if self.rank not in ranks or len(ranks) == 1:
            return list(numbers)
        facts = torch.tensor([*numbers, *[0] * (64 - len(numbers))], device=self.device)
        shared = _broadcast(facts, ranks.index(src_rank), group_of(ranks))
        return shared.tolist()[: len(numbers)]

    def mistake(self, value: object, type: TensorType) -> str | None:
        return mistakes(value, type, self.rank, self.device)

    # --- values ------------------------------------------------------------------------------

    def each(self, type: TensorType, make: Callable[[int], torch.Tensor]) -> torch.Tensor:
        return make(self.rank)

    def leaves(self, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (value,)

    def value(self, leaves: Sequence[torch.Tensor]) -> torch.Tensor:
        return leaves[0]

    def width(self, type: TensorType) -> int:
        return 1

    def copy(self, value: torch.Tensor) -> torch.Tensor:
        return copied(value) if isinstance(value, torch.Tensor) else value

    # --- steps -------------------------------------------------------------------------------

    def perform(self, step: Step, value: torch.Tensor, owned: bool = False) -> torch.Tensor:
        # derivatives are the interpreter's; torch's take 30 us a call once DTensor is imported
        with below_autograd():
            return self.prepared(step)(value, owned)

    def begin(self, step: Step, value: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begins an exchange; what is returned waits for its end and gives the new tensor."""
        with below_autograd():
            return self.begun(step)(value)

    def begin_together(
        self, steps: Sequence[Step], values: Sequence[torch.Tensor]
    ) -> Callable[[], list[torch.Tensor]]:
        """Begins exchanges that travel together; what is returned waits for all of them."""
        with below_autograd():
            return begin_exchanges(steps, values, self.around)

    def perform_together(
        self, steps: Sequence[Step], values: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        if steps and isinstance(steps[0].collective, Exchange):
            with below_autograd():
                return begin_exchanges(steps, values, self.around)()
        return [self.perform(step, value) for step, value in zip(steps, values, strict=True)]

    def _prepare(self, step: Step) -> OnRank:
        return step.collective.on_rank(step, self.around)

    def _begun(self, step: Step) -> Begin:
        assert isinstance(step.collective, Exchange)
        return step.collective.begun(step, self.around)


def _backend(mesh: Mesh, device: torch.device) -> str:
    """The backend that serves a device on the processes of a mesh; raises where there is none."""
    if not (dist.is_available() and dist.is_initialized()):
        raise CommError(
            "there is no process group.",
            mesh=mesh,
            hint="Start with torchrun and call connect(mesh), or use SimulatedComm(mesh).",
        )
    world = dist.get_world_size()
    if max(mesh.order) >= world:
        raise CommError(
            f"the mesh has rank {max(mesh.order)}, but there are {world} processes.",
            mesh=mesh,
            hint="Start more processes, or make a smaller mesh.",
        )
    backend = backend_of(device)
    if backend is None:
        raise CommError(
            f"the process group has no backend for {device.type} tensors.",
            backends=dist.get_backend_config(),
            hint="Pass the device that it serves, or bring up a group that serves this one.",
        )
    return backend
