"""`spmd`: a plain torch function as one of DTensors."""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Protocol, TypedDict, TypeVar, overload

import attrs
import torch

from fdtensor.layouts.errors import (
    CommError,
    DataDependentError,
    FallbackWarning,
    FdtensorError,
    TraceError,
    ValueTreeError,
)
from fdtensor.layouts.opaque import opaque
from fdtensor.layouts.progress import working
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.layouts.torch_private import transforms_active
from fdtensor.layouts.tree import argument, flatten, key_orders, paths, unflatten
from fdtensor.ops.ambient import ambient
from fdtensor.ops.graph import Full
from fdtensor.ops.random_bits.keys import AnyKey
from fdtensor.ops.random_key import is_key, key_type, with_random_key
from fdtensor.programs.options import Check, OnDataDependent, OnMissingRule, Options, Plain
from fdtensor.programs.out_layouts import as_arguments, asked_layouts, resolved
from fdtensor.programs.program import Program
from fdtensor.programs.recording import name_of
from fdtensor.programs.tracer import Traced, is_typed, one_mesh, trace, traced
from fdtensor.runtime.comm import speaker
from fdtensor.runtime.interpreter import admit, digest_of
from fdtensor.runtime.replication import mark, watching
from fdtensor.runtime.runner import runner_of
from fdtensor.tensors.dtensor import DTensor
from fdtensor.tensors.python_state import argument_key, reader_of
from fdtensor.tensors.replicated_fallback import ANSWERS, on_replicas, placed, replica
from fdtensor.tensors.vjp import adjoint

__all__ = ["Entry", "Spmd", "spmd"]

if TYPE_CHECKING:
    from typing_extensions import Unpack

P = ParamSpec("P")
R = TypeVar("R", covariant=True)
K = TypeVar("K")

CACHED = 4096
"""How many programs a function keeps."""


@attrs.frozen(eq=False)
class Entry:
    """What is known of a call with certain types."""

    traced: Traced | None
    """None where the function cannot be traced and runs on replicated operands."""
    comm: Any
    go: Callable[[Sequence[Any]], Sequence[Any]] = list
    """The values of the outputs for those of the inputs."""
    types: tuple[TensorType, ...] = ()
    """Those of the outputs."""
    first: Program | None = None
    """What ranks agree on: the program, or its forward where derivatives are wanted."""

    def result(self, outs: Sequence[Any], comm: Any) -> Any:
        """What the function returns, with these values."""
        assert self.traced is not None
        if watching():
            for out, type in zip(outs, self.types, strict=True):
                mark(comm.leaves(out), type)
        tensors = [DTensor(out, type, comm) for out, type in zip(outs, self.types, strict=True)]
        for i in self.traced.leaves:
            tensors[i] = tensors[i].detach().requires_grad_()
        return tensors[0] if self.traced.bare else self.traced.result(tensors)


