"""`input_reshard`: a module whose activations wait for the backward as shards.

Megatron-LM keeps so what the ranks of a tensor parallel group all hold: Korthikanti et al.,
"Reducing Activation Recomputation in Large Transformer Models" (2022), arXiv:2205.05198.
"""

from __future__ import annotations

import functools
import hashlib
import sys
import threading
import weakref
from contextlib import suppress
from typing import Any, TypeVar

import attrs
import torch
from torch.autograd.graph import saved_tensors_hooks

from fdtensor.layouts.errors import CommError, LayoutError, MeshError, TraceError
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.signatures import named_arguments
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.layouts.torch_private import forward_hooks, transforms_active
from fdtensor.layouts.tree import flatten
from fdtensor.layouts.words import shown
from fdtensor.ops.transparent import recording
from fdtensor.parallel.kept import Kept, kept_block, kept_whole, type_of_blocks, unpacked
from fdtensor.programs.options import EVERY_CALL
from fdtensor.runtime.comm import Comm, refuse_no_comm
from fdtensor.runtime.interpreter import digest_of
from fdtensor.runtime.replication import known, leave, mark, same_along, storage_of, watched

__all__ = ["input_reshard", "remove_input_reshard"]

M = TypeVar("M", bound=torch.nn.Module)


@named_arguments
def input_reshard(
    module: M, comm: Comm[Any], *, axis: str, dim: int | None, check: bool = False
) -> M:
    """`module`, which keeps for its backward only this rank's block of each activation.

    While it runs forward, activations that autograd saves are cut along `dim`, counted from the
    end where negative, over the ranks of `axis`, and gathered where the backward reads them: it is
    collective then. Gradients are the same to the bit. With `dim=None` nothing changes;
    `remove_input_reshard` takes it off again.

    Activations are what the module computes from the tensors among its arguments, lists and dicts
    of them too; the caller promises that they are the same on every rank of the axis. With `check`
    every forward compares what is kept by one agreement over the axis, and all its ranks raise
    `CommError` where it differs; without, they agree on shapes and dtypes the first time. A promise
    is only needed of plain tensors: what is made of a DTensor, or of its local tensor, is cut where
    the DTensor is replicated over the axis, and left alone elsewhere. So are parameters, buffers
    and what is made of them alone, tensors without the dim or with one index along it, and what
    reduce_scatter and all_to_all give.

    Hooks of saved tensors that are set inside of the module take precedence, as everywhere in
    torch, and so do these before those around it. On a simulated Comm a plain tensor stands for
    that of every rank: nothing is saved, but all is as on a real mesh. Where a function is traced
    the module is just itself; see `saved_as`.

    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    >>> model = fd.parallel.input_reshard(model, SimulatedComm(Mesh(tp=2)), axis="tp", dim=0)
    >>> model(torch.ones(6, 4)).sum().backward()
    >>> model[0].weight.grad.shape
    torch.Size([8, 4])
    """
    refuse_no_comm(comm)
    if axis not in comm.mesh.axes:
        raise MeshError(
            f"the Comm has no axis {axis!r}.",
            mesh=comm.mesh,
            hint="Name the axis whose ranks hold the same activations.",
        )
    _check_module(module)
    if dim is None:
        return module
    if not isinstance(dim, int) or isinstance(dim, bool):
        raise LayoutError(f"dim {dim!r} is not an int.", hint="Name the dim to cut, or None.")
    coord = comm.mesh.coord(comm.mesh.order[0] if comm.rank is None else comm.rank)
    if coord is None or comm.mesh.axis_size(axis) == 1:
        return module
    remove_input_reshard(module)
    line = comm.mesh.part((axis,), coord)
    way = _Way(comm, axis, dim, check, line)
    module.register_forward_pre_hook(_Before(way), prepend=True, with_kwargs=True)
    module.register_forward_hook(_After(way), always_call=True)
    return module


def remove_input_reshard(module: M) -> M:
    """`module` without `input_reshard`; what it has kept already is gathered as before.

    >>> model = torch.nn.Linear(4, 8)
    >>> model = fd.parallel.input_reshard(model, SimulatedComm(Mesh(tp=2)), axis="tp", dim=0)
    >>> fd.parallel.remove_input_reshard(model) is model
    True
    """
    _check_module(module)
    by_number, facts_by_number = forward_hooks(module)
    for hooks in by_number:
        for number, hook in [*hooks.items()]:
            if isinstance(hook, (_Before, _After)):
                del hooks[number]
                for facts in facts_by_number:
                    facts.pop(number, None)
    return module


def _check_module(module: object) -> None:
    if not isinstance(module, torch.nn.Module):
        raise LayoutError(
            f"module={shown(module)} is not a torch.nn.Module.", hint="Wrap it in a module."
        )


@attrs.define(eq=False)
class _Way:
    """The arguments of `input_reshard`."""

    comm: Any
    axis: str
    dim: int
    check: bool
    line: Mesh
    """The ranks of the axis that this rank is one of."""
    agreed: set[str] = attrs.field(factory=set)
    """The lists of types that its ranks have agreed on."""
    held: Any = attrs.field(factory=weakref.WeakValueDictionary)
    """The blocks that are kept, by the place of the tensor in memory."""

    def __deepcopy__(self, memo: Any) -> _Way:
        return self  # a copy of a module runs on the same ranks


@attrs.define(eq=False)
class _Running:
    """A forward of the module that has begun."""

    way: _Way
    hooks: Any
    outermost: bool
    """Whether it began to watch."""
    fixed: frozenset[int | None]
    """The memories of parameters and buffers."""
    error: BaseException | None
    """The exception that was being handled when it began."""
    kept: list[str] = attrs.field(factory=list)
    """The types of what was cut, in order."""
    prints: list[str] = attrs.field(factory=list)
    """Fingerprints of the values, where they are compared."""


