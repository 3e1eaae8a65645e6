"""`spmd` and `call`: plain torch functions on DTensors, now."""

from __future__ import annotations

import contextlib
import functools
import pickle
import struct
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Generic, Literal, TypeVar

import attrs
import torch

from fdtensor.adjoint import adjoint
from fdtensor.assembly import OnMissingRule
from fdtensor.comm import Check
from fdtensor.dtensor import DTensor
from fdtensor.errors import (
    CommError,
    DataDependentError,
    FdtensorError,
    TraceError,
    ValueTreeError,
)
from fdtensor.interpreter import admit, digest_of
from fdtensor.kernel import empty
from fdtensor.keyed import is_key, key_type, keyed
from fdtensor.layout import TensorType
from fdtensor.mesh import Mesh
from fdtensor.program import Program
from fdtensor.progress import working
from fdtensor.randomness import Drawing
from fdtensor.runner import runner_of
from fdtensor.tracer import Traced, asked_layouts, is_typed, name_of, one_mesh, trace, traced
from fdtensor.tree import argument, flatten, paths, unflatten
from fdtensor.watch import mark, watching

__all__ = ["Spmd", "call", "spmd"]

F = TypeVar("F", bound=Callable[..., Any])

Plain = Literal["error", "replicate"]

CACHED = 4096
"""How many programs a function keeps."""


@attrs.frozen(eq=False)
class _Entry:
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
            for out, type in zip(outs, self.types):
                mark(comm.leaves(out), type)
        made = [DTensor(out, type, comm) for out, type in zip(outs, self.types)]
        return made[0] if self.traced.bare else self.traced.result(made)