class Spmd(Generic[P, R]):
    """A function of DTensors made of a plain torch function; one program for each set of types."""

    def __init__(self, f: Callable[P, Any], options: Options | None = None) -> None:
        self.f = f
        self.options = options or Options()
        self.reads = reader_of(f)
        """What it reads besides its arguments, as a part of the key of a program."""
        self.programs: OrderedDict[Any, Entry] = OrderedDict()
        self.derived: dict[Any, Spmd[..., Any]] = {}
        self.keyed: Spmd[..., Any] | None = None
        """The same of the function with a key."""
        self.last: Entry | None = None
        """What the last call ran."""
        self.reasons: set[str] = set()
        """Why it runs on replicated operands, as far as it was said."""
        functools.update_wrapper(self, f, updated=())

    def __reduce__(self) -> Any:
        name = getattr(self, "__qualname__", "spmd")
        with contextlib.suppress(AttributeError):
            if attrgetter(name)(sys.modules.get(self.__module__)) is self:
                return name  # as a decorator it has taken the place of its function
        return Spmd, (self.f, self.options)

    def __repr__(self) -> str:
        return f"spmd({getattr(self.f, '__name__', self.f)!r})"

    @opaque
    def trace(self, *args: Any, **kwargs: Any) -> Program:
        """The program that a call with these arguments runs: a call does not trace it again.

        Of DTensors it is collective, as a call is. Types are enough, for a look without processes.
        """
        drawing = self._drawing(args, kwargs)
        if drawing is not None:
            return drawing.trace(*args, **kwargs)
        leaves, spec = flatten((args, kwargs), is_leaf=is_typed)
        if any(isinstance(leaf, DTensor) for leaf in leaves):
            entry = self._entry(leaves, spec, key_orders((args, kwargs)))
            if entry.traced is None:
                raise DataDependentError(
                    f"{self!r} has no program: what it gives depends on the values of tensors.",
                    hint="A call runs it on replicated operands.",
                )
            return entry.traced.program
        options = self.options
        return trace(
            self.f,
            *args,
            out_layouts=options.out_layouts,
            regather=options.regather,
            on_missing_rule=options.on_missing_rule,
            check_indices=options.check_indices,
            reduce_dtype=options.reduce_dtype,
            **kwargs,
        )

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...

    @overload
    def __call__(self, *args: Any, key: AnyKey | DTensor[Any], **kwargs: Any) -> R: ...

    @opaque
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        if "key" in kwargs:
            drawing = self._drawing(args, kwargs)
            if drawing is not None:
                return drawing(*args, **kwargs)
        leaves, spec = flatten((args, kwargs), is_leaf=_is_dtensor)
        try:
            if any(isinstance(leaf, torch.Tensor) for leaf in leaves):
                leaves = self._distributed(leaves, spec)
            entry = self.last = self._entry(leaves, spec, key_orders((args, kwargs)))
        except FdtensorError as error:
            self._tell(leaves, error)
            raise
        if entry.traced is None:
            return self._on_replicas(leaves, spec, entry.comm)
        return entry.result(
            entry.go([x.local for x in leaves if x.__class__ is DTensor]), entry.comm
        )

    def _drawing(self, args: Any, kwargs: dict[str, Any]) -> Spmd[..., Any] | None:
        """What to call where random ops are to draw from `kwargs["key"]`, which becomes a DTensor.

        None where there is no key, or it is just an argument of the function.
        """
        if "key" not in kwargs:
            return None
        leaves, _ = flatten((args, kwargs), is_leaf=_is_dtensor)
        try:
            if not is_key(self.f, kwargs["key"]):
                return None
        except FdtensorError as error:
            self._tell(leaves, error)
            raise
        if self.keyed is None:
            self.keyed = Spmd(with_random_key(self.f), self.options)
        known = [leaf for leaf in leaves if isinstance(leaf, DTensor)]
        key = kwargs["key"]
        if known and not isinstance(key, (DTensor, TensorType)):
            kwargs["key"] = self.keyed.distributed_key(key, known)
        return self.keyed

    def distributed_key(self, key: Any, known: Sequence[DTensor[Any]]) -> DTensor[Any]:
        """The key on every rank; they agree on it at the first call."""
        comm = known[0].comm
        type = key_type(one_mesh([leaf.type for leaf in known]))
        check = self.options.check or comm.check
        if check == "always" or (check != "never" and not self.programs):
            words = key.tolist() if isinstance(key, torch.Tensor) else [key.high, key.low]
            comm.agree("this key", digest_of(repr(words)), [type.mesh], None)
        device = comm.device
        whole = key.to(device, torch.int64) if isinstance(key, torch.Tensor) else key.tensor(device)
        return DTensor(comm.value([whole] * comm.width(type)), type, comm)

    def _tell(self, leaves: Sequence[Any], error: FdtensorError) -> None:
        """Lets the other ranks fail too, where they wait to agree on a first program."""
        known = next((leaf for leaf in leaves if isinstance(leaf, DTensor)), None)
        if known is None or self.programs or isinstance(error, CommError):
            return
        comm: Any = known.comm
        if (self.options.check or comm.check) == "never":
            return
        with contextlib.suppress(CommError):
            mistake = f"{speaker(comm)}{error.sentence.removesuffix('.')}"
            comm.agree("this program", digest_of(error.sentence), [known.mesh], mistake)

    def _entry(self, leaves: Sequence[Any], spec: Any, orders: Any) -> Entry:
        """What is known of a call with these arguments, worked out at the first of its kind."""
        __tracebackhide__ = True
        comm = None
        key: list[Any] = [spec, orders, _twice(leaves), self.reads and self.reads()]
        grads = False
        for leaf in leaves:
            if leaf.__class__ is DTensor:
                comm = comm or leaf.comm
                if leaf.comm is not comm:
                    raise self._other_comm(leaf, comm, leaves, spec)
                key.append(leaf.type)
                grads = grads or _requires_grad(leaf.local)
            else:
                key.append(argument_key(leaf))
        if comm is None:
            raise TraceError(
                f"no argument of {self!r} is a DTensor.",
                hint="Make one with distribute(tensor, layout, comm), or call the function itself.",
            )
        grads = grads and torch.is_grad_enabled()
        if grads:
            key += [_requires_grad(leaf.local) for leaf in leaves if leaf.__class__ is DTensor]
        whole = (comm, grads, ambient(), *key)
        entry = self.programs.get(whole)
        if entry is None:
            return self._kept(whole, self._made(leaves, spec, comm, grads))
        if entry.first is not None and (self.options.check or comm.check) == "always":
            self._admit(entry.first, leaves, comm)
        return entry

    def _kept(self, key: Any, entry: Entry) -> Entry:
        """The entry, for the next call of its kind."""
        self.programs[key] = entry
        if len(self.programs) > CACHED:
            self.programs.popitem(last=False)
        return entry

    def _admit(self, program: Program, leaves: Sequence[Any], comm: Any) -> None:
        """Agrees with the other ranks on what runs; they fail together where one differs."""
        values = [leaf.local for leaf in leaves if isinstance(leaf, DTensor)]
        admit(program, comm, program.in_types, values, self.options.check)

    def _made(self, leaves: Sequence[Any], spec: Any, comm: Any, grads: bool) -> Entry:
        """The program for these types, agreed on by all ranks."""
        __tracebackhide__ = True
        self._check(leaves)
        types = [leaf.type if isinstance(leaf, DTensor) else None for leaf in leaves]
        tensors = tuple(i for i, t in enumerate(types) if t is not None)
        tracked = [_requires_grad(leaves[i].local) for i in tensors] if grads else []
        make = functools.partial(traced, cost=comm.cost, device=comm.device or "cpu")
        try:
            with working(f"tracing {name_of(self.f)}"):
                program = make(self.f, spec, leaves, types, self.options)
            both = None
            if grads:
                self._no_tracked(program)
                args = spec, leaves, types, program, tracked, self.options, make, self._again
                with working(f"tracing the backward of {name_of(self.f)}"):
                    both = adjoint(self.f, *args)
        except DataDependentError as error:
            if self.options.on_data_dependent == "error":
                raise
            self._warn(error)
            return Entry(None, comm)
        first = program.program if both is None else both.forward  # so ranks agree on gradients too
        self._admit(first, leaves, comm)
        go = runner_of(first, comm) if both is None else both.runner(comm)
        return Entry(program, comm, go, program.program.out_types, first)

    def _check(self, leaves: Sequence[Any]) -> None:
        """Refuses what no program can be made for."""
        if transforms_active():
            raise TraceError(
                f"a transform of torch.func surrounds {self!r}.",
                hint="Put it inside: spmd(torch.func.grad(f)), or use .backward() outside.",
            )
        if any(isinstance(leaf, torch.Generator) for leaf in leaves):
            raise TraceError(
                f"{self!r} was given a generator, from which each rank would draw its own numbers.",
                hint="Draw the numbers once, distribute them, and pass them in.",
            )

    def _warn(self, error: DataDependentError) -> None:
        """Says that the function runs on replicated operands, once for each reason."""
        reason = f"{error.sentence} {error.facts.get('line', '')}".rstrip()
        if self.options.quiet or reason in self.reasons:
            return
        self.reasons.add(reason)
        text = f"{name_of(self.f)} runs on replicated operands, whole on every rank: {reason}"
        warnings.warn(text, FallbackWarning, stacklevel=5)

    def _again(
        self, g: Any, types: Any, values: Any, ct_types: Any, cts: Any, layouts: Any, comm: Any
    ) -> list[Any]:
        """The cotangents of inputs as values with derivatives of their own."""
        known = self.derived.get(g)
        if known is None:
            options = attrs.evolve(self.options, out_layouts=layouts)
            known = self.derived[g] = Spmd(g, options)
        tensors = [DTensor(v, t, comm) for v, t in zip(values, types, strict=True)]
        cotangents = [DTensor(v, t, comm) for v, t in zip(cts, ct_types, strict=True)]
        return [grad.local for grad in known(tensors, cotangents)[1]]

    def _no_tracked(self, trace: Traced) -> None:
        """Refuses a derivative that would miss tensors that the function closes over."""
        for _, tensor in trace.program.constants:
            if tensor.requires_grad:
                raise TraceError(
                    f"{self!r} closes over a tensor that requires grad, of shape "
                    f"{tuple(tensor.shape)}, and would give it none.",
                    hint="Pass it as an argument (torch.func.functional_call for a module), or "
                    "detach it.",
                )

    def _on_replicas(self, leaves: Sequence[Any], spec: Any, comm: Any) -> Any:
        """The function on the full tensors, which every rank gathers."""
        answer = ANSWERS.get(self.f)
        if answer is not None:  # one number decides: no need to gather the operands
            args, kwargs = unflatten(spec, leaves)
            equal = Spmd(answer, attrs.evolve(self.options, out_layouts=None))(*args, **kwargs)
            if not isinstance(equal, DTensor):
                return equal
            return on_replicas(
                torch.Tensor.item, *flatten(((equal,), {}), is_leaf=_is_dtensor), comm
            )
        result = on_replicas(self.f, leaves, spec, comm)
        outs, tree = flatten(result, is_leaf=_is_dtensor)
        types = [leaf.type if isinstance(leaf, DTensor) else None for leaf in leaves]
        if self.options.out_layouts is not None:
            wanted = resolved(self.options.out_layouts, self.f, spec, types)
            return placed(result, asked_layouts(tree, wanted))
        if self.options.quiet:
            return result
        fulls = [Full(o.shape, o.dtype) if isinstance(o, DTensor) else None for o in outs]
        return placed(result, as_arguments(fulls, tree, types, spec))

    def _distributed(self, leaves: Sequence[Any], spec: Any) -> list[Any]:
        """The arguments with plain tensors as replicated ones, where they may be."""
        known = [leaf for leaf in leaves if isinstance(leaf, DTensor)]
        if not known:
            return list(leaves)
        mesh, comm = one_mesh([leaf.type for leaf in known]), known[0].comm
        taken = []
        for name, leaf in zip(paths(spec, "args"), leaves, strict=True):
            if isinstance(leaf, torch.Tensor):
                if leaf.numel() != 1 and self.options.plain != "replicate":
                    raise ValueTreeError(
                        f"{argument(name)} is a plain tensor of shape {tuple(leaf.shape)} beside "
                        f"DTensors.",
                        function=repr(self),
                        mesh=mesh,
                        hint="Distribute it first: distribute(tensor, layout, comm), or pass "
                        'plain="replicate" if every rank holds the same one.',
                    )
                type = replica(leaf, mesh)
                leaf = DTensor(comm.value([leaf] * comm.width(type)), type, comm)
            taken.append(leaf)
        return taken

    def _other_comm(self, leaf: Any, comm: Any, leaves: Sequence[Any], spec: Any) -> CommError:
        place = next(i for i, other in enumerate(leaves) if other is leaf)
        return CommError(
            f"{argument(paths(spec, 'args')[place])} of {self!r} is on another Comm than the "
            "arguments before it.",
            first=comm,
            second=leaf.comm,
            hint="Make all DTensors with one Comm: connect(mesh) once, then pass it on.",
        )


