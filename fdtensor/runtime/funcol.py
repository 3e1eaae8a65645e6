"""`FuncolComm`: this rank of a real mesh, on torch's functional collectives (gloo, NCCL).

The only file of the library that communicates; process_groups.py makes the groups. Collectives are
`torch.ops._c10d_functional` with explicit waits, so that no tensor subclass appears; messages from
rank to rank go over the default process group. What a step needs on this rank is worked out once.
"""

# pyright: reportIncompatibleMethodOverride=false
# what a Comm answers as a property is an attribute here

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
import torch.distributed as dist

from fdtensor.layouts.errors import CommError
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.placement import ReduceOp
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.plans.collective import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Exchange,
    ReduceScatter,
    Step,
)
from fdtensor.plans.cost import NCCL, CostModel
from fdtensor.plans.messages import talk
from fdtensor.plans.search import owners
from fdtensor.plans.tiling import Tiling, along, join, split
from fdtensor.plans.transitions import by_exchange
from fdtensor.runtime.comm import Check, Comm, contained, misfit, mistakes
from fdtensor.runtime.kernel import (
    copied,
    divide,
    empty,
    flat,
    keep,
    local_step,
    packed,
    plain,
    settle,
)
from fdtensor.runtime.packing import Parcel, Round, Views, cut, pack_into, rounds
from fdtensor.runtime.process_groups import backend_of, group_of
from fdtensor.runtime.wire import from_wire, reduces_as, to_wire

__all__ = ["FuncolComm", "exchanging", "reducing"]

_ops = torch.ops._c10d_functional
_wait = _ops.wait_tensor.default
_all_gather = _ops.all_gather_into_tensor.default
_all_reduce = _ops.all_reduce.default
_all_reduce_ = _ops.all_reduce_.default
_all_to_all = _ops.all_to_all_single.default
_broadcast = _ops.broadcast.default
_broadcast_ = _ops.broadcast_.default
_reduce_scatter = _ops.reduce_scatter_tensor.default

_below_autograd: Any = torch._C._AutoDispatchBelowAutograd  # type: ignore[attr-defined]
"""Derivatives are the interpreter's; those of torch take 30 us a call once DTensor is imported."""

_TAG = 7040


@attrs.frozen(eq=False)
class _Even:
    """A named collective on this rank: its group, and how even blocks lie before and after."""

    group: str
    count: int
    before: Tiling | None = None
    after: Tiling | None = None
    op: str | None = None
    """The reduction of what travels."""


@attrs.frozen(eq=False)
class _Uneven:
    """An exchange on this rank."""

    rounds: tuple[Round, ...]
    holds: bool
    """Whether it is in the source."""
    shape: tuple[int, ...] | None
    """That of its destination block; None where it is not in the destination."""
    divisor: int
    """What sums are divided by."""
    group: str = ""
    """Who takes part in an all-to-all, and the place of each rank there."""
    place: dict[int, int] = attrs.field(factory=dict)

    def sizes(self, parcels: Sequence[Parcel]) -> list[int]:
        """How many elements of parcels go to, or come from, each rank of the group."""
        found = [0] * len(self.place)
        for parcel in parcels:
            found[self.place[parcel.peer]] = parcel.part.numel
        return found


