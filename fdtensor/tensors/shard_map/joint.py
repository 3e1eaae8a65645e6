"""`joint`: a function of one rank's tensors, run on all simulated ranks and differentiated as one.

Each rank has a graph of its own, in which the backward of a collective is a collective, as on a
real mesh. To the caller they are one function of the tensors of all ranks. Its first derivative
reads the graphs; others, and the transforms of `torch.func`, run the function again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import torch
from torch.autograd import forward_ad

from fdtensor.layouts.errors import LayoutError
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.torch_private import forward_level, nested_jvp, transforms_active
from fdtensor.runtime.autograd import spread, tracked
from fdtensor.runtime.comm import Comm
from fdtensor.tensors.shard_map.places import Place, SimulatedPlace, simulate

__all__ = ["Kind", "Program", "joint"]

Tensors = tuple[torch.Tensor, ...]


@attrs.frozen
class Kind:
    """How the tensors of all ranks are one value, to derivatives."""

    copies: tuple[str, ...]
    """The axes whose ranks have replicas of it."""
    terms: tuple[str, ...] = ()
    """The axes whose ranks have terms of it, which all have its cotangent."""

    def cotangent(self) -> Kind:
        """The kind of its cotangents."""
        return Kind(self.copies + self.terms)


Body = Callable[[Place, Sequence[torch.Tensor]], Tensors]


@attrs.define(eq=False)
class Program:
    """A function that every rank of a mesh runs, and the kinds of what it takes and gives."""

    mesh: Mesh
    comm: Comm[Any]
    body: Body
    ins: Sequence[Kind]
    outs: Sequence[Kind]
    """Known when the program has run."""
    check: bool = False
    """Whether to compare results that are said to be replicated."""
    flags: Sequence[bool] | None = None
    """Which inputs are leaves of graphs to keep; None where no graphs are kept."""
    grad: bool = attrs.field(factory=torch.is_grad_enabled)
    kept: Sequence[tuple[Tensors, Tensors]] = ()
    """For each rank the leaves and the results of its graph."""

    def run(self, leaves: Sequence[torch.Tensor]) -> Tensors:
        """The results of all ranks, from the tensors of all ranks: one after the other."""
        own_leaves = dict(
            zip(self.mesh.order, zip(*_grouped(leaves, self.mesh.size), strict=True), strict=True)
        )
        flags = self.flags

        def body(rank: int) -> tuple[Tensors, Tensors]:
            own: Tensors = own_leaves[rank]
            if flags is not None:
                pairs = zip(own, flags, strict=True)
                own = tuple([t.detach().requires_grad_() if flag else t for t, flag in pairs])
            with torch.set_grad_enabled(self.grad):
                return own, self.body(SimulatedPlace(self.mesh, rank), own)

        with _level():
            graphs = simulate(self.mesh, self.comm, body)
        results = list(zip(*(outs for _, outs in graphs), strict=True))
        if self.check:
            for i, result in enumerate(results):
                name = f"result {i}" if len(results) > 1 else "the result"
                _compare(result, self.mesh, self.outs[i].copies, name)
        if flags is not None:
            self.kept = graphs
        given_ids = set(map(id, leaves))
        flat = [t for result in results for t in result]
        if flags is not None:
            return tuple([t.detach() for t in flat])
        return tuple([t.view_as(t) if id(t) in given_ids else t for t in flat])

    def pulled(self, grads: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """The cotangents of the inputs, from the graphs of all ranks."""
        cotangents_of = zip(*_grouped(grads, self.mesh.size), strict=True)
        todo = dict(zip(self.mesh.order, zip(self.kept, cotangents_of, strict=True), strict=True))

        def body(rank: int) -> list[torch.Tensor | None]:
            (own, outs), own_cotangents = todo[rank]
            by = [t for t in own if t.requires_grad]
            pairs = [
                (out, g) for out, g in zip(outs, own_cotangents, strict=True) if out.requires_grad
            ]
            gradients: Any = iter([None] * len(by))
            if by and pairs:
                ends, cotangents = zip(*pairs, strict=True)
                gradients = iter(torch.autograd.grad(ends, by, cotangents, True, allow_unused=True))
            return [next(gradients) if t.requires_grad else None for t in own]

        gradients = simulate(self.mesh, self.comm, body)
        return [grad for grads in zip(*gradients, strict=True) for grad in grads]

    def transposed(self, by: Sequence[int], ends: Sequence[int]) -> Program:
        """The program of inputs and cotangents of results `ends` to cotangents of inputs `by`."""
        count = len(self.ins)

        def body(place: Place, inputs: Sequence[torch.Tensor]) -> Tensors:
            primal = self._partly(place, inputs[:count], by, ends)
            pull = torch.func.vjp(primal, *[inputs[i] for i in by])[1]
            return pull(tuple(inputs[count:]))

        ins = [*self.ins, *(self.outs[i].cotangent() for i in ends)]
        outs = [self.ins[i].cotangent() for i in by]
        return Program(self.mesh, self.comm, body, ins, outs, grad=True)

    def _partly(
        self, place: Place, inputs: Sequence[torch.Tensor], by: Sequence[int], ends: Sequence[int]
    ) -> Callable[..., Tensors]:
        """The function of inputs `by` alone that gives results `ends`."""

        def primal(*varied: torch.Tensor) -> Tensors:
            own = list(inputs)
            for i, tensor in zip(by, varied, strict=True):
                own[i] = tensor
            outs = self.body(place, own)
            return tuple([outs[i] for i in ends])

        return primal

    def pushed(self, by: Sequence[int], ends: Sequence[int]) -> Program:
        """The program of inputs and tangents of inputs `by` to tangents of results `ends`."""
        count = len(self.ins)

        def body(place: Place, inputs: Sequence[torch.Tensor]) -> Tensors:
            primal = self._partly(place, inputs[:count], by, ends)
            points = tuple([inputs[i] for i in by])
            return torch.func.jvp(primal, points, tuple(inputs[count:]))[1]

        ins = [*self.ins, *(self.ins[i] for i in by)]
        return Program(self.mesh, self.comm, body, ins, [self.outs[i] for i in ends], grad=True)

    def mapped(self, dims: Sequence[int | None], randomness: str) -> Program:
        """The program of tensors stacked along `dims`."""

        def body(place: Place, inputs: Sequence[torch.Tensor]) -> Tensors:
            one = torch.func.vmap(
                lambda *own: self.body(place, own),  # type: ignore[arg-type]
                tuple(dims),
                randomness=randomness,
            )
            return one(*inputs)

        return attrs.evolve(self, body=body, flags=None, kept=())


def joint(program: Program, values: Sequence[Tensors]) -> list[Tensors]:
    """The results of a program, each a tuple of all ranks' tensors. Differentiable."""
    leaves = [leaf for value in values for leaf in value]
    if not tracked(leaves):
        return _grouped(program.run(leaves), program.mesh.size)
    if not transforms_active() and forward_level() < 0:
        program.flags = [
            any(leaf.requires_grad for leaf in value) and torch.is_grad_enabled()
            for value in values
        ]
    return _grouped(_Joint.apply(program, *leaves), program.mesh.size)  # type: ignore[arg-type]


