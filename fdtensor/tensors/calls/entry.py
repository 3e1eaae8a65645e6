"""`Entry`: what is known of a call with certain types, and how it is made."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import attrs
import torch

from fdtensor.layouts.callsite import warn_user
from fdtensor.layouts.errors import FallbackWarning, TraceError
from fdtensor.layouts.progress import working
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.layouts.torch_private import transforms_active
from fdtensor.programs.dynamic import Dynamic
from fdtensor.programs.eqn import Eqn
from fdtensor.programs.failure_hints import lacks_derivative
from fdtensor.programs.options import Check, Options
from fdtensor.programs.program import Program
from fdtensor.programs.recording import name_of
from fdtensor.programs.tracer import Traced, traced
from fdtensor.runtime.interpreter import admit
from fdtensor.runtime.replication import mark, watching
from fdtensor.runtime.runner import runner_of
from fdtensor.tensors.calls.adjoint import Adjoint
from fdtensor.tensors.calls.family import Family
from fdtensor.tensors.calls.key import tracking
from fdtensor.tensors.calls.mesh_orders import Values, between
from fdtensor.tensors.calls.moment import Moment
from fdtensor.tensors.calls.reads import Reads
from fdtensor.tensors.calls.text import shown
from fdtensor.tensors.calls.vjp import Joint, adjoint, joint, without_tensors
from fdtensor.tensors.calls.weakly import Around, weakly
from fdtensor.tensors.dtensor import DTensor
from fdtensor.tensors.owed import Owed

__all__ = ["Entry", "entry_of", "read", "tell_of_lost", "traced_call"]


@attrs.frozen(eq=False)
class Entry:
    """The program of a call with certain types, and how it is run."""

    traced: Traced | None
    """None where the function cannot be traced and runs on replicated operands."""
    comm: Any
    go: Callable[[Sequence[Any]], Sequence[Any]] = list
    """The values of the outputs for those of the inputs."""
    types: tuple[TensorType, ...] = ()
    """Those of the outputs."""
    first: Program | None = None
    """The program that ranks agree on, or its forward where derivatives are wanted."""
    closed: tuple[int | DTensor[Any], ...] = ()
    """What the function closes over: places among what it reads, or DTensors further down."""
    both: Adjoint | None = None
    """The forward and the backward, where derivatives are wanted."""
    owing: tuple[int, ...] = ()
    """The outputs that are pending though nobody asked: what needs them whole reduces them."""
    one: TensorType | None = None
    """The type of the result where it is one tensor, and nothing is to be done to it."""
    short: Callable[[Sequence[Any]], Any] | None = None
    """The result for the values of the inputs, where it is tensors that need no more work."""
    settles: bool = False
    """Whether operands that owe a sum are to be reduced first, for all who read them."""
    donated: frozenset[int] = frozenset()
    """The tensors, by number, that a call frees once it has read them last."""
    is_agreed: bool = False
    """Whether all ranks have agreed on it, as they do at the first call."""
    seconds: float = 0.0
    """How long it took to be made."""

    @property
    def backward(self) -> Program | None:
        """What a backward runs, where derivatives are wanted."""
        return None if self.both is None else self.both.backward

    def agreed(self, leaves: Sequence[Any], reads: Reads, check: Check | None) -> Entry:
        """The same, ready to run, once all ranks agree on it; they fail together if one differs."""
        assert self.first is not None
        closed = read(self.closed, reads) if self.closed else []
        tensors = [leaf for leaf in (*leaves, *closed) if isinstance(leaf, DTensor)]
        program, values = self.first, [x.local for x in tensors]
        enter = between(self.comm, [x.mesh for x in tensors], program.mesh, into=True)
        admit(program, self.comm, program.in_types, enter(values) if enter else values, check)
        if self.is_agreed:
            return self
        if self.both is not None:
            go = self.both.runner(self.comm)
        else:
            go = runner_of(program, self.comm, self.donated)
        leave = between(self.comm, [t.mesh for t in self.types], program.mesh, into=False)
        go = _unless_tracked(_chained(enter, go, leave), program, self.both is not None)
        return attrs.evolve(self, go=go, short=self._short(go), is_agreed=True)

    def _short(self, go: Values) -> Callable[[Sequence[Any]], Any] | None:
        """What makes the result of the values that `go` gives; None where `result` has to."""
        assert self.traced is not None
        comm, types, kind = self.comm, self.types, self.traced.kind
        if self.one is not None:
            one = self.one
            return lambda values: DTensor(go(values)[0], one, comm)
        if kind is None or self.owing or self.traced.leaves:
            return None
        return lambda values: kind(
            [DTensor(out, type, comm) for out, type in zip(go(values), types, strict=True)]
        )

    def result(self, outs: Sequence[Any], comm: Any) -> Any:
        """The result of the function, with these values."""
        if self.one is not None and not watching():
            return DTensor(outs[0], self.one, comm)
        assert self.traced is not None
        if watching():
            for out, type in zip(outs, self.types, strict=True):
                mark(comm.leaves(out), type)
        tensors = [DTensor(out, type, comm) for out, type in zip(outs, self.types, strict=True)]
        for i in self.owing:
            owed = Owed(outs[i], self.types[i])
            tensors[i] = DTensor(owed, owed.of_sum, comm)
            if transforms_active():  # whose levels end before somebody may read it
                tensors[i] = DTensor(tensors[i].local, owed.of_sum, comm)
        for i in self.traced.leaves:
            tensors[i] = tensors[i].detach().requires_grad_()
        return tensors[0] if self.traced.bare else self.traced.result(tensors)


def _chained(enter: Values | None, go: Values, leave: Values | None) -> Values:
    """The function of what enters it, whose results leave it."""
    if enter is None and leave is None:
        return go
    first, last = enter or list, leave or list
    return lambda values: last(go(first(values)))


def _reduces(eqn: Eqn) -> bool:
    """Whether a line takes a sum that is pending."""
    return any(len(s.src.layout.partial) > len(s.dst.layout.partial) for s in eqn.steps)


def read(closed: Sequence[int | DTensor[Any]], reads: Reads) -> list[DTensor[Any]]:
    """What a function closes over, as it reads it now."""
    known = reads.tensors()
    return [known[x] if isinstance(x, int) else x for x in closed]


def traced_call(
    f: Callable[..., Any],
    options: Options,
    leaves: Sequence[Any],
    spec: Any,
    comm: Any,
    again: Callable[..., Any] | None,
    moment: Moment,
    family: Family | None = None,
    dynamic: Dynamic | None = None,
) -> tuple[Traced, Adjoint | None]:
    """The program of a call, and its adjoint where derivatives are wanted.

    `again(g)` makes a differentiable function of DTensors of a plain one; None wants no derivative.
    `moment` is that of the call.
    Where the call is `dynamic`, `family` has the recordings of others that differ in sizes alone.
    """
    __tracebackhide__ = True
    types = [leaf.type if isinstance(leaf, DTensor) else None for leaf in leaves]
    make = functools.partial(traced, cost=comm.cost, device=comm.device or "cpu")
    with working(f"tracing {name_of(f)}"):
        program = make(f, spec, leaves, types, options, dynamic=dynamic)
    tell_of_lost(shown(f), program, again is not None)
    if again is None:
        return program, None
    tracked = [tracking(leaf) for leaf in leaves if isinstance(leaf, DTensor)]
    known = spec, without_tensors(leaves, types), types, program, tracked, options, make
    alive = (lambda: f) if isinstance(f, Around) else weakly(f)  # an Around keeps no function
    both = _adjoint(alive, known, again, moment, family)
    moment.end()
    return program, both


def _adjoint(
    function: Callable[[], Any],
    known: tuple[Any, Any, Sequence[TensorType | None], Traced, Any, Options, Any],
    again: Callable[..., Any],
    moment: Moment,
    family: Family | None = None,
    ends: frozenset[int] | None = None,
) -> Adjoint | None:
    """The adjoint of a function for results that have a cotangent, by default for all.

    `known` has what is known of its call, as `joint` takes it.
    """
    f, (_, _, types, program, *_) = function(), known
    with working(f"tracing the backward of {name_of(f)}"), moment.again(f):
        take = functools.partial(joint, f, *known, family=family)
        both, refused = _joint_of_some(take, len(program.program.outs), ends)

    def anew(*args: Any) -> Any:
        with moment.again(function()):
            return again(*args)

    part = functools.partial(_adjoint, function, known, again, moment, None)
    return adjoint(f, both, program, types, anew, part, refused)


def _joint_of_some(
    take: Callable[..., Joint | None], count: int, ends: frozenset[int] | None
) -> tuple[Joint | None, dict[int, TraceError]]:
    """A function with the derivative of those of its `count` results that torch takes one of.

    And the errors of the others: torch too objects no sooner than a gradient comes to them.
    """
    try:
        return take(ends=ends), {}
    except TraceError as error:
        if ends is not None or count == 1 or not lacks_derivative(str(error)):
            raise
        refused = _halved(take, range(count))
        both = take(ends=frozenset(range(count)) - {*refused})
        if both is None:
            raise
        return both, refused


def _without_derivative(
    take: Callable[..., Joint | None], some: Sequence[int]
) -> dict[int, TraceError]:
    """Those of some results that torch takes no derivative of, each with its error."""
    try:
        take(ends=frozenset(some))
    except TraceError as error:
        if not lacks_derivative(str(error)):
            raise
        if len(some) == 1:
            return {some[0]: copy(error)}  # without the frames that keep the recording
        return _halved(take, some)
    return {}


def _halved(take: Callable[..., Joint | None], some: Sequence[int]) -> dict[int, TraceError]:
    """The same of results of which not all have a derivative."""
    half = len(some) // 2
    return _without_derivative(take, some[:half]) | _without_derivative(take, some[half:])


def entry_of(program: Traced, both: Adjoint | None, comm: Any) -> Entry:
    """The entry of a call that runs this program, or both halves."""
    first = program.program if both is None else both.forward  # so ranks agree on gradients too
    origin = program.program.origin
    types, asked = origin.seen or program.program.out_types, origin.wants
    pairs = enumerate(zip(types, asked, strict=True))
    owing = tuple([i for i, (t, want) in pairs if want is None and t.layout.partial])
    return Entry(
        *(program, comm),
        types=types,
        first=first,
        both=both,
        owing=owing,
        one=types[0] if program.bare and not owing and not program.leaves else None,
        settles=any(map(_reduces, program.program.eqns)),
    )


def tell_of_lost(name: str, traced: Traced, differentiable: bool) -> None:
    """Raises, or warns, where a result depends on a tensor closed over that requires grad.

    It is an error of a call that is `differentiable`: others have no gradient to give.
    """
    if traced.tracked:
        _tell_of_lost(name, [tensor for _, tensor in traced.program.constants], differentiable)


def _tell_of_lost(name: str, tensors: Sequence[torch.Tensor], differentiable: bool) -> None:
    """The same where a result depends on the first of these tensors that requires grad."""
    lost = next((tensor for tensor in tensors if tensor.requires_grad), None)
    if lost is None or not torch.is_grad_enabled():
        return
    what = f"{name} closes over a tensor that requires grad, of shape {tuple(lost.shape)}, and"
    hint = (
        "Pass it as an argument (torch.func.functional_call for a module), close over its "
        ".detach(), or call the function under torch.no_grad()."
    )
    if differentiable:
        raise TraceError(f"{what} would give it no gradient.", hint=hint)
    warn_user(f"{what} gives it no gradient. {hint}", FallbackWarning)


def _unless_tracked(go: Values, program: Program, differentiable: bool) -> Values:
    """`go`, which looks at tensors that the function closes over: they may require grad later."""
    constants = [t for _, t in program.constants if not t.requires_grad]
    if not constants:
        return go
    name = program.name.removesuffix(".forward")

    def watched(values: Any) -> Any:
        _tell_of_lost(name, constants, differentiable)
        return go(values)

    return watched
