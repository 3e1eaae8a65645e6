"""`vjp` of functions of DTensors: the results, and the way back by the graphs of their tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fdtensor.layouts.errors import ValueTreeError
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.tree import flatten, unflatten
from fdtensor.ops.transparent import recording
from fdtensor.tensors.calls.inlined import as_records, as_tensors
from fdtensor.tensors.dtensor import DTensor, is_dtensor
from fdtensor.tensors.pulled import filled, pulled
from fdtensor.tensors.refusals import refuse_no_cotangents
from fdtensor.tensors.transforms import Transformed, lifted

__all__ = ["vjp"]


def vjp(func: Callable[..., Any], *primals: Any, has_aux: bool = False) -> Any:
    """The results of a function of DTensors and the way back, as `torch.func.vjp`.

    The way back takes DTensors like the results, in any layouts, and gives the cotangents of
    `primals`; it may be gone several times. With `has_aux` the function returns a pair, of which
    the second comes back last, without derivatives.

    >>> mesh = Mesh(x=2)
    >>> x = distribute(torch.arange(4.0), mesh.layout("x"), SimulatedComm(mesh))
    >>> y, back = fd.vjp(lambda x: x * x, x)
    >>> back(x)[0].full()
    tensor([ 0.,  2.,  8., 18.])
    """
    leaves, spec = flatten((primals, {}), is_leaf=is_dtensor)
    records = [leaf for leaf in leaves if isinstance(leaf, DTensor)]
    if not records:
        return torch.func.vjp(func, *primals, has_aux=has_aux)
    if recording():
        return _vjp_in_trace(
            lifted(func, records[0].mesh, leaves), primals, has_aux, records[0].mesh
        )
    tracked = [_tracked(leaf) if isinstance(leaf, DTensor) else leaf for leaf in leaves]
    with torch.enable_grad():
        result = Transformed(func, _itself)(*unflatten(spec, tracked)[0])
    out, *aux = result if has_aux else (result,)
    ends, tree = flatten(out, is_leaf=is_dtensor)

    def back(cotangents: Any) -> Any:
        own, structure = flatten(cotangents, is_leaf=is_dtensor)
        if structure != tree:
            raise ValueTreeError(
                "the cotangents do not have the structure of the results.",
                results=tree,
                cotangents=structure,
                hint="Give a DTensor for each result.",
            )
        refuse_no_cotangents("cotangents", own, DTensor)
        again = torch.is_grad_enabled() and any(x.requires_grad for x in (*own, *records))
        starts = [x for x in tracked if is_dtensor(x)]
        grads = iter(filled(starts, pulled(ends, own, starts, again=again)))
        return unflatten(spec, [next(grads) if is_dtensor(x) else None for x in tracked])[0]

    if not (torch.is_grad_enabled() and any(x.requires_grad for x in records)):
        out = unflatten(tree, [end.detach() for end in ends])
        aux = [_detached(a) for a in aux]
    return (out, back, *aux)


def _detached(tree: Any) -> Any:
    leaves, spec = flatten(tree, is_leaf=is_dtensor)
    return unflatten(spec, [x.detach() if isinstance(x, DTensor) else x for x in leaves])


def _vjp_in_trace(f: Callable[..., Any], primals: Any, has_aux: bool, mesh: Mesh) -> Any:
    """The results and the way back inside of a function that is traced."""
    out, back, *aux = torch.func.vjp(f, *as_tensors(primals), has_aux=has_aux)

    def back_to_records(cotangents: Any) -> Any:
        return as_records(back(as_tensors(cotangents)), mesh)

    return (as_records(out, mesh), back_to_records, *(as_records(a, mesh) for a in aux))


def _tracked(x: DTensor[Any]) -> DTensor[Any]:
    """The same tensor as one of which derivatives are asked; integers have none."""
    if not (x.dtype.is_floating_point or x.dtype.is_complex):
        return x
    if torch.is_grad_enabled() and x.requires_grad:
        local = x.comm.value([leaf.view_as(leaf) for leaf in x.comm.leaves(x.local)])
        return DTensor(local, x.type, x.comm)
    return x.detach().requires_grad_()


def _itself(f: Callable[..., Any]) -> Callable[..., Any]:
    return f