class _Decorator(Protocol):
    """`spmd` with its options, before the function is there.

    Checkers know arguments by those of `f`, and results that are tensors, or tuples or dicts of
    them. No type of Python says of other structures that their tensors have become DTensors.
    """

    @overload
    def __call__(self, f: Callable[P, torch.Tensor], /) -> Spmd[P, DTensor[Any]]: ...

    @overload
    def __call__(
        self, f: Callable[P, tuple[torch.Tensor, ...]], /
    ) -> Spmd[P, tuple[DTensor[Any], ...]]: ...

    @overload
    def __call__(
        self, f: Callable[P, dict[K, torch.Tensor]], /
    ) -> Spmd[P, dict[K, DTensor[Any]]]: ...

    @overload
    def __call__(self, f: Callable[P, Any], /) -> Spmd[P, Any]: ...


class _Options(TypedDict, total=False):
    out_layouts: Any
    regather: bool
    on_missing_rule: OnMissingRule
    on_data_dependent: OnDataDependent
    plain: Plain
    check: Check | None
    check_indices: bool
    reduce_dtype: torch.dtype | None


@overload
def spmd(f: Callable[P, torch.Tensor], **options: Unpack[_Options]) -> Spmd[P, DTensor[Any]]: ...


@overload
def spmd(
    f: Callable[P, tuple[torch.Tensor, ...]], **options: Unpack[_Options]
) -> Spmd[P, tuple[DTensor[Any], ...]]: ...


