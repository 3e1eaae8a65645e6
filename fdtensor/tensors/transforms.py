"""The transforms of `torch.func` for functions of DTensors: `grad`, `jvp`, `vmap` and more.

Each traces the function with the transform around it, as one program of full tensors: what is
called in it, `spmd` functions, `call`, `redistribute` and `full` included, becomes a part. Without
DTensors among the arguments they are those of torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fdtensor.layouts.expected import whole_number
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.opaque import opaque
from fdtensor.layouts.tree import flatten, unflatten
from fdtensor.ops.pins import stacked_along
from fdtensor.ops.transparent import recording
from fdtensor.programs.meshes import one_mesh
from fdtensor.programs.program import Program
from fdtensor.programs.recording import name_of, refuse_no_function
from fdtensor.programs.tracer import is_typed, type_of
from fdtensor.tensors.calls.function import Spmd
from fdtensor.tensors.calls.functions import MadeOf
from fdtensor.tensors.calls.inlined import as_records, as_tensors
from fdtensor.tensors.calls.reads import argument_key, reads_of
from fdtensor.tensors.calls.weakly import Around
from fdtensor.tensors.dtensor import DTensor, is_dtensor

__all__ = [
    "Transformed",
    "grad",
    "grad_and_value",
    "hessian",
    "jacfwd",
    "jacrev",
    "jvp",
    "lifted",
    "vmap",
]


def grad(
    func: Callable[..., Any], argnums: int | tuple[int, ...] = 0, has_aux: bool = False
) -> Any:
    """The gradient of a function of DTensors that returns one number, as `torch.func.grad`.

    >>> mesh = Mesh(x=2)
    >>> x = distribute(torch.arange(4.0), mesh.layout("x"), SimulatedComm(mesh))
    >>> double = spmd(lambda x: 2 * x)
    >>> fd.grad(lambda x: (double(x) * x).sum())(x).full()
    tensor([ 0.,  4.,  8., 12.])
    """
    return Transformed(func, torch.func.grad, argnums=argnums, has_aux=has_aux)


def grad_and_value(
    func: Callable[..., Any], argnums: int | tuple[int, ...] = 0, has_aux: bool = False
) -> Any:
    """The gradient and the value of a function of DTensors, as `torch.func.grad_and_value`.

    >>> mesh = Mesh(x=2)
    >>> x = distribute(torch.arange(4.0), mesh.layout("x"), SimulatedComm(mesh))
    >>> grad, value = fd.grad_and_value(lambda x: (x * x).sum())(x)
    >>> grad.full(), value.item()
    (tensor([0., 2., 4., 6.]), 14.0)
    """
    return Transformed(func, torch.func.grad_and_value, argnums=argnums, has_aux=has_aux)


def jacrev(
    func: Callable[..., Any],
    argnums: int | tuple[int, ...] = 0,
    *,
    has_aux: bool = False,
    chunk_size: int | None = None,
) -> Any:
    """The Jacobian of a function of DTensors, row by row, as `torch.func.jacrev`.

    >>> mesh = Mesh(x=2)
    >>> x = distribute(torch.arange(4.0), mesh.layout("x"), SimulatedComm(mesh))
    >>> fd.jacrev(lambda x: x[1:] * x[:1])(x).full()
    tensor([[1., 0., 0., 0.],
            [2., 0., 0., 0.],
            [3., 0., 0., 0.]])
    """
    _check_chunk(chunk_size)
    options = {"argnums": argnums, "has_aux": has_aux, "chunk_size": chunk_size}
    return Transformed(func, torch.func.jacrev, **options)


def jacfwd(
    func: Callable[..., Any],
    argnums: int | tuple[int, ...] = 0,
    has_aux: bool = False,
    *,
    randomness: str = "error",
) -> Any:
    """The Jacobian of a function of DTensors, column by column, as `torch.func.jacfwd`.

    >>> mesh = Mesh(x=2)
    >>> x = distribute(torch.arange(4.0), mesh.layout("x"), SimulatedComm(mesh))
    >>> fd.jacfwd(lambda x: (x * x).sum())(x)
    DTensor(f32[4@x] on Mesh(x=2))
    """
    options = {"argnums": argnums, "has_aux": has_aux, "randomness": randomness}
    return Transformed(func, torch.func.jacfwd, **options)


def hessian(func: Callable[..., Any], argnums: int | tuple[int, ...] = 0) -> Any:
    """The second derivatives of a function of DTensors, as `torch.func.hessian`.

    >>> mesh = Mesh(x=2)
    >>> x = distribute(torch.arange(4.0), mesh.layout("x"), SimulatedComm(mesh))
    >>> fd.hessian(lambda x: (x * x * x).sum())(x).full().diagonal()
    tensor([ 0.,  6., 12., 18.])
    """
    return Transformed(func, torch.func.hessian, argnums=argnums)


def vmap(
    func: Callable[..., Any],
    in_dims: Any = 0,
    out_dims: Any = 0,
    randomness: str = "error",
    *,
    chunk_size: int | None = None,
    spmd_axis_name: str | None = None,
) -> Any:
    """A function of DTensors over a further dim of its arguments, as `torch.func.vmap`.

    The dim may be one that an axis cuts. Layouts that the function pins are those of one entry;
    with `spmd_axis_name` that axis cuts the further dim there, else no axis does.

    >>> mesh = Mesh(x=2)
    >>> x = distribute(torch.arange(6.0).reshape(2, 3), mesh.layout("x"), SimulatedComm(mesh))
    >>> fd.vmap(lambda row: row / row.sum())(x).full()
    tensor([[0.0000, 0.3333, 0.6667],
            [0.2500, 0.3333, 0.4167]])
    """
    _check_chunk(chunk_size)
    options = {"in_dims": in_dims, "out_dims": out_dims, "randomness": randomness}
    return Transformed(func, _vmap, chunk_size=chunk_size, spmd_axis_name=spmd_axis_name, **options)


def _check_chunk(size: object) -> None:
    """Raises for what is no number of entries: torch would compare a DTensor with numbers."""
    if size is not None:
        hint = "Write how many entries run at once, 1 or more, or None for all of them."
        whole_number("chunk_size", size, "number of entries", hint)


def _vmap(
    f: Callable[..., Any], *, spmd_axis_name: str | None, **options: Any
) -> Callable[..., Any]:
    """`torch.func.vmap`, within which pinned layouts are cut along the further dim by an axis."""

    def one(*args: Any, **kwargs: Any) -> Any:
        with stacked_along(spmd_axis_name):
            return f(*args, **kwargs)

    return torch.func.vmap(one, **options)


def jvp(
    func: Callable[..., Any],
    primals: Any,
    tangents: Any,
    *,
    strict: bool = False,
    has_aux: bool = False,
) -> Any:
    """The results of a function of DTensors and their tangents, as `torch.func.jvp`.

    >>> mesh = Mesh(x=2)
    >>> x = distribute(torch.arange(4.0), mesh.layout("x"), SimulatedComm(mesh))
    >>> y, tangent = fd.jvp(lambda x: x * x, (x,), (x,))
    >>> tangent.full()
    tensor([ 0.,  2.,  8., 18.])
    """
    run = Transformed(func, _jvp, strict=strict, has_aux=has_aux)
    return run(primals, tangents)


def _jvp(f: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return lambda primals, tangents: torch.func.jvp(f, primals, tangents, **options)


class Transformed:
    """A function of DTensors with a transform around it."""

    def __init__(self, func: Callable[..., Any], transform: Any, **options: Any) -> None:
        refuse_no_function(func)
        self.func, self.reads = func, reads_of(func)
        self.transform: Any = functools.partial(transform, **options)
        self.key = transform, argument_key(options)
        functools.update_wrapper(self, func, updated=())

    @opaque
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, spec = flatten((args, kwargs), is_leaf=is_dtensor)
        records = [leaf for leaf in leaves if isinstance(leaf, DTensor)]
        if not records:
            return self.transform(self.func)(*args, **kwargs)
        if recording():
            mesh = records[0].mesh
            args, kwargs = unflatten(spec, [as_tensors(leaf) for leaf in leaves])
            return as_records(
                self.transform(lifted(self.func, mesh, leaves))(*args, **kwargs), mesh
            )
        return self._function(leaves, records)(*args, **kwargs)

    @opaque
    def trace(self, *args: Any, **kwargs: Any) -> Program:
        """The program that a call with these arguments, DTensors or types, runs."""
        leaves, _ = flatten((args, kwargs), is_leaf=is_typed)
        return self._function(leaves, [x for x in leaves if is_typed(x)]).trace(*args, **kwargs)

    def _function(self, leaves: Sequence[Any], records: Sequence[Any]) -> Spmd[..., Any]:
        """The function of DTensors of these types, which lives as long as the one inside."""
        types = tuple([type_of(leaf) for leaf in leaves])
        known = _MADE.of(self.func)
        key = *self.key, types
        if key not in known:
            mesh = one_mesh([type_of(x) for x in records])  # type: ignore[misc]
            transform = self.transform

            def full(func: Callable[..., Any]) -> Callable[..., Any]:
                return transform(lifted(func, mesh, types))

            around, inside = name_of(self.key[0]).strip("_"), name_of(self.func)
            name = f"{around}({inside})" if around != "itself" else inside
            known[key] = Spmd(Around(self.func, full, name))
            known[key].reads = self.reads
        return known[key]


def lifted(func: Callable[..., Any], mesh: Mesh, leaves: Sequence[Any]) -> Callable[..., Any]:
    """The function of full tensors that is `func` of DTensors, by the types of its arguments."""
    types = [type_of(leaf) for leaf in leaves]

    def lifted(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = as_records((args, kwargs), mesh, types)
        return as_tensors(func(*args, **kwargs))

    return lifted


_MADE = MadeOf()
"""The functions with transforms around them, by what is around and the types."""
