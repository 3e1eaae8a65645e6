"""The messages between a caller and its ranks: calls and answers, and the DTensors in them.

What is simulated in the caller is real on the ranks, and the other way round. A DTensor of a call
becomes on each rank that rank's block of it; one that all ranks return comes back as one DTensor,
made of their blocks. Functions that the ranks cannot import go by value, with their source lines.
"""

from __future__ import annotations

import io
import linecache
import os
import pickle
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from operator import attrgetter
from types import CodeType
from typing import Any

import attrs
import cloudpickle
import torch

from fdtensor.layouts.errors import CommError
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.layouts.text import spans
from fdtensor.layouts.torch_private import (
    HigherOrderOperator,
    OpNamespace,
    OpOverload,
    OpOverloadPacket,
    qualified_name,
)
from fdtensor.ops.graph import op_named
from fdtensor.plans.local_tensors import empty
from fdtensor.runtime.comm import Check
from fdtensor.runtime.simulator import SimulatedComm
from fdtensor.tensors.dtensor import DTensor

__all__ = ["Block", "Call", "Side", "assembled", "dumps", "loads", "packed", "search_path"]

Side = tuple[Mesh, Check]
"""A Comm, for which the other side has its own kind."""


@attrs.frozen(eq=False)
class Block:
    """The block of a DTensor on one rank, on its way: a leaf, for autograd ends at the crossing."""

    type: TensorType
    side: Side
    local: torch.Tensor

    @classmethod
    def of(cls, tensor: DTensor[Any], local: torch.Tensor) -> Block:
        """The block of `tensor` that is `local`, without the rest of its storage."""
        leaf = local.detach().clone().requires_grad_(local.requires_grad)
        return cls(tensor.type, (tensor.comm.mesh, tensor.comm.check), leaf)


@attrs.frozen(eq=False)
class Call:
    """The call `fn(*args)`: a head that differs between ranks, and a body that is the same."""

    body: bytes
    sources: dict[str, list[str]]
    """The lines of notebook cells and of other code that no file has."""
    tensors: tuple[DTensor[Any], ...]
    comms: dict[Side, SimulatedComm]

    def head(self, rank: int) -> bytes:
        """Where to import from, the sources, and the blocks of `rank`."""
        blocks = [_block(tensor, rank) for tensor in self.tensors]
        return pickle.dumps((search_path(), self.sources, blocks))


def packed(fn: Callable[..., object], args: Sequence[object]) -> Call:
    """The call `fn(*args)`, ready to travel.

    A function of a module that is neither installed nor of this package goes by value.
    """
    name = getattr(getattr(fn, "func", fn), "__module__", None) or ""
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None)
    root = name.partition(".")[0]
    known = {"fdtensor", "__main__", *sys.stdlib_module_names}
    local = file and "-packages" not in file and root not in known
    if not local or name in cloudpickle.list_registry_pickle_by_value():
        return _packed(fn, args)
    cloudpickle.register_pickle_by_value(module)
    try:
        return _packed(fn, args)
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def _packed(fn: Callable[..., object], args: Sequence[object]) -> Call:
    body, pickler = dumps((fn, args), SimulatedComm)
    sources = {
        file: lines
        for file in sorted(pickler.files)
        if not os.path.exists(file) and (lines := linecache.getlines(file))
    }
    return Call(body, sources, tuple(pickler.tensors), pickler.comms)


def dumps(value: object, crosses: type[Any]) -> tuple[bytes, Pickler]:
    """The pickled value, and its pickler, which has the DTensors whose Comm is a `crosses`."""
    file = io.BytesIO()
    pickler = Pickler(file, crosses)
    pickler.dump(value)
    return file.getvalue(), pickler


def loads(data: bytes, tensors: Sequence[DTensor[Any]], comm: Callable[[Side], Any]) -> Any:
    """The value that was pickled, with these DTensors and with the Comms of this side."""
    return _Unpickler(io.BytesIO(data), tensors, comm).load()


