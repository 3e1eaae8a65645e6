"""Arguments of a function of DTensors: plain tensors and keys become DTensors, or are refused."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fdtensor.layouts.errors import CommError, FdtensorError, TraceError, ValueTreeError
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.torch_private import transforms_active
from fdtensor.layouts.tree import argument, paths
from fdtensor.ops.random_bits.keys import AnyKey
from fdtensor.ops.random_key import key_type
from fdtensor.programs.failure_hints import name_of_torch
from fdtensor.programs.meshes import one_mesh
from fdtensor.programs.options import EVERY_CALL, Check, Options
from fdtensor.runtime.comm import speaker
from fdtensor.runtime.interpreter import digest_of
from fdtensor.tensors.calls.replicas import replica
from fdtensor.tensors.dtensor import DTensor, due, settled
from fdtensor.tensors.owed import STAND_INS

__all__ = [
    "compare_key",
    "distributed",
    "distributed_key",
    "entering",
    "key_tensor",
    "refuse_untraceable",
    "tell",
]


def distributed(f: Any, leaves: Sequence[Any], spec: Any, options: Options) -> list[Any]:
    """The arguments of a function of DTensors with plain tensors as replicated ones.

    Those of one element may, and with `plain="replicate"` all.
    """
    known = [leaf for leaf in leaves if isinstance(leaf, DTensor)]
    if not known:
        return list(leaves)
    mesh, comm = one_mesh([leaf.type for leaf in known]), known[0].comm
    taken = []
    for name, leaf in zip(paths(spec, "args"), leaves, strict=True):
        if isinstance(leaf, torch.Tensor):
            if leaf.numel() != 1 and options.plain != "replicate":
                raise _plain_beside(f, options.eager, argument(name), leaf, mesh)
            type = replica(leaf, mesh)
            leaf = DTensor(comm.value([leaf] * comm.width(type)), type, comm)
        taken.append(leaf)
    return taken


def _plain_beside(
    f: Any, eager: bool, name: str, tensor: torch.Tensor, mesh: Mesh
) -> ValueTreeError:
    """The error for a plain tensor of several elements beside DTensors."""
    way = f"write fd.call({name_of_torch(f.f)}, ..., " if eager else "pass "
    hint = (
        f"Distribute it first: distribute(tensor, layout, comm), or {way}"
        f'plain="replicate"{")" if eager else ""} if every rank holds the same one.'
    )
    if isinstance(tensor, torch.nn.Parameter):
        hint = "For a module write fd.bind(module, params)(x), with a DTensor for each parameter."
    return ValueTreeError(
        f"{name} is a plain tensor of shape {tuple(tensor.shape)} beside DTensors.",
        function=repr(f),
        mesh=mesh,
        hint=hint,
    )


def distributed_key(
    key: Any, known: Sequence[DTensor[Any]], check: Check | None, is_first: bool
) -> DTensor[Any]:
    """A random key beside `known` arguments, on every rank; they agree on it at the first call."""
    comm = known[0].comm
    type = key_type(one_mesh([leaf.type for leaf in known]))
    compare_key(key, comm, [type.mesh], check, is_first)
    whole = key_tensor(key, comm.device)
    return DTensor(comm.value([whole] * comm.width(type)), type, comm)


def compare_key(
    key: AnyKey, comm: Any, meshes: Sequence[Mesh], check: Check | None, is_first: bool
) -> None:
    """Lets the ranks of these meshes see that all have the same key: at once, or later."""
    check = check or comm.check
    if isinstance(key, torch.Tensor) and transforms_active():
        return  # one key of many
    if check in EVERY_CALL or (check != "never" and is_first):
        comm.agree("this key", digest_of(repr(_words(key))), [*meshes], None)
    elif not (isinstance(key, torch.Tensor) and key.is_cuda):  # a look at it would wait for the GPU
        for mesh in meshes:
            comm.note("this key", _words(key), mesh)


def key_tensor(key: AnyKey, device: Any) -> torch.Tensor:
    """The words of a key, on a device."""
    return key.to(device, torch.int64) if isinstance(key, torch.Tensor) else key.tensor(device)


def _words(key: AnyKey) -> tuple[int, ...]:
    return tuple(key.tolist()) if isinstance(key, torch.Tensor) else (key.high, key.low)


def tell(error: FdtensorError, leaves: Sequence[Any], check: Check | None) -> None:
    """Lets the other ranks fail too, where they wait to agree on a first program."""
    known = next((leaf for leaf in leaves if isinstance(leaf, DTensor)), None)
    if known is None or isinstance(error, CommError):
        return
    comm: Any = known.comm
    if (check or comm.check) == "never":
        return
    with contextlib.suppress(CommError):
        mistake = f"{speaker(comm)}{error.sentence.removesuffix('.')}"
        comm.agree("this program", digest_of(error.sentence), [known.mesh], mistake)


def refuse_untraceable(f: Callable[..., Any], leaves: Sequence[Any]) -> None:
    """Raises where no program can be made for a call with these arguments."""
    if transforms_active():
        raise TraceError(
            f"a transform of torch.func surrounds {f!r}.",
            hint="Write fd.grad, fd.vmap and the like around it, put the transform inside, "
            "spmd(torch.func.grad(f)), or use .backward() outside.",
        )
    if any(isinstance(leaf, torch.Generator) for leaf in leaves):
        raise TraceError(
            f"{f!r} was given a generator, from which each rank would draw its own numbers.",
            hint="Draw the numbers once, distribute them, and pass them in.",
        )


def entering(
    leaves: Sequence[Any], eager: bool, stays: Callable[[Sequence[Any]], bool]
) -> tuple[Sequence[Any], list[Any] | None]:
    """The arguments as a function of DTensors takes them, and their values if all are plain ones.

    One op of many (`eager`) takes the terms of sums that are due, where its result `stays` pending;
    others take the sums, and give the cotangents of these.
    """
    values = [x.held for x in leaves if x.__class__ is DTensor]
    if STAND_INS.isdisjoint(map(type, values)):
        return leaves, values
    if not eager:
        return [settled(x) if isinstance(x, DTensor) else x for x in leaves], None
    terms = [due(x) if isinstance(x, DTensor) else x for x in leaves]
    kept = all(map(operator.is_, terms, leaves)) or not stays(terms)
    return (leaves if kept else terms), None