class _Done:
    """A work that needs no more waiting."""

    def wait(self) -> None:
        pass


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
        self.mesh = mesh
        self.device = torch.device(device)
        self.rank = dist.get_rank()
        self.check: Check = check
        backend = backend_of(self.device)
        if backend is None:
            raise CommError(
                f"the process group has no backend for {self.device.type} tensors.",
                backends=dist.get_backend_config(),
                hint="Pass the device that it serves, or bring up a group that serves this one.",
            )
        self.backend: str = backend
        self.agreed: set[Any] = set()
        self.compiled: dict[Any, Any] = {}
        self.cost = cost
        # not kept: a group that outlives `destroy_process_group` may abort Python at its end
        self._world = weakref.ref(dist.group.WORLD)  # type: ignore[arg-type]
        self._even = functools.lru_cache(maxsize=8192)(self._prepare_even)
        self._uneven = functools.lru_cache(maxsize=8192)(self._prepare_uneven)
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
        ranks = _members(tuple(mesh))
        if self.rank not in ranks:
            return
        if len(ranks) == 1:
            if mistake is not None:
                self.refuse(about, mistake)
            return
        name = group_of(ranks)
        number = int(digest[:15], 16)
        facts = torch.tensor([number, -number, mistake is not None], device=self.device)
        most, least, wrong = _wait(_all_reduce(facts, "max", name)).tolist()
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
        gathered = _wait(_all_gather(data.to(self.device), count, name)).cpu().view(count, 512)
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
        return _wait(shared).tolist()[: len(numbers)]

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

    # --- collectives -------------------------------------------------------------------------

    def local(self, step: Step, value: torch.Tensor) -> torch.Tensor:
        if step.src.mesh.position(self.rank) is None:
            inside = step.dst.mesh.position(self.rank) is not None
            return empty(step.dst, self.rank, self.device) if inside else value
        return local_step(step, self.rank, value)

    def all_gather(self, step: Step, value: torch.Tensor) -> torch.Tensor:
        here = self._even(step)
        if here is None:
            return value
        assert here.after is not None
        with _below_autograd():
            wire = to_wire(plain(value).contiguous())
            gathered = _wait(_all_gather(wire, here.count, here.group))
            return join(from_wire(gathered, value.dtype), here.after)

    def all_to_all(self, step: Step, value: torch.Tensor) -> torch.Tensor:
        here = self._even(step)
        if here is None:
            return value
        assert here.before is not None
        assert here.after is not None
        with _below_autograd():
            wire = to_wire(split(plain(value), here.before))
            sizes = [wire.shape[0] // here.count] * here.count
            arrived = _wait(_all_to_all(wire, sizes, sizes, here.group))
            return join(from_wire(arrived, value.dtype), here.after)

    def all_reduce(self, step: Step, value: torch.Tensor, owned: bool) -> torch.Tensor:
        here = self._even(step)
        if here is None:
            return value
        if here.op is None:
            for by in reducing(step):
                value = self.exchange(by, value)
            return value
        with _below_autograd():
            own = plain(value).contiguous()
            if owned or own is not value:
                _wait(_all_reduce_(to_wire(own), here.op, here.group))
            else:
                own = from_wire(_wait(_all_reduce(to_wire(own), here.op, here.group)), value.dtype)
            return divide(own, here.count) if _averages(step) else own

    def reduce_scatter(self, step: Step, value: torch.Tensor) -> torch.Tensor:
        here = self._even(step)
        if here is None:
            return value
        if here.op is None:
            return self.exchange(by_exchange(step.src, step.dst, "all_to_all"), value)
        assert here.before is not None
        with _below_autograd():
            wire = to_wire(split(plain(value), here.before))
            reduced = _wait(_reduce_scatter(wire, here.op, here.count, here.group))
            out = from_wire(reduced, value.dtype)
            return divide(out, here.count) if _averages(step) else out

    def broadcast(self, step: Step, value: torch.Tensor) -> torch.Tensor:
        collective, dst = step.collective, step.dst
        assert isinstance(collective, Broadcast)
        ranks = _members((step.src.mesh, dst.mesh))
        if self.rank not in ranks:
            return value
        root, group = ranks.index(collective.root), group_of(ranks)
        with _below_autograd():
            if self.rank != collective.root:
                out = torch.empty(dst.shape, dtype=dst.dtype, device=self.device)
                _wait(_broadcast_(to_wire(out), root, group))
                return out
            wire = to_wire(plain(value).contiguous())
            if dst.mesh.position(self.rank) is not None:
                return from_wire(_wait(_broadcast(wire, root, group)), dst.dtype)
            _wait(_broadcast_(wire, root, group))  # the root's own is only read
            return empty(dst, self.rank, self.device)

    def exchange(self, step: Step, value: torch.Tensor) -> torch.Tensor:
        here = self._uneven(step)
        if here is None:
            return value
        collective = step.collective
        assert isinstance(collective, Exchange)
        by_messages = collective.way == "peer_to_peer"
        with _below_autograd():
            out = self._empty(step, here)
            target = flat(out)
            local = flat(plain(value)) if here.holds else target
            for now in here.rounds:
                if by_messages:
                    self._by_messages(now, collective.reduce_op, local, target)
                else:
                    self._by_all_to_all(now, collective.reduce_op, local, target, here)
            return divide(out, here.divisor) if here.divisor > 1 else out

    def exchange_many(
        self, steps: Sequence[Step], values: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        scripts = [self._uneven(step) for step in steps]
        results = list(values)
        mine = [i for i, here in enumerate(scripts) if here is not None]
        if not mine:
            return results
        # larger elements first, so that each tensor's part of a buffer is aligned for its dtype
        mine.sort(key=lambda i: (-steps[i].src.dtype.itemsize, i))
        with _below_autograd():
            parcels: dict[int, list[torch.Tensor]] = {}
            sizes: dict[int, int] = {}
            olds: dict[int, Sequence[Views]] = dict.fromkeys(mine, ())
            for i in mine:
                step, here, now = steps[i], scripts[i], self._only(scripts[i])
                if here is not None and here.holds:
                    olds[i] = cut(flat(plain(values[i])), now.source)
                for parcel in now.sends:
                    part = packed(parcel.part, olds[i][parcel.index])
                    parcels.setdefault(parcel.peer, []).append(_bytes(part))
                for parcel in now.recvs:
                    nbytes = parcel.part.numel * step.src.dtype.itemsize
                    sizes[parcel.peer] = sizes.get(parcel.peer, 0) + nbytes
            arrived = self._post(steps, {r: torch.cat(p) for r, p in parcels.items()}, sizes)
            starts = dict.fromkeys(arrived, 0)
            for i in mine:
                step, here, now = steps[i], scripts[i], self._only(scripts[i])
                assert here is not None
                assert isinstance(step.collective, Exchange)
                out = results[i] = self._empty(step, here)
                news = cut(flat(out), now.target)
                terms = []
                for parcel in now.recvs:
                    start, nbytes = starts[parcel.peer], parcel.part.numel * out.dtype.itemsize
                    starts[parcel.peer] += nbytes
                    term = arrived[parcel.peer][start : start + nbytes].view(out.dtype)
                    terms.append(term.view(parcel.part.shape))
                    if parcel.in_place:
                        news[parcel.index][0].copy_(terms[-1])
                keep(now, olds[i], news)
                settle(now, step.collective.reduce_op, olds[i], news, terms)
                if here.divisor > 1:
                    divide(out, here.divisor)
        return results

    def _empty(self, step: Step, here: _Uneven) -> torch.Tensor:
        if here.shape is None:
            return empty(step.dst, self.rank, self.device)
        return torch.empty(here.shape, dtype=step.dst.dtype, device=self.device)

    def _only(self, here: _Uneven | None) -> Round:
        assert here is not None
        assert len(here.rounds) == 1
        return here.rounds[0]

    # --- ways of an exchange -----------------------------------------------------------------

    def _by_messages(
        self,
        now: Round,
        reduce_op: ReduceOp | None,
        local: torch.Tensor,
        target: torch.Tensor,
    ) -> None:
        """One message for each peer; blocks that lie in one piece go from and to their place."""
        news = cut(target, now.target)
        incoming = [
            news[p.index][0] if p.in_place else target.new_empty(p.part.shape) for p in now.recvs
        ]
        olds = cut(local, now.source) if now.source.parts else ()
        blocks: dict[int, torch.Tensor] = {}  # a block may go to several peers
        for parcel in now.sends:
            if parcel.index not in blocks:
                blocks[parcel.index] = packed(parcel.part, olds[parcel.index])
        outgoing = [blocks[parcel.index] for parcel in now.sends]
        arriving, leaving = self._messages(now.to, outgoing, now.of, incoming)
        keep(now, olds, news)  # while the rest is under way
        settle(now, reduce_op, olds, news, map(_waited, arriving, incoming))
        for work in leaving:
            work.wait()

    def _messages(
        self,
        to: Sequence[int],
        outgoing: Sequence[torch.Tensor],
        of: Sequence[int],
        incoming: Sequence[torch.Tensor],
    ) -> tuple[Sequence[Any], Sequence[Any]]:
        """Starts a message to each rank `to` and from each rank `of`.

        Returns what to wait for, each once: a work for each that arrives, and those that leave.
        """
        if self.backend != "nccl":  # gloo moves bytes of any dtype from rank to rank
            world = self.world
            recv, send = world.recv, world.send
            arriving = [recv([tensor], peer, _TAG) for tensor, peer in zip(incoming, of)]
            return arriving, [send([tensor], peer, _TAG) for tensor, peer in zip(outgoing, to)]
        batch = [dist.P2POp(dist.irecv, to_wire(t), peer) for t, peer in zip(incoming, of)]
        batch += [dist.P2POp(dist.isend, to_wire(t), peer) for t, peer in zip(outgoing, to)]
        works = dist.batch_isend_irecv(batch) if batch else []
        for work in works:
            work.wait()  # on the stream: this rank goes on
        return [_Done()] * len(incoming), ()

    def _by_all_to_all(
        self,
        now: Round,
        reduce_op: ReduceOp | None,
        local: torch.Tensor,
        target: torch.Tensor,
        here: _Uneven,
    ) -> None:
        """One uneven all-to-all of packed messages, in the order of the group's ranks."""
        in_sizes, out_sizes = here.sizes(now.sends), here.sizes(now.recvs)
        olds = cut(local, now.source) if now.source.parts else ()
        sending = target.new_empty(sum(in_sizes))
        slots = torch.split_with_sizes(sending, in_sizes)
        for parcel in now.sends:
            slot = slots[here.place[parcel.peer]].view(parcel.part.shape)
            pack_into(slot, parcel.part, olds[parcel.index])
        wire = _wait(_all_to_all(to_wire(sending), out_sizes, in_sizes, here.group))
        slots = torch.split_with_sizes(from_wire(wire, target.dtype), out_sizes)
        arrived = [slots[here.place[p.peer]].view(p.part.shape) for p in now.recvs]
        news = cut(target, now.target)
        for parcel, term in zip(now.recvs, arrived):
            if parcel.in_place:
                news[parcel.index][0].copy_(term)
        keep(now, olds, news)
        settle(now, reduce_op, olds, news, arrived)

    def _post(
        self, steps: Sequence[Step], parcels: dict[int, torch.Tensor], sizes: dict[int, int]
    ) -> dict[int, torch.Tensor]:
        """The bytes from each peer, for bytes to each peer: one collective for the group."""
        if self.backend == "gloo":
            incoming = {
                peer: torch.empty(size, dtype=torch.uint8, device=self.device)
                for peer, size in sizes.items()
            }
            arriving, leaving = self._messages(
                list(parcels), list(parcels.values()), list(incoming), list(incoming.values())
            )
            for work in (*arriving, *leaving):
                work.wait()
            return incoming
        ranks = exchanging(tuple(steps), self.rank)
        nothing = torch.empty(0, dtype=torch.uint8, device=self.device)
        packed = torch.cat([nothing, *(parcels[r] for r in ranks if r in parcels)])
        out_sizes = [sizes.get(rank, 0) for rank in ranks]
        in_sizes = [parcels[rank].numel() if rank in parcels else 0 for rank in ranks]
        buffer = _wait(_all_to_all(packed, out_sizes, in_sizes, group_of(ranks)))
        # a copy for each, since a part of a buffer need not be aligned for its dtype
        parts = zip(ranks, buffer.split(out_sizes), strict=True)
        return {rank: part.clone() for rank, part in parts if rank in sizes}

    # --- what a step needs here --------------------------------------------------------------

    def _prepare_even(self, step: Step) -> _Even | None:
        """None for a rank outside the mesh."""
        src, dst, rank, collective = step.src, step.dst, self.rank, step.collective
        mesh, coord = src.mesh, src.mesh.coord(self.rank)
        if coord is None:
            return None
        assert isinstance(collective, (AllGather, AllToAll, AllReduce, ReduceScatter))
        axes = collective.axes
        ranks = mesh.coset(axes, coord)
        group, count = group_of(tuple(sorted(ranks))), len(ranks)
        match collective:
            case AllGather(_, dims):
                after = along(mesh, axes, dst.local_shape(rank), dims)
                return _Even(group, count, after=after)
            case AllToAll(_, src_dim, dst_dim):
                before = along(mesh, axes, src.local_shape(rank), (dst_dim,) * len(axes))
                after = along(mesh, axes, dst.local_shape(rank), (src_dim,) * len(axes))
                return _Even(group, count, before, after)
            case AllReduce(_, reduce_op):
                return _Even(group, count, op=reduces_as(src.dtype, reduce_op, self.backend))
            case ReduceScatter(_, dims, reduce_op):
                before = along(mesh, axes, src.local_shape(rank), dims)
                op = reduces_as(src.dtype, reduce_op, self.backend)
                return _Even(group, count, before, op=op)

    def _prepare_uneven(self, step: Step) -> _Uneven | None:
        """None for a rank outside both meshes."""
        src, dst, rank, collective = step.src, step.dst, self.rank, step.collective
        assert isinstance(collective, Exchange)
        holds, inside = src.mesh.position(rank) is not None, dst.mesh.position(rank) is not None
        if not holds and not inside:
            return None
        found = rounds(step, rank)
        shape = dst.local_shape(rank) if inside else None
        divisor = talk(src, dst).terms if inside and collective.reduce_op == "avg" else 1
        if collective.way == "peer_to_peer":
            return _Uneven(found, holds, shape, divisor)
        ranks = exchanging((step,), rank)
        place = {peer: i for i, peer in enumerate(ranks)}
        return _Uneven(found, holds, shape, divisor, group_of(ranks), place)


def _waited(work: Any, tensor: torch.Tensor) -> torch.Tensor:
    work.wait()
    return tensor


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor; one of a single element may have any strides."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _averages(step: Step) -> bool:
    return step.collective.reduce_op == "avg"  # type: ignore[union-attr]


@functools.lru_cache(maxsize=1024)
def reducing(step: Step) -> tuple[Step, ...]:
    """An all_reduce that the backend lacks, as exchanges: to the owners of blocks, and back."""
    owned = owners(step.src, step.dst)
    steps = (by_exchange(step.src, owned), by_exchange(owned, step.dst))
    return steps if owned is not step.dst else steps[:1]


@functools.lru_cache(maxsize=4096)
def _members(meshes: tuple[Mesh, ...]) -> tuple[int, ...]:
    """The ranks of all meshes, ascending."""
    return tuple(sorted({rank for mesh in meshes for rank in mesh.order}))


@functools.lru_cache(maxsize=4096)
def exchanging(steps: tuple[Step, ...], rank: int) -> tuple[int, ...]:
    """The ranks, ascending, that take part in an all-to-all of these exchanges.

    On one mesh the coset of all axes that exchange, else every rank of the meshes.
    """
    meshes = tuple(dict.fromkeys(m for step in steps for m in (step.src.mesh, step.dst.mesh)))
    if len(meshes) > 1:
        return _members(meshes)
    mesh = next(iter(meshes))
    axes = {axis for step in steps for axis in step.collective.axes or ()}  # type: ignore[union-attr]
    coord = mesh.coord(rank)
    assert coord is not None
    return tuple(sorted(mesh.coset([axis for axis in mesh.axes if axis in axes], coord)))