class _Joint(torch.autograd.Function):
    """A program on the tensors of all ranks, one input after the other."""

    @staticmethod
    def forward(program: Program, *leaves: torch.Tensor) -> Tensors:
        return program.run(leaves)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.program, *leaves = inputs
        ctx.save_for_backward(*leaves)
        ctx.save_for_forward(*leaves)
        ctx.set_materialize_grads(False)
        ctx.likes = [(out.shape, out.dtype, out.device) for out in output]
        if ctx.program.kept:
            outs = list(zip(*(outs for _, outs in ctx.program.kept), strict=True))
            flat = [out for result in outs for out in result]
            ends = [out for out, kept in zip(output, flat, strict=True) if not kept.requires_grad]
            ctx.mark_non_differentiable(*ends)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # type: ignore[override]
        program, leaves = ctx.program, ctx.saved_tensors
        known = _known(program, grads, ctx.likes)
        if program.kept and not torch.is_grad_enabled():
            return None, *program.pulled(known)
        by, ends, cotangents = _ways(ctx, leaves, known)
        gradients = _Joint.apply(program.transposed(by, ends), *leaves, *cotangents)
        return None, *_spaced(gradients, by, leaves, program.mesh.size)

    @staticmethod
    def jvp(ctx: Any, _program: None, *tangents: Any) -> Any:  # type: ignore[override]
        program, leaves, size = ctx.program, ctx.saved_tensors, ctx.program.mesh.size
        if not transforms_active():
            leaves = [forward_ad.unpack_dual(leaf).primal for leaf in leaves]
        zeros = [torch.zeros(s, dtype=dtype, device=d) for s, dtype, d in ctx.likes]
        by, ends, _ = _ways(ctx, leaves, zeros)
        moving = [t for i in by for t in _filled(tangents, leaves, i, size)]
        tangents_out: Any = _Joint.apply(program.pushed(by, ends), *leaves, *moving)
        return tuple(_spaced(tangents_out, ends, zeros, size))

    @staticmethod
    def vmap(info: Any, in_dims: Any, program: Program, *leaves: Any) -> Any:  # type: ignore[override]
        size, dims, stacked = program.mesh.size, [], []
        for value, own_dims in zip(
            _grouped(leaves, size), _grouped(in_dims[1:], size), strict=True
        ):
            batched = any(dim is not None for dim in own_dims)
            dims.append(0 if batched else None)
            for leaf, dim in zip(value, own_dims, strict=True):
                wide = leaf if dim is None else leaf.movedim(dim, 0)
                stacked.append(wide.expand(info.batch_size, *leaf.shape) if batched and dim is None
                               else wide)  # fmt: skip
        out = _Joint.apply(program.mapped(dims, info.randomness), *stacked)
        return out, (0,) * len(out)  # type: ignore[arg-type]


