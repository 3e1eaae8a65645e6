"""Gradients of many parameters together: their norm, clipping, and whether all are finite.

Parameters may have any layouts, on any meshes of one Comm: each element counts once, and all ranks
get the same answer from one reduction of a few numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, ValuesView
from math import inf
from typing import Any, TypeVar

import torch

from fdtensor.layouts.errors import FdtensorError, ValueTreeError
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.opaque import opaque
from fdtensor.layouts.placement import Partial, ReduceOp, Replicate
from fdtensor.layouts.signatures import named_arguments
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.layouts.torch_private import foreach_mul_, foreach_norm
from fdtensor.layouts.tree import flatten, paths, unflatten
from fdtensor.layouts.words import a_kind
from fdtensor.plans.planner import plan
from fdtensor.runtime.interpreter import run
from fdtensor.tensors.agreement import agreed, comm_of, noted, union_of
from fdtensor.tensors.blockwise import remember
from fdtensor.tensors.connect import redistribute
from fdtensor.tensors.dtensor import DTensor, is_dtensor

__all__ = [
    "clip_grad_norm",
    "clip_grad_norm_",
    "found_inf",
    "gradients",
    "local_tensors",
    "total_norm",
]

Tree = TypeVar("Tree")


def local_tensors(tree: Any) -> list[torch.Tensor]:
    """The local tensors of the DTensors in a pytree, for an optimizer of torch.

    Those that work element by element (Adadelta, Adagrad, Adam, Adamax, AdamW, ASGD, NAdam, RAdam,
    RMSprop, Rprop, SGD) then hold their state as the parameters are held, and step as on one
    process: replicas stay the same, and empty blocks stay empty. Adafactor, LBFGS and Muon do not,
    and `step` refuses blocks; `fdtensor.optim` has those and the rest for DTensors in any layout.
    Parameters are leaves of autograd: `distribute(p.detach(), ...).requires_grad_()`. The state is
    one of local tensors, which `save_checkpoint` refuses: that of `fdtensor.optim` is distributed.

    >>> mesh = Mesh(x=2)
    >>> rows = mesh.layout("x")
    >>> comm = SimulatedComm(mesh)
    >>> x = distribute(torch.arange(4), rows, comm)
    >>> fd.optim.local_tensors({"w": x})
    [tensor([0, 1]), tensor([2, 3])]
    """
    tensors = [x for x in _leaves(tree)[0] if isinstance(x, DTensor)]
    for x in tensors:
        remember(x)
    return [leaf for x in tensors for leaf in x.comm.leaves(x.local)]


@opaque
def gradients(tree: Tree) -> Tree:
    """The gradients that `.backward()` left in the local tensors of a pytree, as DTensors.

    None for one that has none. They are the very tensors that an optimizer of torch reads.

    >>> mesh = Mesh(x=2)
    >>> w = distribute(torch.ones(4), mesh.layout("x"), SimulatedComm(mesh))
    >>> for block in w.local:
    ...     _ = block.requires_grad_()

    >>> call(torch.sum, w).full().backward()
    >>> gradients({"w": w})["w"].full()
    tensor([1., 1., 1., 1.])
    """
    leaves, spec = _leaves(tree)
    return unflatten(spec, [x.grad if isinstance(x, DTensor) else x for x in leaves])


@named_arguments
def total_norm(
    tree: Any, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
) -> torch.Tensor:
    """The norm of all numbers in a pytree of DTensors, 0-d and the same on all ranks.

    It is in float32, or in float64 where a gradient is. `norm_type` is above 0, or inf. Replicas
    count once; what is pending is reduced first. One reduction over the ranks of all meshes,
    collective over them; 0 on a rank that is in none. With `error_if_nonfinite` a norm that is
    infinite or nan raises `FdtensorError`, on all ranks.

    >>> mesh = Mesh(x=2)
    >>> rows = mesh.layout("x")
    >>> comm = SimulatedComm(mesh)
    >>> grads = {"w": distribute(torch.tensor([3.0, 0.0, 0.0, 4.0]), rows, comm)}
    >>> fd.optim.total_norm(grads)
    tensor(5.)
    """
    return _norm(_settled(tree, "total_norm"), norm_type, error_if_nonfinite)


@named_arguments
def clip_grad_norm(
    grads: Tree, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
) -> tuple[Tree, torch.Tensor]:
    """The gradients, scaled down together where their norm is over `max_norm`, and that norm.

    As `torch.nn.utils.clip_grad_norm_`, but for a pytree of DTensors and without changing them; see
    `total_norm`. The result is not differentiable.

    >>> mesh = Mesh(x=2)
    >>> rows = mesh.layout("x")
    >>> comm = SimulatedComm(mesh)
    >>> grads = {"w": distribute(torch.tensor([3.0, 0.0, 0.0, 4.0]), rows, comm)}
    >>> clipped, norm = fd.optim.clip_grad_norm(grads, max_norm=2.5)
    >>> norm, clipped["w"].full()
    (tensor(5.), tensor([1.5000, 0.0000, 0.0000, 2.0000]))
    """
    leaves, spec = _leaves(grads)
    settled = _settled(grads, "clip_grad_norm", max_norm, norm_type)
    norm = _norm(settled, norm_type, error_if_nonfinite)
    factor = _factor(norm, max_norm)
    clipped = iter(settled)
    results: list[Any] = []
    with torch.no_grad():
        for leaf in leaves:
            if isinstance(leaf, DTensor):
                x = next(clipped)
                scaled = [
                    t * factor.to(t.device, t.dtype.to_real()) for t in x.comm.leaves(x.local)
                ]
                leaf = DTensor(x.comm.value(scaled), x.type, x.comm)
            results.append(leaf)
    return unflatten(spec, results), norm


@named_arguments
def clip_grad_norm_(
    params: Any, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
) -> torch.Tensor:
    """The norm of what `.backward()` has left in parameters, which is scaled down in place.

    For optimizers of torch on `local_tensors`; `clip_grad_norm` changes nothing.

    >>> mesh = Mesh(x=2)
    >>> w = distribute(torch.ones(4), mesh.layout("x"), SimulatedComm(mesh))
    >>> blocks = [block.requires_grad_() for block in w.local]
    >>> call(torch.sum, w).full().backward()
    >>> fd.optim.clip_grad_norm_({"w": w}, max_norm=1.0)
    tensor(2.)
    >>> blocks[0].grad
    tensor([0.5000, 0.5000])
    """
    grads = gradients(params)
    settled = _settled(grads, "clip_grad_norm_", max_norm, norm_type)
    norm = _norm(settled, norm_type, error_if_nonfinite)
    factor = _factor(norm, max_norm)
    groups: dict[Any, list[torch.Tensor]] = {}
    for grad in local_tensors(grads):
        groups.setdefault((grad.device, grad.dtype), []).append(grad)
    with torch.no_grad():
        for (device, _), group in groups.items():
            foreach_mul_(group, factor.to(device))
    return norm


def found_inf(tree: Any) -> bool:
    """Whether any number in a pytree of DTensors is infinite or nan: the same on all ranks.

    One reduction over the ranks of all meshes; False on a rank that is in none.

    >>> mesh = Mesh(x=2)
    >>> rows = mesh.layout("x")
    >>> comm = SimulatedComm(mesh)
    >>> x = distribute(torch.tensor([1.0, float("inf")]), rows, comm)
    >>> fd.optim.found_inf({"w": x})
    True
    """
    settled = _settled(tree, "found_inf")

    def flags(blocks: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [(~t.isfinite()).any() for t in blocks]

    return bool(_reduced(settled, "max", flags, replicas=True))


# --- what they share -------------------------------------------------------------------------


def _leaves(tree: Any) -> tuple[list[Any], Any]:
    """The leaves of a pytree, or of what can be gone through, such as the values of a dict."""
    entries = list(tree) if isinstance(tree, (Iterator, ValuesView)) else tree
    leaves, spec = flatten(entries, is_leaf=is_dtensor)
    for leaf, path in zip(leaves, paths(spec, "tree"), strict=True):
        if isinstance(leaf, torch.Tensor):
            raise ValueTreeError(
                f"{path} is a plain tensor of shape {tuple(leaf.shape)}, of which ranks may hold "
                "different ones.",
                hint="Distribute it: distribute(tensor, layout, comm).",
            )
        if spec.is_leaf() and not isinstance(leaf, DTensor):
            raise ValueTreeError(
                f"{a_kind(leaf)} is no pytree of DTensors.",
                hint="Pass a list or dict of DTensors, nested as you like.",
            )
    return leaves, spec


def _settled(tree: Any, about: str, *numbers: float) -> list[DTensor[Any]]:
    """The DTensors of a pytree, reduced where they were pending; all ranks agree on their types.

    And find later where they have other `numbers`.
    """
    tensors = [x for x in _leaves(tree)[0] if isinstance(x, DTensor)]
    if not tensors:
        return tensors
    agreed(about, tensors)
    if numbers:
        noted(f"the numbers of {about}", numbers, tensors)
    with torch.no_grad():
        pending = [x for x in tensors if x.layout.partial]
        moved = iter(redistribute(pending, [x.type.cotangent().layout for x in pending]))
        return [next(moved) if x.layout.partial else x for x in tensors]


def _reduced(
    tensors: Sequence[DTensor[Any]],
    op: ReduceOp,
    numbers: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]],
    replicas: bool = False,
) -> torch.Tensor:
    """The reduction of a number for each block, over all blocks of all ranks, 0-d in float64.

    `replicas` says whether those of replicas are reduced too. Of a maximum nan is the largest.
    """
    if not tensors:
        return torch.zeros((), dtype=torch.float64)
    comm, mesh = comm_of(tensors), union_of(tensors)
    pending = Layout(mesh, [Partial(op)] * mesh.ndim)
    src = TensorType((2,), torch.float64, pending)
    device = comm.device or comm.leaves(tensors[0].local)[0].device

    def of(rank: int) -> torch.Tensor:
        blocks = [t for x in tensors if (t := _block(x, rank, replicas)) is not None and t.numel()]
        values = [n.to(device, torch.float64) for n in numbers(blocks)]
        total = torch.zeros((), dtype=torch.float64, device=device)
        if values:
            stacked = torch.stack(values)
            total = stacked.amax() if op == "max" else stacked.sum()
        nan = total.isnan()  # of which a maximum over ranks may or may not hear
        return torch.stack([total.nan_to_num(0.0, inf, -inf), nan.double()])

    value = comm.each(src, of)
    out = run(plan(src, mesh.layout(), cost=comm.cost), value, comm)
    total, nan = comm.leaves(out)[0].unbind()
    return torch.where(nan > 0, torch.full_like(total, torch.nan), total)


def _block(x: DTensor[Any], rank: int, replicas: bool) -> torch.Tensor | None:
    """The block of a rank; None for one outside, and for replicas but the first."""
    coord = x.mesh.coord(rank)
    if coord is None:
        return None
    for index, placement in zip(coord, x.layout.placements, strict=True):
        if isinstance(placement, Replicate) and index and not replicas:
            return None
    leaves = x.comm.leaves(x.local)
    return leaves[0 if len(leaves) == 1 else x.mesh.position(rank) or 0].detach()


def _norm(
    tensors: Sequence[DTensor[Any]], norm_type: float, error_if_nonfinite: bool
) -> torch.Tensor:
    p = float(norm_type) if isinstance(norm_type, (int, float)) else 0.0
    if not p > 0:
        raise FdtensorError(
            f"there is no norm of type {norm_type!r}.", hint="Give a number above 0, or inf."
        )

    def numbers(blocks: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        norms = [n.double() for n in _block_norms(blocks, p)]
        return norms if p == inf else [n**p for n in norms]

    total = _reduced(tensors, "max" if p == inf else "sum", numbers)
    norm = total if p == inf else total ** (1 / p)
    dtypes = {x.dtype.to_real() for x in tensors}
    norm = norm.to(torch.float64 if torch.float64 in dtypes else torch.float32)
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise FdtensorError(
            f"the norm of type {norm_type} of all gradients is {norm.item()}.",
            hint="Skip this step, or pass error_if_nonfinite=False to scale by it all the same.",
        )
    return norm


def _block_norms(blocks: Sequence[torch.Tensor], p: float) -> list[torch.Tensor]:
    """The norm of each block, in float32 or better."""
    groups: dict[Any, list[torch.Tensor]] = {}
    for t in blocks:
        wide = t if t.is_complex() or t.dtype.itemsize >= 4 else t.float()
        groups.setdefault((wide.device, wide.dtype), []).append(wide)
    return [norm for group in groups.values() for norm in foreach_norm(group, p)]


def _factor(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """The factor of gradients with this norm, as torch computes it."""
    many = isinstance(max_norm, torch.Tensor) and max_norm.numel() != 1
    if many or not isinstance(max_norm, (int, float, torch.Tensor)):
        raise FdtensorError(
            f"max_norm={max_norm!r} is no number.",
            hint="Give the largest norm: max_norm=1.0.",
        )
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)
