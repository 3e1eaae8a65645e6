"""`differences`: what ranks claim to hold alike and do not, of replicas and plain values."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch

from fdtensor.io.checkpoint.boxes import held
from fdtensor.io.checkpoint.together import gathered, together
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.placement import Partial
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.plans.planner import plan
from fdtensor.runtime.alike import Claim, replicas, unlike
from fdtensor.runtime.comm import Comm
from fdtensor.runtime.fingerprint import fingerprint
from fdtensor.runtime.interpreter import run
from fdtensor.tensors.distribution import local_blocks
from fdtensor.tensors.dtensor import DTensor

__all__ = ["differences"]

WORDS = 4
"""How many numbers of 32 bits all ranks add up."""


@attrs.frozen
class _Held:
    """That `rank` holds of a value what all of `ranks` hold."""

    key: tuple[str, int]
    """The name of the value, and the first of the ranks."""
    ranks: Sequence[int]
    rank: int
    print: bytes


def differences(values: Mapping[str, Any], comm: Comm[Any]) -> dict[str, str]:
    """By the names of values that ranks should hold alike and do not: which ranks agree.

    Collective: one reduction of a few bytes, and only where it finds something, or where ranks have
    other names, all of them tell what they have.
    """
    claims = together(
        "save_checkpoint", comm, lambda: [c for n, v in values.items() for c in _claims(n, v, comm)]
    )
    if comm.rank is None:
        return unlike([(c.rank, c.key, c.print) for c in claims])
    if comm.mesh.size == 1 or _all_alike([*claims, _meshes(values, comm)], comm):
        return {}
    own = [(c.rank, c.key, c.print) for c in claims]
    own += [claim for n, v in values.items() for claim in _claims_on_part(n, v, comm)]
    return unlike([claim for claims in gathered(own, comm) for claim in claims])


def _meshes(values: Mapping[str, Any], comm: Comm[Any]) -> _Held:
    """The claim that all ranks have the same names, each for a tensor of the same mesh.

    Where they have not, one name may be that of a tensor on each of several meshes.
    """
    places = sorted((n, repr(v.mesh) if isinstance(v, DTensor) else "") for n, v in values.items())
    ranks = sorted(comm.mesh.order)
    assert comm.rank is not None
    return _Held(("", -1), ranks, comm.rank, repr(places).encode())


def _claims_on_part(name: str, value: Any, comm: Any) -> Iterator[Claim]:
    """What a rank claims that others who have the name may have on other meshes."""
    if not isinstance(value, DTensor):
        yield comm.rank, (name, -1), "plain"
        return
    yield comm.rank, (name, -1), str(value.type)
    if {*value.mesh.order} >= {*comm.mesh.order}:
        return
    for box, local in held(value):
        place = hashlib.blake2b(repr(box).encode(), digest_size=7).digest()
        yield comm.rank, (name, -2 - int.from_bytes(place, "little")), fingerprint(local)


def _claims(name: str, value: Any, comm: Any) -> Iterator[_Held]:
    own = comm.rank
    if isinstance(value, DTensor):
        sets = {rank: ranks for ranks in replicas(value.type) for rank in ranks}
        for rank, local in local_blocks(value.local, value.mesh, value.comm):
            if rank in sets:
                yield _Held((name, sets[rank][0]), sets[rank], rank, fingerprint(local))
    elif own is not None and _is_plain(value):
        ranks = sorted(comm.mesh.order)
        yield _Held((name, ranks[0]), ranks, own, fingerprint(value))


def _is_plain(value: Any) -> bool:
    """Whether a value is stored as it is: not by a subclass of tensors that has its own way."""
    return not isinstance(value, torch.Tensor) or type(value) in (torch.Tensor, torch.nn.Parameter)


def _all_alike(claims: Sequence[_Held], comm: Any) -> bool:
    """Whether sums over all ranks are 0, to which the first of n ranks adds n - 1 times a word.

    The others take it away once each. Words are added modulo 2^32, so that no sum overflows.
    """
    totals = [0] * WORDS
    for claim in claims:
        share = len(claim.ranks) - 1 if claim.rank == claim.ranks[0] else -1
        digest = hashlib.blake2b(repr(claim.key).encode() + claim.print).digest()
        for i in range(WORDS):
            totals[i] += share * int.from_bytes(digest[4 * i : 4 * i + 4], "little")
    words = torch.tensor([t % 2**32 for t in totals], device=comm.device)
    pending = Layout(comm.mesh, [Partial("sum")] * comm.mesh.ndim)
    src = TensorType((WORDS,), torch.int64, pending)
    summed = run(plan(src, comm.mesh.layout(), cost=comm.cost), words, comm)
    return all(total % 2**32 == 0 for total in summed.tolist())