class Pickler(cloudpickle.Pickler):
    """Leaves out what crosses over, DTensors and Comms; takes `torch.ops` and its ops by name."""

    def __init__(self, file: io.BytesIO, crosses: type[Any]) -> None:
        super().__init__(file)
        self.tensors: list[DTensor[Any]] = []
        self.comms: dict[Side, Any] = {}
        self.files: set[str] = set()
        self._crosses = crosses
        self._places: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> int | Side | None:
        tensor = obj if type(obj) is DTensor else None
        comm: Any = tensor.comm if tensor is not None else obj
        if not isinstance(comm, self._crosses):
            return None
        side = (comm.mesh, comm.check)
        self.comms[side] = comm
        if tensor is None:
            return side
        if id(tensor) not in self._places:
            self._places[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)
        return self._places[id(tensor)]

    def reducer_override(self, obj: Any) -> Any:
        match obj:
            case CodeType():
                self.files.add(obj.co_filename)
                return _with_file(obj, self.dispatch_table[CodeType](obj))
            case _ if obj is torch.ops:
                return getattr, (torch, "ops")
            case _ if obj is torch.ops.higher_order:
                return getattr, (torch.ops, "higher_order")
            case OpNamespace():
                return getattr, (torch.ops, obj.name)
            case OpOverloadPacket():
                return attrgetter(qualified_name(obj).replace("::", ".")), (torch.ops,)
            case OpOverload():
                return op_named, (obj.name(),)
            case HigherOrderOperator():
                return getattr, (torch.ops.higher_order, obj.name())
        return super().reducer_override(obj)


def _with_file(code: CodeType, reduced: Any) -> Any:
    """How cloudpickle makes `code`, with the file, which some versions leave out."""
    make, args = reduced
    return make, tuple(code.co_filename if arg == "<dynamic-code>" else arg for arg in args)


class _Unpickler(pickle.Unpickler):
    def __init__(
        self, file: io.BytesIO, tensors: Sequence[DTensor[Any]], comm: Callable[[Side], Any]
    ) -> None:
        super().__init__(file)
        self._tensors = tensors
        self._comm = comm

    def persistent_load(self, pid: int | Side) -> Any:
        return self._tensors[pid] if isinstance(pid, int) else self._comm(pid)


def _block(tensor: DTensor[Any], rank: int) -> Block:
    place = tensor.mesh.position(rank)
    local = empty(tensor.type, rank, torch.device("cpu")) if place is None else tensor.local[place]
    return Block.of(tensor, local)


def assembled(
    blocks: Sequence[Sequence[Block]], comm: Callable[[Side], SimulatedComm]
) -> list[list[DTensor[Any]]]:
    """The DTensors that the ranks have returned, from their blocks of them, in the same order.

    Blocks of one type belong together in the order in which each rank has returned them.
    """
    locals_of: dict[tuple[TensorType, Side, int], dict[int, torch.Tensor]] = {}
    keys = []
    for rank, own in enumerate(blocks):
        count: Counter[tuple[TensorType, Side]] = Counter()
        keys.append([])
        for block in own:
            kind = (block.type, block.side)
            keys[rank].append((*kind, count[kind]))
            locals_of.setdefault(keys[rank][-1], {})[rank] = block.local
            count[kind] += 1
    for (type, _, _), locals in locals_of.items():
        lacking = [rank for rank in type.mesh.order if rank not in locals]
        if lacking:
            raise CommError(
                f"rank {min(locals)} returned {type}, but {_name(lacking)} did not.",
                mesh=type.mesh,
                hint="A DTensor comes back when all ranks of its mesh return it. "
                "Return it on all of them, or return x.full() or x.local.",
            )
    tensors = {
        key: DTensor(tuple(locals[rank] for rank in key[0].mesh.order), key[0], comm(key[1]))
        for key, locals in locals_of.items()
    }
    return [[tensors[key] for key in own] for own in keys]


def _name(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {spans(ranks, ', ')}"


def search_path() -> list[str]:
    """`sys.path`, good in any directory."""
    return [entry or os.getcwd() for entry in sys.path]