class Spmd(Generic[F]):
    """A function of DTensors made of a plain torch function; one program for each set of types."""

    def __init__(
        self,
        f: F,
        *,
        out_layouts: Any = None,
        regather: bool = False,
        on_missing_rule: OnMissingRule = "replicate",
        plain: Plain = "error",
        check: Check | None = None,
    ) -> None:
        self.f = f
        self.out_layouts = out_layouts
        self.regather = regather
        self.on_missing_rule: OnMissingRule = on_missing_rule
        self.plain: Plain = plain
        self.check: Check | None = check
        self.programs: OrderedDict[Any, _Entry] = OrderedDict()
        self.derived: dict[Any, Spmd[Any]] = {}
        self.keyed: Spmd[Any] | None = None
        """The same of the function with a key."""
        self.last: _Entry | None = None
        """What the last call ran."""
        functools.update_wrapper(self, f, updated=())

    def __repr__(self) -> str:
        return f"spmd({getattr(self.f, '__name__', self.f)!r})"

    def trace(self, *args: Any, **kwargs: Any) -> Program:
        """The program that a call with these arguments runs: a call does not trace it again.

        Of DTensors it is collective, as a call is. Types are enough, for a look without processes.
        """
        drawing = self._drawing(args, kwargs)
        if drawing is not None:
            return drawing.trace(*args, **kwargs)
        leaves, spec = flatten((args, kwargs), is_leaf=is_typed)
        if any(isinstance(leaf, DTensor) for leaf in leaves):
            found = self._found(leaves, spec)
            if found.traced is None:
                raise DataDependentError(
                    f"{self!r} has no program: what it gives depends on the values of tensors.",
                    hint="A call runs it on replicated operands.",
                )
            return found.traced.program
        return trace(
            self.f,
            *args,
            out_layouts=self.out_layouts,
            regather=self.regather,
            on_missing_rule=self.on_missing_rule,
            **kwargs,
        )

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
            found = self.last = self._found(leaves, spec)
        except FdtensorError as error:
            self._tell(leaves, error)
            raise
        if found.traced is None:
            return self._replicated(leaves, spec, found.comm)
        return found.result(
            found.go([x.local for x in leaves if x.__class__ is DTensor]), found.comm
        )

    def _drawing(self, args: Any, kwargs: dict[str, Any]) -> Spmd[Any] | None:
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
            self.keyed = Spmd(
                keyed(self.f),
                out_layouts=self.out_layouts,
                regather=self.regather,
                on_missing_rule=self.on_missing_rule,
                plain=self.plain,
                check=self.check,
            )
        known = [leaf for leaf in leaves if isinstance(leaf, DTensor)]
        key = kwargs["key"]
        if known and not isinstance(key, (DTensor, TensorType)):
            kwargs["key"] = self.keyed._distributed_key(key, known)
        return self.keyed

    def _distributed_key(self, key: Any, known: Sequence[DTensor[Any]]) -> DTensor[Any]:
        """The key on every rank; they agree on it at the first call."""
        comm = known[0].comm
        type = key_type(one_mesh([leaf.type for leaf in known]))
        check = self.check or comm.check
        if check == "always" or (check != "never" and not self.programs):
            words = key.tolist() if isinstance(key, torch.Tensor) else [key.high, key.low]
            comm.agree("this key", digest_of(repr(words)), [type.mesh], None)
        device = getattr(comm, "device", None)
        whole = key.to(device, torch.int64) if isinstance(key, torch.Tensor) else key.tensor(device)
        return DTensor(comm.value([whole] * comm.width(type)), type, comm)

    def _tell(self, leaves: Sequence[Any], error: FdtensorError) -> None:
        """Lets the other ranks fail too, where they wait to agree on a first program."""
        known = next((leaf for leaf in leaves if isinstance(leaf, DTensor)), None)
        if known is None or self.programs or isinstance(error, CommError):
            return
        comm: Any = known.comm
        if (self.check or comm.check) == "never":
            return
        with contextlib.suppress(CommError):
            who = f"rank {comm.rank}: " if hasattr(comm, "rank") else ""
            mistake = f"{who}{error.sentence.removesuffix('.')}"
            comm.agree("this program", digest_of(error.sentence), [known.mesh], mistake)

    def _found(self, leaves: Sequence[Any], spec: Any) -> _Entry:
        """What is known of a call with these arguments, worked out at the first of its kind."""
        __tracebackhide__ = True
        comm = None
        key: list[Any] = [spec]
        grads = False
        for leaf in leaves:
            if leaf.__class__ is DTensor:
                comm = comm or leaf.comm
                if leaf.comm is not comm:
                    raise self._other_comm(leaf, comm, leaves, spec)
                key.append(leaf.type)
                grads = grads or _requires_grad(leaf.local)
            else:
                key.append(_static(leaf))
        if comm is None:
            raise TraceError(
                f"no argument of {self!r} is a DTensor.",
                hint="Make one with distribute(tensor, layout, comm), or call the function itself.",
            )
        grads = grads and _grad_mode()
        if grads:
            key += [_requires_grad(leaf.local) for leaf in leaves if leaf.__class__ is DTensor]
        whole = (comm, grads, _default_dtype(), torch.is_autocast_enabled("cpu"), *key)
        found = self.programs.get(whole)
        if found is None:
            return self._made(whole, leaves, spec, comm, grads)
        if found.first is not None and (self.check or comm.check) == "always":
            self._admit(found.first, leaves, comm)
        return found

    def _admit(self, program: Program, leaves: Sequence[Any], comm: Any) -> None:
        """Agrees with the other ranks on what runs; they fail together where one differs."""
        values = [leaf.local for leaf in leaves if isinstance(leaf, DTensor)]
        admit(program, comm, program.in_types, values, self.check)

    def _made(self, key: Any, leaves: Sequence[Any], spec: Any, comm: Any, grads: bool) -> _Entry:
        """The program for these types, agreed on by all ranks."""
        __tracebackhide__ = True
        if _transformed():
            raise TraceError(
                f"a transform of torch.func surrounds {self!r}.",
                hint="Put it inside: spmd(torch.func.grad(f)), or use .backward() outside.",
            )
        if any(isinstance(leaf, torch.Generator) for leaf in leaves):
            raise TraceError(
                f"{self!r} was given a generator, from which each rank would draw its own numbers.",
                hint="Draw the numbers once, distribute them, and pass them in.",
            )
        types = [leaf.type if isinstance(leaf, DTensor) else None for leaf in leaves]
        tensors = tuple(i for i, t in enumerate(types) if t is not None)
        tracked = [_requires_grad(leaves[i].local) for i in tensors] if grads else []
        make = functools.partial(
            traced,
            cost=comm.cost,
            regather=self.regather,
            on_missing_rule=self.on_missing_rule,
            device=getattr(comm, "device", "cpu"),
        )
        try:
            with working(f"tracing {name_of(self.f)}"):
                made = make(self.f, spec, leaves, types, out_layouts=self.out_layouts)
        except DataDependentError:
            if self.on_missing_rule == "error":
                raise
            entry = _Entry(None, comm)
        else:
            program = made.program
            both = None
            if grads:
                self._no_tracked(made)
                args = spec, leaves, types, made, tracked, make, self._again
                with working(f"tracing the backward of {name_of(self.f)}"):
                    both = adjoint(self.f, *args)
            first = program if both is None else both.forward  # so ranks agree on gradients too
            self._admit(first, leaves, comm)
            go = runner_of(program, comm) if both is None else both.runner(comm)
            entry = _Entry(made, comm, go, program.out_types, first)
        self.programs[key] = entry
        if len(self.programs) > CACHED:
            self.programs.popitem(last=False)
        return entry

    def _again(
        self, g: Any, types: Any, values: Any, ct_types: Any, cts: Any, layouts: Any, comm: Any
    ) -> list[Any]:
        """The cotangents of inputs as values with derivatives of their own."""
        known = self.derived.get(g)
        if known is None:
            known = self.derived[g] = Spmd(
                g,
                out_layouts=layouts,
                regather=self.regather,
                on_missing_rule=self.on_missing_rule,
            )
        tensors = [DTensor(v, t, comm) for v, t in zip(values, types)]
        cotangents = [DTensor(v, t, comm) for v, t in zip(cts, ct_types)]
        return [grad.local for grad in known(tensors, cotangents)[1]]

    def _no_tracked(self, made: Traced) -> None:
        """Refuses a derivative that would miss tensors that the function closes over."""
        for _, tensor in made.program.constants:
            if tensor.requires_grad:
                raise TraceError(
                    f"{self!r} closes over a tensor that requires grad, of shape "
                    f"{tuple(tensor.shape)}, and would give it none.",
                    hint="Pass it as an argument (torch.func.functional_call for a module), or "
                    "detach it.",
                )

    def _replicated(self, leaves: Sequence[Any], spec: Any, comm: Any) -> Any:
        """The function on the full tensors, which every rank gathers."""
        answer = _ANSWERS.get(self.f)
        if answer is not None:  # one number decides: no need to gather the operands
            args, kwargs = unflatten(spec, leaves)
            found = call(answer, *args, **kwargs)
            return call(torch.Tensor.item, found) if isinstance(found, DTensor) else found
        mesh = one_mesh([leaf.type for leaf in leaves if isinstance(leaf, DTensor)])
        tensors = [isinstance(leaf, DTensor) for leaf in leaves]
        wholes = [
            leaf.redistribute(leaf.type.mesh.layout()).local if isinstance(leaf, DTensor) else leaf
            for leaf in leaves
        ]
        first = next(w for w, t in zip(wholes, tensors) if t)
        results: list[Any] = []
        rank = getattr(comm, "rank", None)
        if rank is None or mesh.position(rank) is not None:
            for i in range(len(comm.leaves(first))):
                given = [comm.leaves(w)[i] if t else w for w, t in zip(wholes, tensors)]
                args, kwargs = unflatten(spec, given)
                with Drawing():
                    results.append(flatten(self.f(*args, **kwargs)))
        told = None
        if results:
            outs, tree = results[0]
            told = tree, [_replica(o, mesh) if isinstance(o, torch.Tensor) else o for o in outs]
        if rank is not None and set(comm.mesh.order) != set(mesh.order):
            told = shared_with_all(told, comm, mesh.order[0])
        assert told is not None
        tree, made = told
        for i, out in enumerate(made):
            if isinstance(out, TensorType):
                blocks = [outs[i] for outs, _ in results]
                value = comm.value(blocks) if blocks else empty(out, comm.rank, comm.device)
                made[i] = DTensor(value, out, comm)
        return self._placed(unflatten(tree, made))

    def _placed(self, result: Any) -> Any:
        """What a function on replicated operands returns, in the layouts that were asked for."""
        if self.out_layouts is None:
            return result
        leaves, tree = flatten(result, is_leaf=_is_dtensor)
        asked = asked_layouts(tree, self.out_layouts)
        return unflatten(
            tree, [x if a is None else x.redistribute(a) for x, a in zip(leaves, asked)]
        )

    def _distributed(self, leaves: Sequence[Any], spec: Any) -> list[Any]:
        """The arguments with plain tensors as replicated ones, where they may be."""
        known = [leaf for leaf in leaves if isinstance(leaf, DTensor)]
        if not known:
            return list(leaves)
        mesh, comm = one_mesh([leaf.type for leaf in known]), known[0].comm
        taken = []
        for name, leaf in zip(paths(spec, "args"), leaves):
            if isinstance(leaf, torch.Tensor):
                if leaf.numel() != 1 and self.plain != "replicate":
                    raise ValueTreeError(
                        f"{argument(name)} is a plain tensor of shape {tuple(leaf.shape)} beside "
                        f"DTensors.",
                        function=repr(self),
                        mesh=mesh,
                        hint="Distribute it first: distribute(tensor, layout, comm), or pass "
                        'plain="replicate" if every rank holds the same one.',
                    )
                type = _replica(leaf, mesh)
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


