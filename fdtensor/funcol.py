"""`FuncolComm`: this rank of a real mesh, on torch's functional collectives (gloo, NCCL).

The only file of the library that communicates; process_groups.py makes the groups. Collectives are
`torch.ops._c10d_functional` with explicit waits, so that no tensor subclass appears; messages from
rank to rank go over the default process group.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from fdtensor.collective import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Exchange,
    ReduceScatter,
    Step,
)
from fdtensor.comm import Check, misfit, mistakes
from fdtensor.cost import GLOO, NCCL, CostModel
from fdtensor.errors import CommError
from fdtensor.exchange import Message, Route, route, talk
from fdtensor.kernel import (
    block,
    copied,
    empty,
    flat,
    join,
    local_step,
    pack,
    pack_into,
    settle,
    split,
)
from fdtensor.layout import Layout, TensorType
from fdtensor.memory import piece
from fdtensor.mesh import Mesh
from fdtensor.placement import Partial, ReduceOp, Replicate, Shard
from fdtensor.process_groups import group_of
from fdtensor.transition import by_exchange

__all__ = ["FuncolComm"]

_ops = torch.ops._c10d_functional
_wait = _ops.wait_tensor.default
_all_gather = _ops.all_gather_into_tensor.default
_all_reduce = _ops.all_reduce.default
_all_reduce_ = _ops.all_reduce_.default
_all_to_all = _ops.all_to_all_single.default
_broadcast = _ops.broadcast.default
_reduce_scatter = _ops.reduce_scatter_tensor.default

_GLOO = {
    torch.uint8, torch.int8, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
}  # fmt: skip
"""What gloo moves and reduces as it is; other dtypes move as bytes and are reduced by us."""

_BITS = {"band", "bor", "bxor"}
_TAG = 7040


class FuncolComm:
    """This rank's place on a mesh of processes. A value is this rank's local tensor.

    `check` says when ranks agree that they run the same plan. `cost` is that of the backend.
    Needs a default process group whose ranks include those of the mesh; `connect` brings one up.
    """

    def __init__(
        self,
        mesh: Mesh,
        device: str | torch.device = "cpu",
        *,
        cost: CostModel | None = None,
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
        self.backend = dist.get_backend()
        by_device = str(self.backend).split(",") if ":" in str(self.backend) else []
        for entry in by_device:
            kind, _, name = entry.partition(":")
            if kind == self.device.type:
                self.backend = name
        self.cost = cost or (GLOO if self.backend == "gloo" else NCCL)
        self.world: Any = dist.group.WORLD
        self._cosets: dict[Any, tuple[list[int], str, list[int]]] = {}

    def __repr__(self) -> str:
        return f"FuncolComm({self.mesh!r}, {str(self.device)!r})"

    # --- agreement ---------------------------------------------------------------------------

    def agree(self, about: str, digest: str, mesh: Sequence[Mesh], mistake: str | None) -> None:
        ranks = tuple(sorted({rank for part in mesh for rank in part.order}))
        if self.rank not in ranks:
            return
        if max(ranks) >= dist.get_world_size():
            raise CommError(
                f"{about} uses rank {max(ranks)}, but there are {dist.get_world_size()} processes.",
                hint="Start more processes, or plan for a smaller mesh.",
            )
        if len(ranks) == 1:
            if mistake is not None:
                self.refuse(about, mistake)
            return
        name = self._group(ranks)
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
        data = torch.zeros(512, dtype=torch.uint8)
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
        facts = torch.zeros(64, dtype=torch.int64)
        facts[: len(numbers)] = torch.tensor(list(numbers), dtype=torch.int64)
        shared = _broadcast(facts.to(self.device), ranks.index(src_rank), self._group(ranks))
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

    def _outside(self, step: Step) -> bool:
        position = self.rank
        return step.src.mesh.position(position) is None and (
            step.src.mesh is step.dst.mesh or step.dst.mesh.position(position) is None
        )

    # --- collectives -------------------------------------------------------------------------

    def local(self, step: Step, value: torch.Tensor) -> torch.Tensor:
        return value if self._outside(step) else local_step(step, self.rank, value)

    def all_gather(self, step: Step, value: torch.Tensor) -> torch.Tensor:
        if self._outside(step):
            return value
        collective = step.collective
        assert isinstance(collective, AllGather)
        counts, name, stack = self._coset(step.src.mesh, collective.axes)
        gathered = _wait(_all_gather(self._wire(value), prod(counts), name))
        blocks = gathered.view(value.dtype).view(prod(counts), *value.shape)
        return join(blocks, counts, collective.dims, stack)

    def all_to_all(self, step: Step, value: torch.Tensor) -> torch.Tensor:
        if self._outside(step):
            return value
        collective = step.collective
        assert isinstance(collective, AllToAll)
        counts, name, stack = self._coset(step.src.mesh, collective.axes)
        count = prod(counts)
        parts = split(value, counts, [collective.dst_dim] * len(counts), stack)
        wire = self._wire(parts)
        sizes = [wire.numel() // count] * count
        arrived = _wait(_all_to_all(wire, sizes, sizes, name)).view(value.dtype).view(parts.shape)
        return join(arrived, counts, [collective.src_dim] * len(counts), stack)

    def all_reduce(self, step: Step, value: torch.Tensor, owned: bool) -> torch.Tensor:
        if self._outside(step):
            return value
        collective = step.collective
        assert isinstance(collective, AllReduce)
        counts, name, _ = self._coset(step.src.mesh, collective.axes)
        reduce_op = collective.reduce_op
        if not self._reduces(value.dtype, reduce_op):
            return self._reduce_by_bytes(step, value)
        plain = value.contiguous()
        average = reduce_op == "avg"
        real = torch.view_as_real(plain) if value.is_complex() else plain
        op = "sum" if average else reduce_op
        if owned or plain is not value:
            out = _wait(_all_reduce_(real, op, name))
        else:
            out = _wait(_all_reduce(real, op, name))
        out = torch.view_as_complex(out) if value.is_complex() else out
        return out.div_(prod(counts)) if average else out

    def reduce_scatter(self, step: Step, value: torch.Tensor) -> torch.Tensor:
        if self._outside(step):
            return value
        collective = step.collective
        assert isinstance(collective, ReduceScatter)
        reduce_op = collective.reduce_op
        if not self._reduces(value.dtype, reduce_op):
            return self.exchange(by_exchange(step.src, step.dst, "all_to_all"), value)
        counts, name, stack = self._coset(step.src.mesh, collective.axes)
        parts = split(value, counts, collective.dims, stack)
        average = reduce_op == "avg"
        real = torch.view_as_real(parts.contiguous()) if value.is_complex() else parts.contiguous()
        wire = real.view(-1)
        op = "sum" if average else reduce_op
        out = _wait(_reduce_scatter(wire, op, prod(counts), name)).view(real.shape[1:])
        out = torch.view_as_complex(out) if value.is_complex() else out
        return out.div_(prod(counts)) if average else out

    def broadcast(self, step: Step, value: torch.Tensor) -> torch.Tensor:
        if self._outside(step):
            return value
        collective = step.collective
        assert isinstance(collective, Broadcast)
        ranks = tuple(sorted({*step.src.mesh.order, *step.dst.mesh.order}))
        if self.rank == collective.root:
            wire = self._wire(value)
        else:
            shape, dtype = step.dst.shape, step.dst.dtype
            wire = self._wire(torch.empty(shape, dtype=dtype, device=self.device))
        out = _wait(_broadcast(wire, ranks.index(collective.root), self._group(ranks)))
        if step.dst.mesh.position(self.rank) is None:
            return empty(step.dst, self.rank, self.device)
        return out.view(step.dst.dtype).view(step.dst.shape)

    def exchange(self, step: Step, value: torch.Tensor) -> torch.Tensor:
        if self._outside(step):
            return value
        collective, src, dst = step.collective, step.src, step.dst
        assert isinstance(collective, Exchange)
        here = route(src, dst, self.rank)
        out = empty(dst, self.rank, self.device)
        local = flat(value) if isinstance(value, torch.Tensor) else flat(out)
        target = flat(out)
        move = self._by_messages if collective.way == "peer_to_peer" else self._by_all_to_all
        for i in range(collective.pieces):
            count = collective.pieces
            sends = [piece(m, i, count) for m in here.sends] if count > 1 else here.sends
            recvs = [piece(m, i, count) for m in here.recvs] if count > 1 else here.recvs
            move(step, here, local, target, sends, recvs, i == 0)
        if collective.reduce_op == "avg" and here.shape is not None:
            out.div_(talk(src, dst).terms)
        return out

    def exchange_many(
        self, steps: Sequence[Step], values: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        mine = [i for i, step in enumerate(steps) if not self._outside(step)]
        results = list(values)
        if not mine:
            return results
        # larger elements first, so that each tensor's part of a buffer is aligned for its dtype
        mine.sort(key=lambda i: (-steps[i].src.dtype.itemsize, i))
        routes = {i: route(steps[i].src, steps[i].dst, self.rank) for i in mine}
        locals = {i: flat(_tensor(values[i], steps[i], self)) for i in mine}
        parcels: dict[int, list[torch.Tensor]] = {}
        sizes: dict[int, int] = {}
        for i in mine:
            itemsize = steps[i].src.dtype.itemsize
            for message in routes[i].sends:
                part = pack(locals[i], message.box).reshape(-1).view(torch.uint8)
                parcels.setdefault(message.peer, []).append(part)
            for message in routes[i].recvs:
                sizes[message.peer] = sizes.get(message.peer, 0) + message.numel * itemsize
        arrived = self._post(steps, {r: torch.cat(p) for r, p in parcels.items()}, sizes)
        starts = dict.fromkeys(arrived, 0)
        for i in mine:
            step, here = steps[i], routes[i]
            collective = step.collective
            assert isinstance(collective, Exchange)
            parts = {}
            for message in here.recvs:
                start, count = starts[message.peer], message.numel * step.src.dtype.itemsize
                starts[message.peer] += count
                part = arrived[message.peer][start : start + count].view(step.src.dtype)
                parts[message.peer] = part.view(_box_shape(message))
            out = empty(step.dst, self.rank, self.device)
            settle(here, collective.reduce_op, locals[i], flat(out), parts, here.recvs)
            if collective.reduce_op == "avg" and here.shape is not None:
                out.div_(talk(step.src, step.dst).terms)
            results[i] = out
        return results

    # --- ways of an exchange -----------------------------------------------------------------

    def _by_messages(
        self,
        step: Step,
        here: Route,
        local: torch.Tensor,
        target: torch.Tensor,
        sends: Sequence[Message],
        recvs: Sequence[Message],
        with_kept: bool,
    ) -> None:
        """One message for each peer; blocks that lie in one piece go from and to their place."""
        arrived: dict[int, torch.Tensor] = {}
        incoming = []
        for message in recvs:
            view = None if message.term else block(target, message.box)
            if view is None or not view.is_contiguous():
                view = target.new_empty(_box_shape(message))
                arrived[message.peer] = view
            incoming.append((message.peer, self._wire(view)))
        packed: dict[Any, torch.Tensor] = {}
        outgoing = []
        for message in sends:
            if message.box not in packed:
                packed[message.box] = self._wire(pack(local, message.box))
            outgoing.append((message.peer, packed[message.box]))
        works = self._messages(outgoing, incoming)
        reduce_op = step.collective.reduce_op  # type: ignore[union-attr]
        if reduce_op is None:  # what is kept can be copied while the rest is under way
            settle(here, None, local, target, {}, (), with_kept)
            for work in works:
                work.wait()
            settle(here, None, local, target, arrived, recvs, with_kept=False)
        else:
            for work in works:
                work.wait()
            settle(here, reduce_op, local, target, arrived, recvs, with_kept)

    def _messages(
        self,
        outgoing: Sequence[tuple[int, torch.Tensor]],
        incoming: Sequence[tuple[int, torch.Tensor]],
    ) -> list[Any]:
        """The works of all messages, started; peers are global ranks."""
        if self.backend != "nccl":
            works = [self.world.recv([t], peer, _TAG) for peer, t in incoming]
            return works + [self.world.send([t], peer, _TAG) for peer, t in outgoing]
        batch = [dist.P2POp(dist.irecv, t, peer) for peer, t in incoming]
        batch += [dist.P2POp(dist.isend, t, peer) for peer, t in outgoing]
        return dist.batch_isend_irecv(batch) if batch else []

    def _by_all_to_all(
        self,
        step: Step,
        here: Route,
        local: torch.Tensor,
        target: torch.Tensor,
        sends: Sequence[Message],
        recvs: Sequence[Message],
        with_kept: bool,
    ) -> None:
        """One uneven all-to-all of packed messages, in the order of the group's ranks."""
        ranks = self._exchanging([step])
        outgoing = {m.peer: m for m in sends}
        expected = {m.peer: m for m in recvs}
        in_sizes = [outgoing[rank].numel if rank in outgoing else 0 for rank in ranks]
        out_sizes = [expected[rank].numel if rank in expected else 0 for rank in ranks]
        packed = local.new_empty(sum(in_sizes))
        for part, rank in zip(packed.split(in_sizes), ranks, strict=True):
            if rank in outgoing:
                pack_into(part, local, outgoing[rank].box)
        unit = 1 if self._moves(packed.dtype) else packed.dtype.itemsize
        buffer = _wait(
            _all_to_all(
                self._wire(packed),
                [n * unit for n in out_sizes],
                [n * unit for n in in_sizes],
                self._group(ranks),
            )
        ).view(packed.dtype)
        pieces = dict(zip(ranks, buffer.split(out_sizes), strict=True))
        arrived = {m.peer: pieces[m.peer].view(_box_shape(m)) for m in recvs}
        settle(here, step.collective.reduce_op, local, target, arrived, recvs, with_kept)  # type: ignore[union-attr]

    def _post(
        self, steps: Sequence[Step], parcels: dict[int, torch.Tensor], sizes: dict[int, int]
    ) -> dict[int, torch.Tensor]:
        """The bytes from each peer, for bytes to each peer: one collective for the group."""
        if self.backend == "gloo":
            incoming = {
                peer: torch.empty(size, dtype=torch.uint8, device=self.device)
                for peer, size in sizes.items()
            }
            for work in self._messages(list(parcels.items()), list(incoming.items())):
                work.wait()
            return incoming
        ranks = self._exchanging(steps)
        nothing = torch.empty(0, dtype=torch.uint8, device=self.device)
        packed = torch.cat([nothing, *(parcels[r] for r in ranks if r in parcels)])
        out_sizes = [sizes.get(rank, 0) for rank in ranks]
        in_sizes = [parcels[rank].numel() if rank in parcels else 0 for rank in ranks]
        buffer = _wait(_all_to_all(packed, out_sizes, in_sizes, self._group(ranks)))
        # a copy for each, since a part of a buffer need not be aligned for its dtype
        parts = zip(ranks, buffer.split(out_sizes), strict=True)
        return {rank: part.clone() for rank, part in parts if rank in sizes}

    def _exchanging(self, steps: Sequence[Step]) -> tuple[int, ...]:
        """The ranks, ascending, that take part in an all-to-all of these exchanges."""
        return _exchanging(tuple(steps), self.rank)

    # --- what the backend lacks --------------------------------------------------------------

    def _moves(self, dtype: torch.dtype) -> bool:
        """Whether the backend moves a dtype as it is."""
        return dtype in _GLOO

    def _wire(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor as it travels: flat, and as bytes where the backend lacks its dtype."""
        wire = tensor.contiguous().view(-1)
        return wire if wire.dtype in _GLOO else wire.view(torch.uint8)

    def _reduces(self, dtype: torch.dtype, reduce_op: ReduceOp) -> bool:
        """Whether the backend has this reduction."""
        if dtype.is_complex:
            return reduce_op in ("sum", "avg") and dtype != torch.complex32
        if reduce_op in _BITS:
            return self.backend == "gloo" and dtype in _GLOO
        return dtype in _GLOO

    def _reduce_by_bytes(self, step: Step, value: torch.Tensor) -> torch.Tensor:
        """An all_reduce as two exchanges of the flat tensor, if the backend cannot reduce it."""
        collective = step.collective
        assert isinstance(collective, AllReduce)
        mesh = step.src.mesh
        shape = (value.numel(),)

        def over(place: Any, order: Any = None) -> TensorType:
            placements = [place if axis in collective.axes else Replicate() for axis in mesh.axes]
            return TensorType(shape, value.dtype, Layout(mesh, placements, order))

        terms, owned, whole = over(Partial(collective.reduce_op)), over(Shard(0)), over(Replicate())
        first, second = by_exchange(terms, owned), by_exchange(owned, whole)
        return self.exchange(second, self.exchange(first, value.reshape(-1))).view(value.shape)

    # --- groups ------------------------------------------------------------------------------

    def _coset(self, mesh: Mesh, axes: Sequence[str]) -> tuple[list[int], str, list[int]]:
        """Sizes of the axes, the group of this rank's coset, and in which order it has the axes."""
        key = (mesh, axes)
        found = self._cosets.get(key)
        if found is None:
            ranks = mesh.coset(axes, mesh.coord(self.rank) or ())
            counts = [mesh.axis_size(axis) for axis in axes]
            stack = sorted(range(len(axes)), key=lambda i: mesh.axis(axes[i]))
            found = self._cosets[key] = (counts, self._group(tuple(sorted(ranks))), stack)
        return found

    def _group(self, ranks: tuple[int, ...]) -> str:
        return group_of(ranks)


def _box_shape(message: Message) -> list[int]:
    return [sum(stop - start for start, stop in held) for held in message.box]


def _tensor(value: Any, step: Step, comm: FuncolComm) -> torch.Tensor:
    """The value, or nothing for a rank that is not in the source."""
    if isinstance(value, torch.Tensor):
        return value
    return torch.empty(0, dtype=step.src.dtype, device=comm.device)


@functools.lru_cache(maxsize=4096)
def _exchanging(steps: tuple[Step, ...], rank: int) -> tuple[int, ...]:
    """On one mesh the coset of all axes that exchange, else every rank of the meshes."""
    meshes = {mesh: None for step in steps for mesh in (step.src.mesh, step.dst.mesh)}
    if len(meshes) > 1:
        return tuple(sorted({r for mesh in meshes for r in mesh.order}))
    mesh = next(iter(meshes))
    axes = {axis for step in steps for axis in step.collective.axes or ()}  # type: ignore[union-attr]
    coord = mesh.coord(rank)
    assert coord is not None
    return tuple(sorted(mesh.coset([axis for axis in mesh.axes if axis in axes], coord)))
