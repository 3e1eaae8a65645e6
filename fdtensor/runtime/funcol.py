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
from fdtensor.programs.program import Program
from fdtensor.runtime.comm import Check, Comm, contained, misfit, mistakes, refuse_no_place
from fdtensor.runtime.control.agreement import agree, pooled
from fdtensor.runtime.control.ledger import Ledger
from fdtensor.runtime.control.noting import counting, is_brief, noting
from fdtensor.runtime.control.posts import Ran
from fdtensor.runtime.control.process import lane_here, plane_of
from fdtensor.runtime.control.waits import waited
from fdtensor.runtime.fused_exchange import begin_exchanges
from fdtensor.runtime.interpreter import Deed, meshes_of
from fdtensor.runtime.process_groups import SECONDS, backend_of
from fdtensor.runtime.world import ProcessWorld

__all__ = ["FuncolComm"]


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
    known = _LIVING.get((mesh, device, cost, check, lane_here()))
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
        timeout: float = SECONDS,
    ) -> None:
        refuse_no_place(mesh, cost, check)
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
        self.timeout = timeout
        self.plane = plane_of()
        self.plane.wait_for(timeout)
        if len(mesh.order) > 1 and self.rank in mesh.order:
            self.plane.ledger(members((mesh,)))  # so that this rank answers before its first call
        self.ledgers = functools.lru_cache(maxsize=8192)(self._ledger)
        self.noted = functools.lru_cache(maxsize=8192)(self._noted)
        self.around = ProcessWorld(self.rank, self.device, self.backend, self.plane)
        self.prepared = functools.lru_cache(maxsize=8192)(self._prepare)
        self.begun = functools.lru_cache(maxsize=8192)(self._begun)
        self.lane = self.plane.lane
        _LIVING[mesh, self.device, cost, check, self.lane] = self

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
        unfit = self.plane.unfit()
        if unfit is not None:
            raise unfit
        ranks = members(tuple(mesh))
        if self.rank not in ranks:
            return
        if len(ranks) > 1:
            agree(self.plane.ledger(ranks), about, digest, mistake)
        elif mistake is not None:
            self.refuse(about, mistake)

    def meet(self, about: str, mesh: Mesh) -> None:
        ledger, fact = self.ledgers(Deed(about, mesh))
        if self.check != "never" and ledger is not None:
            ledger.meet(fact, about)

    def note(self, about: str, numbers: Sequence[int | float], mesh: Mesh) -> None:
        ledger, _ = self.ledgers(Deed(about, mesh))
        if ledger is not None:
            ledger.begin(hash((*numbers,)), (about, *numbers))
            ledger.end()

    def pooled(
        self, about: str, numbers: dict[int, list[int]], meshes: Sequence[Mesh]
    ) -> dict[int, list[int]]:
        ranks = members(tuple(meshes))
        if self.rank not in ranks or len(ranks) == 1:
            return numbers
        ledger = self.plane.ledger(ranks)
        return dict(zip(ranks, pooled(ledger, about, numbers[self.rank]), strict=True))

    def watched(self, what: Any, function: Callable[..., Any]) -> Callable[..., Any]:
        if isinstance(what, Program):  # which may hold tensors of the user: it is not kept
            return self._noted(Ran.of(what), function, is_brief(what))
        return self.noted(what, function)

    def _noted(
        self, what: Any, function: Callable[..., Any], brief: bool = False
    ) -> Callable[..., Any]:
        ledger, fact = self.ledgers(what)
        if ledger is None:
            return function
        if brief:
            return counting(ledger, fact, what, function)
        sends = not isinstance(what, Ran) or what.sends
        return noting(ledger, fact, what, sends, function)

    def _ledger(self, what: Any) -> tuple[Ledger | None, int]:
        """The ledger of a plan or program, and what all ranks must have alike of it."""
        ledger = self._ledger_of(meshes_of(what))
        return ledger, 0 if ledger is None else int(what.digest[:15], 16)

    def _ledger_of(self, meshes: Sequence[Mesh]) -> Ledger | None:
        """The ledger of the ranks of meshes; None where this rank waits for no other one there."""
        ranks = members(tuple(meshes))
        return self.plane.ledger(ranks) if self.rank in ranks and len(ranks) > 1 else None

    def failed(self, meshes: Sequence[Mesh], error: BaseException) -> BaseException:
        ledger = self._ledger_of(meshes)
        return error if ledger is None else ledger.failure(error)

    def waited(self, meshes: Sequence[Mesh], wait: Callable[[], Any]) -> Any:
        ledger = self._ledger_of(meshes)
        return wait() if ledger is None else waited(ledger, wait)

    def spread(self, groups: Sequence[Sequence[Mesh]], error: BaseException) -> None:
        for ledger in map(self._ledger_of, groups):
            if ledger is not None:
                self.plane.spread(ledger.ranks, error)

    def refuse(self, about: str, mistake: str, meshes: Sequence[Mesh] = ()) -> None:
        raise self.failed(meshes, misfit(about, mistake))

    def share(self, numbers: Sequence[int], src_rank: int) -> list[int]:
        """The 64 numbers that `src_rank` gives, on every rank of the mesh and on `src_rank`."""
        ranks = tuple(sorted({*self.mesh.order, src_rank}))
        if self.rank not in ranks or len(ranks) == 1:
            return list(numbers)
        facts = torch.tensor([*numbers, *[0] * (64 - len(numbers))], device=self.device)
        about = f"a broadcast of numbers from rank {src_rank}"
        give, root = self.around.collective("broadcast"), ranks.index(src_rank)
        group = self.around.group(ranks)
        shared = self.plane.ledger(ranks).noted(src_rank, about, give, facts, root, group)
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