def spmd(
    f: Callable[..., Any] | None = None,
    *,
    out_layouts: Any = None,
    regather: bool = False,
    on_missing_rule: OnMissingRule = "replicate",
    plain: Plain = "error",
    check: Check | None = None,
) -> Any:
    """`f`, a plain torch function of full tensors, as one of pytrees of DTensors. Differentiable.

    The program is made at the first call with certain types, and agreed on by all ranks; see
    `trace` for what `f` may do and for the options. Python arguments are frozen into it, tensors
    that `f` closes over are replicated and read afresh. Results are new values, never pending
    unless `out_layouts` says so.
    """
    if f is None:
        return functools.partial(
            spmd,
            out_layouts=out_layouts,
            regather=regather,
            on_missing_rule=on_missing_rule,
            plain=plain,
            check=check,
        )
    return Spmd(
        f,
        out_layouts=out_layouts,
        regather=regather,
        on_missing_rule=on_missing_rule,
        plain=plain,
        check=check,
    )


_FUNCTIONS: OrderedDict[Any, Spmd[Any]] = OrderedDict()

_QUICK: dict[Any, _Entry] = {}
"""What `call` has made for arguments without derivatives, by function, types and constants."""

_CONSTANT = frozenset({int, bool, str, type(None), torch.dtype})


