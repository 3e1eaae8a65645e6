"""What torch alone gives for a program: the results, the gradients, how sure they are."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import torch

from tests.hunt.records import Line, Program, compiled, source
from tests.hunt.values import filled, kind_of

__all__ = [
    "NOISES",
    "Reference",
    "fulls",
    "in_thread",
    "line_functions",
    "loss_of",
    "moment",
    "reference",
    "smooth_inputs",
    "transformed",
    "values_after",
    "weighted",
]

NOISES = 4
"""How often a doubtful result is computed again, with noise."""


@contextlib.contextmanager
def moment(name: str) -> Iterator[None]:
    """Within, what the caller has switched on."""
    with contextlib.ExitStack() as stack:
        match name:
            case "no_grad":
                stack.enter_context(torch.no_grad())
            case "inference":
                stack.enter_context(torch.inference_mode())
            case "autocast":
                stack.enter_context(torch.autocast("cpu", torch.bfloat16))
            case "float64":
                stack.callback(torch.set_default_dtype, torch.get_default_dtype())
                torch.set_default_dtype(torch.float64)
            case "deterministic":
                stack.callback(torch.use_deterministic_algorithms, False)
                torch.use_deterministic_algorithms(True)
        yield


def in_thread(f: Callable[[], Any]) -> Any:
    """What `f` gives on another thread; raises what it raises."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append((f(), None))
        except BaseException as error:
            results.append((None, error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    value, error = results[0]
    if error is not None:
        raise error
    return value


def smooth_inputs(program: Program) -> tuple[int, ...]:
    """The inputs that have derivatives."""
    return tuple(i for i, x in enumerate(program.inputs) if kind_of(x.dtype) in "fc")


def weighted(outs: Sequence[torch.Tensor]) -> torch.Tensor:
    """A sum of the elements of all results that have derivatives, each with a weight."""
    total = torch.zeros((), dtype=torch.float64)
    for out in outs:
        if kind_of(out.dtype) in "fc":
            real = torch.view_as_real(out.resolve_conj()) if out.is_complex() else out
            weights = torch.arange(real.numel()).remainder(7).sub(3).reshape(real.shape)
            total = total + (real.double() * weights).sum()
    return total


def loss_of(f: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    """The weighted sum as a function of leaves: `f` may write into what it gets."""
    return lambda *given: weighted(f(*[t.clone() for t in given]))


def transformed(way: str, f: Callable[..., Any], smooth: tuple[int, ...]) -> Callable[..., Any]:
    """What is traced in some way: `f` itself, or what a transform makes of it."""
    loss = loss_of(f)
    match way:
        case "grad":
            return torch.func.grad(loss, argnums=smooth)
        case "hessian":
            gradient = torch.func.grad(loss, argnums=smooth)
            return torch.func.grad(loss_of(gradient), argnums=smooth)
        case "jvp":

            def jvp(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
                def of_smooth(*some: torch.Tensor) -> torch.Tensor:
                    every = list(given)
                    for i, t in zip(smooth, some):
                        every[i] = t
                    return loss(*every)

                primals = tuple(given[i] for i in smooth)
                tangents = tuple(torch.ones_like(t) for t in primals)
                return torch.func.jvp(of_smooth, primals, tangents)

            return jvp
        case "vmap":
            return lambda *given: torch.vmap(f)(*(torch.stack([t, t]) for t in given))
    return f


def line_functions(lines: Sequence[Line], seen: bool = False) -> list[str]:
    """Each line as a function of what it reads; it gives what it binds and what it writes."""
    return [source(line.reads, [line], (*line.binds, *line.writes), seen) for line in lines]


@attrs.frozen(eq=False)
class Reference:
    """Results of plain torch, or the error that it raises."""

    outs: tuple[torch.Tensor | None, ...] = ()
    """The results, or in ways with gradients those of the smooth inputs."""
    error: Exception | None = None
    eps: float = 0.0
    """The coarsest of all float dtypes on the way."""
    noisy: tuple[Reference, ...] = ()


class _Eye:
    """Looks at each value as it is made, and may add noise."""

    def __init__(self, scale: float, seed: int) -> None:
        self.scale, self.eps = scale, 0.0
        self.generator = torch.Generator().manual_seed(seed)

    def factor(self, t: torch.Tensor, rounds: bool) -> torch.Tensor | None:
        if kind_of(t.dtype) not in "fc":
            return None
        eps = torch.finfo(t.dtype).eps
        self.eps = max(self.eps, eps)
        if not self.scale or not rounds:
            return None
        noise = torch.randn(t.shape, generator=self.generator, dtype=torch.float64)
        return (1 + self.scale * eps * noise).to(t.dtype)

    def see(self, t: torch.Tensor, rounds: bool) -> torch.Tensor:
        factor = self.factor(t, rounds)
        return t if factor is None or t._is_view() else t * factor

    def see_(self, t: torch.Tensor, rounds: bool) -> None:
        factor = self.factor(t, rounds)
        if factor is not None and not t._is_view():
            t.mul_(factor)


def reference(program: Program, about: str, again: int = 0, noises: int = 0) -> Reference:
    """What plain torch gives at a moment; `again` counts calls with values of their own."""
    found = _reference(program, about, again, _Eye(0.0, 0))
    if found.error is not None or not noises:
        return found
    noisy = [_reference(program, about, again, _Eye(16.0, k)) for k in range(noises)]
    return attrs.evolve(found, noisy=tuple(noisy))


def fulls(program: Program, again: int) -> list[torch.Tensor]:
    """The inputs, for the call of this number."""
    return [filled(attrs.evolve(i, seed=i.seed + 1000 * again)) for i in program.inputs]


def _reference(program: Program, about: str, again: int, eye: _Eye) -> Reference:
    tensors = fulls(program, again)
    for t in tensors:
        eye.factor(t, False)
    try:
        with moment(about):
            outs = _results(program, tensors, eye, about)
    except Exception as error:
        return Reference(error=error, eps=eye.eps)
    if about == "autocast":
        eye.eps = max(eye.eps, torch.finfo(torch.bfloat16).eps)
    outs = tuple(None if t is None else t.detach().resolve_conj().resolve_neg() for t in outs)
    return Reference(outs, None, eye.eps)


def _results(program: Program, tensors: list[torch.Tensor], eye: _Eye, about: str) -> Sequence[Any]:
    way = program.setting.way
    f = _by_line(program, eye) if way.startswith("call") else _whole(program, eye)
    smooth = smooth_inputs(program)
    if way in ("backward", "call_backward"):
        leaves = [t.requires_grad_(i in smooth) for i, t in enumerate(tensors)]
        loss_of(f)(*leaves).backward()
        return [leaves[i].grad for i in smooth]
    if about == "tracked":
        tensors = [t.requires_grad_(i in smooth) for i, t in enumerate(tensors)]
    return transformed(way, f, smooth)(*[t.clone() for t in tensors])


def _whole(program: Program, eye: _Eye) -> Callable[..., Any]:
    text = source(program.names, program.lines, program.outs, seen=True)
    return compiled(text, see=eye.see, see_=eye.see_)


def _by_line(program: Program, eye: _Eye) -> Callable[..., Any]:
    texts = line_functions(program.lines, seen=True)
    functions = [compiled(text, see=eye.see, see_=eye.see_) for text in texts]

    def f(*given: torch.Tensor) -> list[torch.Tensor]:
        env = dict(zip(program.names, given))
        for line, function in zip(program.lines, functions):
            made = function(
                *[env[n].clone(memory_format=torch.contiguous_format) for n in line.reads]
            )
            env.update(zip((*line.binds, *line.writes), made))
        return [env[n] for n in program.outs]

    return f


def values_after(program: Program, count: int) -> dict[str, torch.Tensor] | None:
    """All values after so many lines of plain torch; None where it raises."""
    names = [*program.names, *(n for line in program.lines[:count] for n in line.binds)]
    f = compiled(source(program.names, program.lines[:count], names))
    try:
        return dict(zip(names, f(*fulls(program, 0))))
    except Exception:
        return None