class _Here(threading.local):
    def __init__(self) -> None:
        self.running: list[tuple[_Way, _Running | None]] = []


_HERE = _Here()


@attrs.frozen(eq=False)
class _Before:
    way: _Way

    def __call__(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        quiet = not torch.is_grad_enabled() or recording()
        running = None if quiet else _begun(self.way, module, (args, kwargs))
        _HERE.running.append((self.way, running))


@attrs.frozen(eq=False)
class _After:
    way: _Way

    def __call__(self, module: torch.nn.Module, _args: Any, _result: Any) -> None:
        if all(way is not self.way for way, _ in _HERE.running):  # a hook before ours has failed
            return
        way, running = None, None
        while way is not self.way:  # what is inside of it and never ended was interrupted
            way, running = _HERE.running.pop()
            if running is not None:
                running.hooks.__exit__(None, None, None)
                if running.outermost:
                    leave()
        if running is None:
            return
        error = sys.exc_info()[1]
        failed = error if error is not running.error else None
        _agree(running, type(module).__name__, failed)


def _begun(way: _Way, module: torch.nn.Module, arguments: Any) -> _Running:
    if transforms_active():
        raise TraceError(
            f"a transform of torch.func surrounds {type(module).__name__}, whose activations are "
            "kept as shards.",
            hint="Use saved_as in a function that spmd traces, or .backward().",
        )
    tensors = (*module.parameters(), *module.buffers())
    fixed = frozenset(map(storage_of, tensors))
    around = next((r.fixed for _, r in reversed(_HERE.running) if r is not None), frozenset())
    running = _Running(way, None, watched(), fixed | around, sys.exc_info()[1])
    for leaf in flatten(arguments, is_leaf=_typed)[0]:
        if _typed(leaf):
            mark(leaf.comm.leaves(leaf.local), leaf.type)
        elif isinstance(leaf, torch.Tensor) and not known(leaf):
            mark([leaf], None)
    running.hooks = saved_tensors_hooks(functools.partial(_packed, running), unpacked)
    running.hooks.__enter__()
    return running


def _typed(leaf: Any) -> bool:
    """Whether it is a DTensor."""
    return isinstance(getattr(leaf, "type", None), TensorType) and hasattr(leaf, "local")


def _packed(running: _Running, tensor: torch.Tensor) -> Kept:
    way = running.way
    with torch.no_grad():
        tensor = tensor.detach()  # whose graph would hold what is kept, and so itself
        cut = _cut(running, tensor)
        if cut is None:
            return kept_whole(tensor)
        type = TensorType(tensor.shape, tensor.dtype, cut.layout)
        running.kept.append(f"{type} with strides {tensor.stride()}")
        if way.check:
            running.prints.append(_fingerprint(tensor))
        return kept_block(tensor, cut, way.comm, way.held)


def _cut(running: _Running, tensor: torch.Tensor) -> TensorType | None:
    """The type of the blocks of an activation; None for what stays as it is."""
    way = running.way
    device = way.comm.device or tensor.device
    if (
        tensor.device.type != device.type
        or storage_of(tensor) in running.fixed
        or not same_along(tensor, way.comm.mesh, way.axis)
    ):
        return None
    return type_of_blocks(tensor, way.line, way.dim)


def _fingerprint(tensor: torch.Tensor) -> str:
    bits = tensor.resolve_conj().resolve_neg().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.blake2b(bits.numpy().tobytes(), digest_size=16).hexdigest()


def _agree(running: _Running, name: str, error: BaseException | None) -> None:
    """Raises `CommError` on all ranks of the axis where they keep different things."""
    way, types = running.way, running.kept
    about, shapes = f"what {name} keeps for its backward", digest_of("\n".join(types))
    when = "always" if way.check else way.comm.check
    if error is not None:
        if when in EVERY_CALL or (when == "first" and not way.agreed):  # the others may wait for it
            rank = way.line.order[0] if way.comm.rank is None else way.comm.rank
            mistake = f"rank {rank}: {type(error).__name__} in forward"
            with suppress(CommError):
                way.comm.agree(about, shapes, [way.line], mistake)
        return
    if when == "never" or (when == "first" and shapes in way.agreed):
        return
    try:
        way.comm.agree(about, digest_of("\n".join(types + running.prints)), [way.line], None)
    except CommError as refusal:
        if "cannot start" in refusal.sentence:
            raise
        raise _difference(running, name, refusal) from None
    way.agreed.add(shapes)


def _difference(running: _Running, name: str, error: CommError) -> CommError:
    """The difference: the shapes, or the values of one of the activations."""
    way = running.way
    hint = (
        "Put input_reshard on modules whose activations are the same on every rank of the axis, "
        "such as norms; it leaves DTensors that are cut alone."
    )

    def differs(digest: str) -> bool:
        try:
            way.comm.agree("", digest, [way.line], None)
        except CommError:
            return True
        return False

    if differs(digest_of("\n".join(running.kept))):
        return CommError(
            f"the ranks along {way.axis!r} keep activations of other shapes for the backward of "
            f"{name}.",
            **{"this rank": "\n".join(running.kept) or "nothing"},
            hint=hint,
        )
    compared = running.kept[: len(running.prints)]
    for i, (text, value) in enumerate(zip(compared, running.prints, strict=True)):
        if differs(value):
            return CommError(
                f"activation {i} that {name} keeps for its backward differs along {way.axis!r}.",
                activation=text,
                hint=hint,
            )
    return error
