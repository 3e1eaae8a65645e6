"""`Spmd`: a function of DTensors, and what earlier calls of it have made."""

from __future__ import annotations

import contextlib
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial, update_wrapper
from operator import attrgetter
from typing import Any, Generic, ParamSpec, TypeVar, overload

import attrs
import torch

from fdtensor.layouts.errors import DataDependentError, FdtensorError
from fdtensor.layouts.free_type import FreeType
from fdtensor.layouts.opaque import opaque
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.layouts.tree import argument, flatten, flatten_admitting, key_orders, paths, unflatten
from fdtensor.ops.random_bits.keys import AnyKey
from fdtensor.ops.random_key import is_key, with_random_key
from fdtensor.ops.transparent import recording
from fdtensor.programs.closed_over import closing, given_all, given_besides
from fdtensor.programs.options import EVERY_CALL, Options
from fdtensor.programs.program import Program
from fdtensor.programs.recording import refuse_no_function
from fdtensor.programs.tracer import is_typed, trace
from fdtensor.tensors.calls.again import timed, warn_of_recording
from fdtensor.tensors.calls.arguments import (
    distributed,
    distributed_key,
    entering,
    refuse_untraceable,
    tell,
)
from fdtensor.tensors.calls.derived import cotangents_again
from fdtensor.tensors.calls.donated import donated_among, spend
from fdtensor.tensors.calls.entry import Entry, entry_of, read, traced_call
from fdtensor.tensors.calls.family import Family, family_of
from fdtensor.tensors.calls.guard import Guard, guard
from fdtensor.tensors.calls.inlined import inlined
from fdtensor.tensors.calls.kept import keep_few
from fdtensor.tensors.calls.key import call_key, refuse_other_comm, requires_grad
from fdtensor.tensors.calls.moment import Moment
from fdtensor.tensors.calls.reads import Reads
from fdtensor.tensors.calls.replicas import ANSWERS, on_replicas, placed, warn_of_replicas
from fdtensor.tensors.calls.text import no_backward, no_program, shown
from fdtensor.tensors.calls.weakly import Around, weakly
from fdtensor.tensors.dtensor import DTensor, is_dtensor, read_by_call

__all__ = ["Spmd"]

P = ParamSpec("P")
R = TypeVar("R", covariant=True)