@overload
def spmd(
    f: Callable[P, dict[K, torch.Tensor]], **options: Unpack[_Options]
) -> Spmd[P, dict[K, DTensor[Any]]]: ...


@overload
def spmd(f: Callable[P, Any], **options: Unpack[_Options]) -> Spmd[P, Any]: ...


@overload
def spmd(f: None = None, **options: Unpack[_Options]) -> _Decorator: ...


def spmd(
    f: Callable[..., Any] | None = None,
    *,
    out_layouts: Any = None,
    regather: bool = False,
    on_missing_rule: OnMissingRule = "replicate",
    on_data_dependent: OnDataDependent = "error",
    plain: Plain = "error",
    check: Check | None = None,
    check_indices: bool = True,
    reduce_dtype: torch.dtype | None = torch.float32,
) -> Any:
    """`f`, a plain torch function of full tensors, as one of pytrees of DTensors. Differentiable.

    The program is made at the first call with certain types, and agreed on by all ranks; see
    `trace` for what `f` may do and for the options. Python arguments are frozen into it, and what
    `f` reads from its closure and by name from the globals of its module: another value makes
    another program. Tensors that `f` closes over are replicated and read afresh. Results are new
    values, never pending unless `out_layouts` says so. A program also belongs to the settings of
    torch under which it was traced: default dtype and device, grad mode, autocast.

    What depends on the values of tensors, in the forward or the backward, is refused with the line
    that asks for one: `.item()`, `if tensor:`, `nonzero`. With `on_data_dependent="replicate"` all
    of `f` runs on replicated operands then, with a warning; results that are shaped like an
    argument get its layouts.

    Where torch raises for the values of an operand, such as an index that is out of range or a
    matrix without an inverse, all ranks raise at the end of the program; its counts of faults
    travel with other sums. `check_indices=False` leaves that out, and results are then undefined.

    Sums of float16 and bfloat16 wait, and are reduced, in `reduce_dtype`, as kernels of torch add
    them up; with None in their own dtype, which moves half of the bytes and rounds each term.
    """
    options = Options(
        out_layouts=out_layouts,
        regather=regather,
        on_missing_rule=on_missing_rule,
        on_data_dependent=on_data_dependent,
        plain=plain,
        check=check,
        check_indices=check_indices,
        reduce_dtype=reduce_dtype,
    )
    if f is None:
        return functools.partial(Spmd, options=options)
    return Spmd(f, options)


def _is_dtensor(leaf: Any) -> bool:
    return leaf.__class__ is DTensor


def _requires_grad(local: Any) -> bool:
    if local.__class__ is tuple:
        return any(leaf.requires_grad for leaf in local)
    return local.requires_grad


def _twice(leaves: Sequence[Any]) -> tuple[int, ...]:
    """Where each DTensor is given first, if one is given more than once: a write to it shows."""
    if len(set(map(id, leaves))) == len(leaves):
        return ()
    places = [id(leaf) for leaf in leaves if leaf.__class__ is DTensor]
    return () if len(set(places)) == len(places) else tuple(map(places.index, places))
