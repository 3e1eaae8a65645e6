"""`shard_map`: a function of local tensors and named collectives, as a function of DTensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, overload
from weakref import WeakKeyDictionary

import attrs
import torch

from fdtensor.layouts.errors import CommError
from fdtensor.layouts.expected import no_mesh
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.opaque import opaque
from fdtensor.layouts.placement import Replicate
from fdtensor.layouts.signatures import named_arguments
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.layouts.torch_private import transforms_active
from fdtensor.layouts.tree import flatten, paths, unflatten
from fdtensor.ops.transparent import recording
from fdtensor.plans.local_tensors import own
from fdtensor.programs.options import EVERY_CALL
from fdtensor.programs.recording import name_of, refuse_no_function
from fdtensor.runtime.alike import compare, inputs
from fdtensor.runtime.autograd import shared
from fdtensor.runtime.comm import Comm
from fdtensor.runtime.interpreter import Deed, digest_of
from fdtensor.runtime.replication import mark
from fdtensor.tensors.dtensor import DTensor, is_dtensor
from fdtensor.tensors.shard_map.arguments import (
    OPEN,
    checked,
    laid_out,
    no_tensor_result,
    opened,
    prefixed,
    refuse_captured,
)
from fdtensor.tensors.shard_map.joint import joint
from fdtensor.tensors.shard_map.nested import in_another, nested
from fdtensor.tensors.shard_map.places import Call, Place, Table, at
from fdtensor.tensors.shard_map.program import Kind, Program
from fdtensor.tensors.shard_map.real import RealPlace
from fdtensor.tensors.shard_map.result_types import result_types
from fdtensor.tensors.shard_map.traced import mapped_in_trace
from fdtensor.tensors.shard_map.varying import enter, is_tracked, leave, replicated

__all__ = ["shard_map"]

P = ParamSpec("P")


@overload
def shard_map(
    f: Callable[P, torch.Tensor], mesh: Mesh, in_layouts: Any = None, out_layouts: Any = None
) -> Callable[P, DTensor[Any]]: ...


@overload
def shard_map(
    f: Callable[P, Any], mesh: Mesh, in_layouts: Any = None, out_layouts: Any = None
) -> Callable[P, Any]: ...


@named_arguments
def shard_map(
    f: Callable[..., Any], mesh: Mesh, in_layouts: Any = None, out_layouts: Any = None
) -> Callable[..., Any]:
    """The function of DTensors that runs `f` on the local tensors of every rank of `mesh`.

    `f` sees what this rank holds, and talks to others by `psum`, `all_gather`, `ppermute`, ... and
    the names of axes. `in_layouts` and `out_layouts` are pytree prefixes of the arguments and of
    the result: arguments come in another layout where theirs differs, None takes them as they are;
    a result for which None stands is replicated. Full shapes follow from local ones. Arguments that
    are Python values reach `f` as they are. What `f` writes to its arguments nobody else sees.

    Differentiable: gradients are those of the function of full tensors. In `f`, an input replicated
    over an axis gets the sum of its ranks' cotangents, and a result replicated over an axis has its
    cotangent once.

    In a function of `shard_map` another one takes tensors of this rank, cuts them along axes along
    which they are whole, and gathers what its function gives.

    Inside of a function that is traced it becomes lines of the program, with its bytes: `f` runs
    once, for all ranks, so that `axis_index` is a tensor there. Blocks are even there, and the
    arguments need `in_layouts`.

    On a simulated mesh all ranks run here, in turns, and results that are said to be replicated are
    compared. On a real mesh ranks tell each other what they call where arguments of these types
    come for the first time; one that fails then stops all. Later calls trust that.

    >>> mesh = Mesh(x=2)
    >>> x = distribute(torch.arange(4), mesh.layout("x"), SimulatedComm(mesh))
    >>> def total(block):
    ...     return fd.collectives.psum(block.sum(), "x")

    >>> shard_map(total, mesh, mesh.layout("x"))(x).full()
    tensor(6)
    """
    if not isinstance(mesh, Mesh):
        raise no_mesh(mesh)
    refuse_no_function(f)
    ins, outs = opened(in_layouts, mesh, "in_layouts"), opened(out_layouts, mesh, "out_layouts")
    known: WeakKeyDictionary[Any, dict[Any, Sequence[Table]]] = WeakKeyDictionary()

    @functools.wraps(f)
    def mapped(*args: Any) -> Any:
        if recording() or in_another(args):
            return (mapped_in_trace if recording() else nested)(f, mesh, ins, outs, args)
        leaves, spec = flatten(args, is_leaf=is_dtensor)
        wanted = prefixed(ins, spec, len(leaves), "in_layouts", "the arguments")
        comm = checked(leaves, paths(spec, "args"), mesh, wanted)
        refuse_captured(f)
        leaves = laid_out(leaves, wanted)
        places = [i for i, leaf in enumerate(leaves) if is_dtensor(leaf)]
        run = _Run(f, mesh, outs, leaves, spec, places)
        values = [leaves[i].to_local() for i in places]
        wrong = [comm.mistake(v, leaves[i].type) for v, i in zip(values, places, strict=True)]
        wrong = [mistake for mistake in wrong if mistake]
        if comm.rank is None:
            if wrong:
                comm.refuse("shard_map", wrong[0])
            kinds = [_kind(leaves[i].layout) for i in places]
            check = comm.check != "never"
            results = joint(Program(mesh, comm, run, kinds, run.kinds, check), values)
        else:
            # what ranks say of derivatives depends on these
            modes = (torch.is_grad_enabled(), transforms_active())
            flags = (*map(is_tracked, values), *modes)
            results = _on_this_rank(run, comm, values, flags, wrong, known.setdefault(comm, {}))
        pairs = zip(results, run.types, strict=True)
        out = [DTensor(shared(value, type, comm), type, comm) for value, type in pairs]
        return unflatten(run.spec, out)

    return opaque(mapped)


@attrs.define(eq=False)
class _Run:
    """One call: a function of this rank's tensors. It learns what the results are."""

    f: Callable[..., Any]
    mesh: Mesh
    outs: Any
    leaves: Sequence[Any]
    tree: Any
    places: Sequence[int]
    spec: Any = None
    types: Sequence[TensorType] = ()
    kinds: list[Kind] = attrs.field(factory=list)

    def __call__(self, place: Place, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        arguments = list(self.leaves)
        for i, tensor in zip(self.places, tensors, strict=True):
            arguments[i] = own(enter(place, tensor, self.leaves[i].layout))
            mark([arguments[i]], None, own=True)  # f may give each rank something else
        with at(place):
            result = self.f(*unflatten(self.tree, arguments))
        leaves, spec = flatten(result)
        leaves = [own(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        layouts = prefixed(self.outs, spec, len(leaves), "out_layouts", "the result")
        for leaf, where in zip(leaves, paths(spec, "result"), strict=True):
            if not isinstance(leaf, torch.Tensor):
                raise no_tensor_result(where, leaf)
        whole = Layout(self.mesh, [Replicate()] * self.mesh.ndim)
        layouts = [whole if layout is OPEN else layout for layout in layouts]
        tree = "returns" if spec.is_leaf() else f"returns {spec}"
        call = Call.of(tree, leaves, [is_tracked(leaf) for leaf in leaves])
        table = place.meet(call)
        self.types = result_types(layouts, table, leaves, paths(spec, "result"), place)
        self.spec = spec
        self.kinds[:] = map(_kind, layouts)
        tracked = [
            any(call_of_rank.tracked[i] for call_of_rank in table) for i in range(len(leaves))
        ]
        return leave(place, leaves, layouts, tracked)


def _go(run: _Run, place: RealPlace, values: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    try:
        return run(place, values)
    except Exception as error:
        place.fail(error)
        raise


def _kind(layout: Layout) -> Kind:
    return Kind(replicated(layout), tuple(layout.partial))


def _on_this_rank(
    run: _Run,
    comm: Comm[Any],
    values: Sequence[torch.Tensor],
    flags: tuple[bool, ...],
    wrong: Sequence[str],
    known: dict[Any, Sequence[Table]],
) -> Sequence[torch.Tensor]:
    """The result of the function on this rank of a real mesh."""
    rank: int = comm.rank  # type: ignore[attr-defined]
    if run.mesh.position(rank) is None:
        raise CommError(
            f"shard_map runs on rank {rank}, which is not in its mesh.",
            mesh=run.mesh,
            hint="Call it on the ranks of the mesh only.",
        )
    types = tuple([run.leaves[i].type for i in run.places])
    plain = [leaf for leaf in run.leaves if not is_dtensor(leaf)]
    key: Any = (types, flags, run.tree, tuple([(type(leaf), leaf) for leaf in plain]))
    try:
        trusted = None if comm.check in EVERY_CALL else known.get(key)
    except TypeError:  # a value that cannot be hashed may be another one each time
        trusted, key = None, None
    if trusted is None:
        facts = f"shard_map {types!r} {flags} {run.mesh!r}"
        comm.agree("shard_map", digest_of(facts), [run.mesh], wrong[0] if wrong else None)
    elif wrong:
        comm.refuse("shard_map", wrong[0], [run.mesh])
    if comm.check == "values":
        compare("shard_map", comm, [run.mesh], inputs(values, types))
    place = RealPlace(run.mesh, rank, comm, trusted)
    results = comm.watched(Deed(f"shard_map of {name_of(run.f)}", run.mesh), _go)(
        run, place, values
    )
    if key is not None:
        known[key] = place.heard
    return results