class Spmd(Generic[P, R]):
    """A function of DTensors made of a plain torch function; one program for each set of types."""

    def __init__(
        self, f: Callable[P, Any], options: Options | None = None, *, weak: bool = False
    ) -> None:
        refuse_no_function(f)
        self._f: Callable[[], Any] = weakly(f) if weak else lambda: f
        self.options = options or Options()
        self.reads = Reads(f)
        """The values that it reads besides its arguments: a part of the key of a program."""
        self.programs: OrderedDict[Any, Entry] = OrderedDict()
        self.quick: dict[Any, Entry] = {}
        """Those that `call` finds by the arguments alone."""
        self.families: dict[Any, Family] = {}
        """What is known of calls that differ in sizes alone, where these are dynamic."""
        self.guards: list[Guard] = []
        """What knows the arguments of calls that have come again."""
        self.derived: dict[Any, Spmd[..., Any]] = {}
        self.keyed: Spmd[..., Any] | None = None
        """The same of the function with a key."""
        self.last: Entry | None = None
        """The program that the last call ran."""
        self.reasons: set[object] = set()
        """What warnings have said of it, each once."""
        update_wrapper(self, f, updated=())
        if weak:
            del self.__dict__["__wrapped__"]

    @property
    def f(self) -> Callable[P, Any]:
        """The plain function."""
        return self._f()

    def __reduce__(self) -> Any:
        name = getattr(self, "__qualname__", "spmd")
        with contextlib.suppress(AttributeError):
            if attrgetter(name)(sys.modules.get(self.__module__)) is self:
                return name  # as a decorator it has taken the place of its function
        return Spmd, (self.f, self.options)

    def __repr__(self) -> str:
        return shown(self.f, self.options.eager)

    @opaque
    def trace(self, *args: Any, **kwargs: Any) -> Program:
        """The program that a call with these arguments runs: a call does not trace it again.

        One rank alone may look: ranks agree at the first call. Types are enough, for a look without
        processes, and may be free: a call takes tensors in the layouts that the program has.
        """
        if (drawing := self._drawing(args, kwargs)) is not None:
            return drawing.trace(*args, **kwargs)
        leaves, spec = flatten_admitting((args, kwargs), is_leaf=is_typed)
        free = any(isinstance(leaf, FreeType) for leaf in leaves)
        if not free and any(isinstance(leaf, DTensor) for leaf in leaves):
            entry = self._entry(leaves, spec, key_orders((args, kwargs)), agreed=False)
            if entry.traced is None:
                raise no_program(self)
            return entry.traced.program
        return trace(self.f, *args, **self.options.of_trace, **kwargs)

    @opaque
    def trace_backward(self, *args: Any, **kwargs: Any) -> Program:
        """The program that the backward of a call with these DTensors runs.

        It takes what the forward keeps for it, then cotangents of the results; it gives those of
        the arguments that require grad. Raises `TraceError` where none does.
        """
        drawing = self._drawing(args, kwargs)
        if drawing is not None:
            return drawing.trace_backward(*args, **kwargs)
        leaves, spec = flatten_admitting((args, kwargs), is_leaf=is_dtensor)
        entry = self._entry(leaves, spec, key_orders((args, kwargs)), agreed=False)
        if entry.backward is None:
            raise no_backward(self)
        return entry.backward

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...

    @overload
    def __call__(self, *args: Any, key: AnyKey | DTensor[Any], **kwargs: Any) -> R: ...

    @opaque
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        if recording():
            return inlined(self.f, self.options, args, kwargs)
        if "key" in kwargs:
            drawing = self._drawing(args, kwargs)
            if drawing is not None:
                return drawing(*args, **kwargs)
        for known in self.guards:
            matched = known.of_call(args, kwargs, self.reads)
            if matched is not None:
                self.last = known.entry
                return self._run(known.entry, *matched)
        flat = flatten if self.programs else flatten_admitting  # later calls know their nodes
        leaves, spec = flat((args, kwargs), is_leaf=is_dtensor)
        try:
            if any(isinstance(leaf, torch.Tensor) for leaf in leaves):
                leaves = distributed(self, leaves, spec, self.options)
            orders = key_orders((args, kwargs))
            leaves, values = entering(
                leaves, self.options.eager, partial(self._stays, spec, orders)
            )
            count = len(self.programs)
            entry = self.last = self._entry(leaves, spec, orders)
        except BaseException as error:
            raise self._failed(leaves, error)  # noqa: B904 - the same error
        if entry.traced is None:
            return self._on_replicas(leaves, spec, entry.comm)
        if len(self.programs) == count and not self.options.eager:
            guard(self.guards, entry, self.options.check, (args, kwargs), leaves, self.reads)
        values = values or [read_by_call(x) for x in leaves if x.__class__ is DTensor]
        return self._run(entry, leaves, values)

    def _run(self, entry: Entry, leaves: Sequence[Any], values: list[Any]) -> Any:
        """The result of a program for the local values of these leaves."""
        if entry.donated:
            spend(leaves, entry.donated, self.f)
        if entry.closed:
            values += map(read_by_call, read(entry.closed, self.reads))
        return entry.result(entry.go(values), entry.comm)

    def _stays(self, spec: Any, orders: Any, leaves: Sequence[Any]) -> bool:
        """Whether a call with these terms of sums leaves them pending, or moves them as asked."""
        asked = self.options.out_layouts is not None
        return asked or not self._entry(leaves, spec, orders, agreed=False).settles

    def _drawing(self, args: Any, kwargs: dict[str, Any]) -> Spmd[..., Any] | None:
        """The function to call where random ops draw from `kwargs["key"]`, which becomes a DTensor.

        None where there is no key, or it is just an argument of the function.
        """
        if "key" not in kwargs:
            return None
        leaves, _ = flatten((args, kwargs), is_leaf=is_dtensor)
        try:
            if not is_key(self.f, kwargs["key"]):
                return None
        except FdtensorError as error:
            raise self._failed(leaves, error)  # noqa: B904 - the same error
        if self.keyed is None:
            self.keyed = Spmd(with_random_key(self.f), self.options)
        known = [leaf for leaf in leaves if isinstance(leaf, DTensor)]
        key = kwargs["key"]
        if known and not isinstance(key, (DTensor, TensorType)):
            first = not self.keyed.programs
            kwargs["key"] = distributed_key(key, known, self.options.check, first)
        return self.keyed

    def _entry(self, leaves: Sequence[Any], spec: Any, orders: Any, agreed: bool = True) -> Entry:
        """The entry of a call with these arguments, worked out at the first of its kind.

        All ranks agree on it unless it is not to be `agreed`.
        """
        __tracebackhide__ = True
        key = call_key(self, self.reads and self.reads.key(), leaves, spec, orders)
        entry = self.programs.get(key)
        if entry is None:
            if not self.options.eager:
                warn_of_recording(self, key, leaves, spec)
            entry = self.programs[key] = timed(partial(self._new, leaves, spec, key))
            keep_few(self.programs, self.quick, self.guards)
        every = (self.options.check or entry.comm.check) in EVERY_CALL
        if agreed and entry.first is not None and (every or not entry.is_agreed):
            entry = self.programs[key] = entry.agreed(leaves, self.reads, self.options.check)
        return entry

    def _new(self, leaves: Sequence[Any], spec: Any, key: tuple[Any, ...]) -> Entry:
        """The entry of calls like this one."""
        __tracebackhide__ = True
        refuse_untraceable(self, leaves)
        (comm, grads), dims, family, known = key[:2], self.options.dynamic, None, []
        if dims:
            family = family_of(self.families, key, dims, self.f, spec, leaves)
            known = read(family.closed, self.reads)
        try:
            return given_all(partial(self._given, leaves, spec, comm, grads, family), (*known,))
        except DataDependentError as error:
            if self.options.on_data_dependent == "error":
                raise
            if not self.options.eager:
                warn_of_replicas(self.f, error, self.reasons)
            return Entry(None, comm, is_agreed=True)

    def _given(
        self,
        leaves: Sequence[Any],
        spec: Any,
        comm: Any,
        grads: bool,
        family: Family | None,
        closed: tuple[Any, ...],
    ) -> Entry:
        """The entry of calls like this one, of a function that is given what it closes over."""
        __tracebackhide__ = True
        f, places, dynamic = self.f, (), None
        whole = given_besides(leaves, spec, closed, is_dtensor) if closed else (leaves, spec)
        if closed:
            known = [*map(id, self.reads.tensors())]
            places = tuple([known.index(id(x)) if id(x) in known else x for x in closed])
            f = Around(f, partial(closing, values=partial(read, places, self.reads)))
            refuse_other_comm(self, comm, *whole)
            wanted = any(requires_grad(x.held) for x in closed)
            grads = grads or (wanted and torch.is_grad_enabled())
        if family is not None:
            dynamic = family.of_call(spec, whole[0], len(closed))
        again = partial(cotangents_again, Spmd, self.options, self.derived) if grads else None
        named = zip(map(argument, paths(spec, "args")), leaves, strict=True)
        moment = Moment(self.reads, [pair for pair in named if not isinstance(pair[1], DTensor)])
        program, both = traced_call(f, self.options, *whole, comm, again, moment, family, dynamic)
        if family is not None:
            family.closed = places
        donated = donated_among(self.f, spec, leaves, self.options.donate, grads)
        return attrs.evolve(entry_of(program, both, comm), closed=places, donated=donated)

    def _on_replicas(self, leaves: Sequence[Any], spec: Any, comm: Any) -> Any:
        """The function on the full tensors, which every rank gathers."""
        answer = ANSWERS.get(self.f)
        if answer is None:
            result = on_replicas(self.f, leaves, spec, comm)
            return placed(self.f, result, leaves, spec, self.options)
        args, kwargs = unflatten(spec, leaves)  # one number decides: no need to gather the operands
        equal = Spmd(answer, attrs.evolve(self.options, out_layouts=None))(*args, **kwargs)
        if not isinstance(equal, DTensor):
            return equal
        return on_replicas(torch.Tensor.item, *flatten(((equal,), {}), is_leaf=is_dtensor), comm)

    def _failed(self, leaves: Sequence[Any], error: BaseException) -> BaseException:
        """The error, of which the other ranks hear: at the first call they wait for it."""
        agreed = any(entry.is_agreed for entry in self.programs.values())
        if not agreed and isinstance(error, FdtensorError):
            tell(error, leaves, self.options.check)
            return error
        known = next((leaf for leaf in leaves if isinstance(leaf, DTensor)), None)
        return error if known is None else known.comm.failed([known.mesh], error)
