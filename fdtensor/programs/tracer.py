"""`trace`: a plain torch function of full tensors as a program of distributed ones."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import optree
import torch

from fdtensor.layouts.expected import no_mesh
from fdtensor.layouts.free_type import FreeType
from fdtensor.layouts.mesh import Mesh
from fdtensor.layouts.opaque import opaque
from fdtensor.layouts.planning import planning
from fdtensor.layouts.progress import working
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.layouts.tree import flatten, flatten_admitting, unflatten
from fdtensor.ops.ambient import neutral
from fdtensor.ops.random_key import is_key, key_type, with_random_key
from fdtensor.plans.cost import CostModel, model_of
from fdtensor.programs.as_if import Scale, at_scale, evenly
from fdtensor.programs.closed_over import closing, given_all, given_besides
from fdtensor.programs.dynamic import Dynamic, Recording
from fdtensor.programs.from_recorded import program_like, program_of
from fdtensor.programs.meshes import one_mesh
from fdtensor.programs.options import Choosing, OnMissingRule, Options, one_of_both
from fdtensor.programs.program import Program
from fdtensor.programs.recording import TENSOR, name_of, recorded, refuse_no_function

__all__ = ["Traced", "is_typed", "trace", "traced", "type_of"]


@attrs.frozen(eq=False)
class Traced:
    """A program, and the pytree of its results."""

    program: Program
    out_tree: optree.PyTreeSpec
    statics: tuple[Any, ...]
    """The leaves of the result, with `TENSOR` for each that the program computes."""
    bare: bool
    """Whether the function returns one tensor."""
    leaves: tuple[int, ...] = ()
    """The numbers of results that require grad but depend on no argument: leaves of autograd."""
    tracked: bool = False
    """Whether autograd would follow a result to a tensor that the function closes over."""
    recording: Recording | None = None
    """The recording for several sizes that it comes from."""

    @property
    def kind(self) -> type[list[Any]] | type[tuple[Any, ...]] | None:
        """The kind of the result where it is a list or tuple of tensors that are computed."""
        kind: Any = self.out_tree.type
        flat = kind in (list, tuple) and all(child.is_leaf() for child in self.out_tree.children())
        return kind if flat and len(self.program.outs) == self.out_tree.num_leaves else None

    def result(self, tensors: Sequence[Any]) -> Any:
        """The pytree that the function returns, with these in place of its tensors."""
        results = iter(tensors)
        leaves = [next(results) if leaf is TENSOR else leaf for leaf in self.statics]
        return unflatten(self.out_tree, leaves)


@opaque
def trace(
    f: Callable[..., Any],
    *args: Any,
    out_layouts: Any = None,
    cost: CostModel | None = None,
    regather: bool = False,
    on_missing_rule: OnMissingRule = "replicate",
    check_indices: bool = True,
    reduce_dtype: torch.dtype | None = torch.float32,
    deterministic: bool = False,
    max_bytes: int | None = None,
    as_if: Program | Scale | None = None,
    like: Program | None = None,
    choice: Choosing = "cheapest",
    mesh: Mesh | None = None,
    **kwargs: Any,
) -> Program:
    """The program of `f` for arguments of these types: pytrees of `TensorType`s or `DTensor`s.

    `f` is a plain torch function of full tensors; it is run once, on fake ones. Other leaves are
    Python values, and frozen into the program. `out_layouts` is a prefix of what `f` returns, with
    a Layout, None or `like(argument)` at each leaf. Where it is None the layout is that of the
    parameter where the output has the structure of an argument (gradients, updated parameters),
    that of the argument of its shape and dtype where they have one layout (a state that goes in
    again), else the cheapest one; `like(None)` always is the cheapest.
    With `check_indices` the program ends with a check of all indices, and of other operands that
    ops refuse for their values: it raises on all ranks. Pending sums of half precision are held and
    reduced in `reduce_dtype`; with None in their own. `key`, whose value does not matter, lets the
    random ops of `f` draw from a key.
    With `deterministic`, results have the bits that they have on one rank, on every mesh and in
    every layout: ops of which a kernel may round blocks otherwise, such as sums and products of
    matrices, run on whole operands, and what that moves stands in the program.
    Lines are in the order in which the least of what is sent is waited for, by `cost`. With
    `regather`, what an input is gathered to is freed after its use, and gathered again for the next
    one just before it, as FSDP does.
    `max_bytes` bounds what any rank holds at once, arguments and results counted: values that wait
    for long, most for the backward, are then computed or gathered again, or kept as shards, at the
    least seconds for their bytes.
    `as_if` has layouts chosen for other sizes: it maps the shape of each argument to the one that
    it stands for, or is a program of the same function at those sizes (`like` is the same). By
    default a test on small tensors may take another program than the real run, since small tensors
    are cheap to gather. The values of other arguments, and so `f`, are to allow both sizes.
    With a function `max_bytes` bounds what the real program holds.
    Layouts that took more than 0.1 s to choose are kept in `~/.cache/fdtensor`, for later traces of
    the same calls, sizes and options. With the variable `FDTENSOR_CACHE=off` they are not; it may
    also name another folder.
    With `choice="follow"` the layouts that were given decide, at any size: what is cut stays cut,
    what is whole stays whole. Where parameters and data are cut over one axis in ways that do not
    meet, the parameters are gathered (as in FSDP) and data are not. Parameters are the arguments
    that require grad or, where none does, the floating-point leaves of pytrees; a pytree beside
    others whose tensors have one first dim, cut alike, is a batch.
    Arguments of `TensorType(shape, dtype, layout="free")` get layouts that take the least time with
    all else, never pending, and results that are like them the same: `Program.layouts_of`. With
    `max_bytes` they are cut as far as needed. Where all are free, `mesh` says on which mesh.
    Raises `TraceError` for what is no pure function or does not fit in `max_bytes`, `RuleError` as
    `on_missing_rule` says.

    >>> mesh = Mesh(x=2)
    >>> a = TensorType((4, 6), torch.float32, mesh.layout(None, "x"))
    >>> b = TensorType((6, 4), torch.float32, mesh.layout("x"))
    >>> print(trace(torch.matmul, a, b))
    matmul on Mesh(x=2)
      in   a:f32[4,6@x]  b:f32[6@x,4]
      c:f32[4,4]{sum:x} = mm a b
      d:f32[4@x,4]      = reduce_scatter[axis=x dim=0 reduce_op=sum] c  32 B
      out  d
    1 collective, 32 B received per rank

    Layouts of arguments may be chosen too:

    >>> b = TensorType((4, 6), torch.float32, layout="free")
    >>> trace(torch.add, a, b).layouts_of(1)
    Layout(Mesh(x=2), (Shard(1),))
    """
    __tracebackhide__ = True
    _check(f, mesh)
    if "key" in kwargs and is_key(f, kwargs["key"]):
        leaves, _ = flatten((args, kwargs), is_leaf=is_typed)
        mesh = one_mesh([t for t in map(type_of, leaves) if t is not None], mesh)
        f, kwargs = with_random_key(f), {**kwargs, "key": key_type(mesh)}
    leaves, spec = flatten_admitting((args, kwargs), is_leaf=is_typed)
    options = Options(
        out_layouts=out_layouts,
        regather=regather,
        on_missing_rule=on_missing_rule,
        check_indices=check_indices,
        reduce_dtype=reduce_dtype,
        deterministic=deterministic,
        max_bytes=max_bytes,
        as_if=one_of_both(as_if, like),
        choice=choice,
    )
    with working(f"tracing {name_of(f)}"):
        return given_all(
            functools.partial(_traced_with, f, leaves, spec, options, model_of(cost), mesh)
        )


def _traced_with(
    f: Callable[..., Any],
    leaves: Sequence[Any],
    spec: optree.PyTreeSpec,
    options: Options,
    cost: CostModel,
    mesh: Mesh | None,
    closed: tuple[Any, ...],
) -> Program:
    """The program of a function that closes over these DTensors, its last arguments."""
    if closed:
        f = closing(f, lambda: closed)
        leaves, spec = given_besides(leaves, spec, closed, is_typed)
    types = [type_of(leaf) for leaf in leaves]
    return traced(f, spec, leaves, types, options, cost=cost, mesh=mesh).program


def _check(f: object, mesh: object) -> None:
    refuse_no_function(f)
    if mesh is not None and not isinstance(mesh, Mesh):
        raise no_mesh(mesh)


def is_typed(leaf: object) -> bool:
    """Whether a leaf stands for a distributed tensor."""
    return type_of(leaf) is not None


def type_of(leaf: object) -> TensorType | FreeType | None:
    """The type of a `DTensor` or the like, or a type itself; None for other leaves."""
    if isinstance(leaf, (TensorType, FreeType)):
        return leaf
    type = getattr(leaf, "type", None)
    return type if isinstance(type, TensorType) else None


def traced(
    f: Callable[..., Any],
    spec: optree.PyTreeSpec,
    leaves: Sequence[Any],
    types: Sequence[TensorType | FreeType | None],
    options: Options,
    *,
    cost: CostModel,
    device: str | torch.device = "cpu",
    requires_grad: Sequence[bool] = (),
    packed: bool = True,
    mesh: Mesh | None = None,
    dynamic: Dynamic | None = None,
) -> Traced:
    """The program of `f(*args, **kwargs)`, where the arguments have these leaves and types.

    Where it is `dynamic`, the function is recorded for other sizes too, and not at each of them.
    """
    __tracebackhide__ = True
    mesh = one_mesh(known := [t for t in types if t is not None], mesh)
    how = device, requires_grad, options.check_indices
    record, recording = functools.partial(recorded, f, spec, leaves, types, *how), None
    if dynamic is None:
        it = record()
    else:
        it, recording = dynamic.recorded(name_of(f), known, record)
    first = None if recording is None else recording.program
    repeats, budget = options.as_if, options.max_bytes
    if repeats is not None and not isinstance(repeats, Program):  # a function of shapes
        how = {"cost": cost, "device": device, "requires_grad": requires_grad, "mesh": mesh}
        again, budget = functools.partial(traced, **how), None
        if first is None:
            repeats = _at_scale(again, f, spec, leaves, types, options, packed)
        else:
            repeats = first.origin.repeats
    make = functools.partial(program_of, it, f, spec, types, options, requires_grad)
    make = functools.partial(make, mesh=mesh, cost=cost, packed=packed)
    make = make if first is None else functools.partial(program_like, first, make)
    with neutral(), planning():  # rules ask torch too: what taps an op reads, which dtype it gives
        program = make(repeats, budget)
    if recording is not None and first is None:
        recording.program = program
    bare = it.out_tree.is_leaf() and it.statics == (TENSOR,)
    return Traced(program, it.out_tree, it.statics, bare, it.new, it.tracked, recording)


def _at_scale(
    again: Callable[..., Traced],
    f: Callable[..., Any],
    spec: optree.PyTreeSpec,
    leaves: Sequence[Any],
    types: Sequence[TensorType | FreeType | None],
    options: Options,
    packed: bool,
) -> Program:
    """The program at the sizes that the function `options.as_if` gives."""
    assert options.as_if is not None
    assert not isinstance(options.as_if, Program)
    real = at_scale(types, spec, options.as_if)
    options = attrs.evolve(options, as_if=None, out_layouts=evenly(options.out_layouts))
    blanks = [None if t is leaf else leaf for t, leaf in zip(types, leaves, strict=True)]
    return again(f, spec, blanks, real, options, packed=packed).program