def _grouped(leaves: Sequence[Any], size: int) -> list[tuple[Any, ...]]:
    """The leaves of each value."""
    return [tuple(leaves[i : i + size]) for i in range(0, len(leaves), size)]


def _smooth(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _ways(ctx: Any, leaves: Sequence[Any], known: Sequence[Any]) -> tuple[Any, Any, list[Any]]:
    """The inputs and the results that have derivatives, and the cotangents of these."""
    size = ctx.program.mesh.size
    by = [i // size for i in range(0, len(leaves), size) if _smooth(leaves[i].dtype)]
    ends = [i // size for i in range(0, len(known), size) if _smooth(known[i].dtype)]
    return by, ends, [t for i in ends for t in known[i * size : (i + 1) * size]]


def _spaced(tensors: Any, at: Sequence[int], like: Sequence[Any], size: int) -> list[Any]:
    """The tensors found for values `at`, and None for the others."""
    out: list[Any] = [None] * len(like)
    for i, value in zip(at, _grouped(tensors, size), strict=True):
        out[i * size : (i + 1) * size] = value
    return out


def _filled(tangents: Sequence[Any], leaves: Sequence[Any], i: int, size: int) -> list[Any]:
    pairs = zip(tangents[i * size : (i + 1) * size], leaves[i * size : (i + 1) * size], strict=True)
    return [torch.zeros_like(leaf) if t is None else t for t, leaf in pairs]


@contextlib.contextmanager
def _level() -> Iterator[None]:
    """Holds a level of forward AD, which all threads have in common, while ranks run in turns.

    Else the first rank to begin a `torch.func.jvp` would end the level of all.
    """
    level = contextlib.nullcontext() if forward_level() >= 0 else forward_ad.dual_level()
    with level, nested_jvp():
        yield


def _known(program: Program, grads: Sequence[Any], likes: Sequence[Any]) -> list[Any]:
    """The cotangents, where a copy that nobody used has that of one that somebody used."""
    out, size = list(grads), program.mesh.size
    for n, kind in enumerate(program.outs):
        for places in _places(program.mesh, kind.cotangent().copies):
            used = [n * size + i for i in places if out[n * size + i] is not None]
            missing = [n * size + i for i in places if out[n * size + i] is None]
            if used and missing:
                copies = spread(out[used[0]], 1 + len(missing))
                for i, copy in zip([used[0], *missing], copies, strict=True):
                    out[i] = copy
    return [
        torch.zeros(shape, dtype=dtype, device=device) if grad is None else grad
        for grad, (shape, dtype, device) in zip(out, likes, strict=True)
    ]


def _places(mesh: Mesh, axes: tuple[str, ...]) -> list[list[int]]:
    """The places of the mesh, those that differ only in `axes` together."""
    cosets = {mesh.coset(axes, mesh.coord(rank) or ()): None for rank in mesh.order}
    return [[mesh.position(rank) or 0 for rank in ranks] for ranks in cosets]


# --- what is said to be replicated -----------------------------------------------------------


def _compare(result: Sequence[torch.Tensor], mesh: Mesh, axes: tuple[str, ...], name: str) -> None:
    """Raises where copies differ along an axis that is said to replicate them."""
    for axis in axes:
        for first, *others in _places(mesh, (axis,)):
            for other in others:
                if not _same(result[first], result[other]):
                    ranks = f"{mesh.order[first]} and {mesh.order[other]}"
                    raise LayoutError(
                        f"{name} of shard_map is said to be replicated over {axis!r}, but ranks "
                        f"{ranks} have different values.",
                        hint=f"psum it over {axis!r}, or say Shard or Partial in out_layouts.",
                    )


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether tensors are equal, but for the rounding of sums in another order."""
    a, b = a.detach(), b.detach()
    if a.is_meta:
        return True
    if not _smooth(a.dtype):
        return torch.equal(a, b)
    if a.dtype.itemsize == 1 or a.dtype == torch.complex32:
        a, b = (t.to(torch.complex64 if t.is_complex() else torch.float32) for t in (a, b))
    eps = 32 * torch.finfo(a.dtype).eps
    finite = a[a.isfinite()].abs()
    scale = float(finite.max()) if finite.numel() else 0.0
    return torch.allclose(a, b, rtol=eps, atol=eps * scale, equal_nan=True)