def call(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`fn(*args, **kwargs)` on DTensors: a torch function, an aten overload, or your own.

    Its program is made once for each set of types and Python arguments, and kept. A function whose
    output shapes depend on data runs on replicated operands. `out_layouts`, `plain` and
    `on_missing_rule` are those of `spmd`.
    """
    key: list[Any] = [fn, _default_dtype(), _grad_mode()]
    values: list[Any] = []
    comm = _keyed(args, key, values, None)
    if comm is None or kwargs or _autocast() or _transformed():
        return _spmd_of(fn, kwargs)(*args, **kwargs)
    whole = (comm, *key)
    found = _QUICK.get(whole)
    if found is not None:
        return found.result(found.go(values), comm)
    function = _spmd_of(fn, kwargs)
    result = function(*args)
    found = function.last
    if found is not None and found.traced is not None and comm.check != "always":
        if len(_QUICK) >= CACHED:
            _QUICK.pop(next(iter(_QUICK)))
        _QUICK[whole] = found
    return result


_default_dtype = torch.get_default_dtype
_grad_mode = torch.is_grad_enabled
_transformed: Any = torch._C._are_functorch_transforms_active
_autocast: Any = torch._C._is_any_autocast_enabled  # type: ignore[attr-defined]


def _keyed(args: Any, key: list[Any], values: list[Any], comm: Any) -> Any:
    """Adds what identifies arguments to the key and their local tensors to the values.

    Returns their Comm; None for what takes the long way: derivatives, simulated ranks, other
    arguments, none at all.
    """
    for a in args:
        kind = a.__class__
        if kind is DTensor:
            local = a.local
            if local.__class__ is tuple:
                return None
            if a.comm is not comm:
                if comm is not None and comm is not _ANY:
                    return None
                comm = a.comm
            values.append(local)
            key.append(a.type)
            key.append(local.requires_grad)
        elif kind in _CONSTANT or (kind is float and a):
            key.append(kind)
            key.append(a)
        elif kind is list or kind is tuple:
            key.append(kind)
            key.append(len(a))
            inner = _keyed(a, key, values, comm or _ANY)
            if inner is None:
                return None
            if inner is not _ANY:
                comm = inner
        else:
            return None
    return comm


_ANY = object()


def _spmd_of(fn: Callable[..., Any], kwargs: dict[str, Any]) -> Spmd[Any]:
    """The function of DTensors that `call` has made of `fn`; takes its options out of `kwargs`."""
    options = {name: kwargs.pop(name) for name in _OPTIONS if name in kwargs}
    key = (fn, *(id(v) if name == "out_layouts" else v for name, v in options.items()))
    made = _FUNCTIONS.get(key)
    if made is None:
        made = _FUNCTIONS[key] = Spmd(fn, **options)
        if len(_FUNCTIONS) > CACHED:
            _FUNCTIONS.popitem(last=False)
    return made


_OPTIONS = ("out_layouts", "plain", "on_missing_rule", "check")


def _is_dtensor(leaf: Any) -> bool:
    return leaf.__class__ is DTensor


def _requires_grad(local: Any) -> bool:
    if local.__class__ is tuple:
        return any(leaf.requires_grad for leaf in local)
    return local.requires_grad


def _static(leaf: Any) -> Any:
    """A Python argument as a key: 1, 1.0 and True differ, as do 0.0 and -0.0; nan equals itself."""
    if leaf.__class__ is float:
        return float, repr(leaf)
    if leaf.__class__ is slice:  # has no hash before Python 3.12
        return slice, *map(_static, (leaf.start, leaf.stop, leaf.step))
    try:
        hash(leaf)
    except TypeError:
        return _Itself(leaf)
    return leaf.__class__, leaf


class _Itself:
    """An argument without a hash as a key: the object, kept so that no other takes its id."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and self.value is other.value


def _equal(a: torch.Tensor, b: torch.Tensor) -> Any:
    return (a == b).all() if a.shape == b.shape else False


def _allclose(a: torch.Tensor, b: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.isclose(a, b, *args, **kwargs).all()


_ANSWERS: dict[Any, Callable[..., Any]] = {
    torch.equal: _equal,
    torch.Tensor.equal: _equal,
    torch.ops.aten.equal.default: _equal,
    torch.allclose: _allclose,
    torch.Tensor.allclose: _allclose,
}
"""Functions that return a Python number, as ones that return it as a tensor."""


def shared_with_all(answer: Any, comm: Any, root: int) -> Any:
    """What `root` has, on every rank of a Comm: Python values, also on ranks outside a mesh."""
    data = pickle.dumps(answer) if comm.rank == root else b""
    (length,) = comm.share([len(data)], root)
    shared = b""
    for start in range(0, length, 512):
        part = data[start : start + 512].ljust(512, b"\0")
        numbers = comm.share(struct.unpack("64q", part), root)
        shared += struct.pack("64q", *numbers)
    return pickle.loads(shared[:length])


def _replica(tensor: torch.Tensor, mesh: Mesh) -> TensorType:
    return TensorType(tuple(tensor.shape), tensor.dtype, mesh.layout())
