"""`record`: runs a plain torch function once on fake full tensors and writes down its aten calls.

C++ functionalization sits between the function and the recorder, so that in-place ops and views
come out as functions; `torch.func` transforms and autograd run above both.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode

from fdtensor.layouts.callsite import user_line
from fdtensor.layouts.errors import TraceError
from fdtensor.ops.ambient import neutral
from fdtensor.ops.graph import Call, Full, Graph, Var, is_view, pruned, tensors_of
from fdtensor.ops.memory_order import IN_OTHER_ORDER, in_order_of_kernel
from fdtensor.ops.randomness import (
    Numbers,
    is_quiet,
    refuse_random,
    replacement,
    without_rejection,
)
from fdtensor.ops.recorded_checks import REQUIREMENTS, Checks
from fdtensor.ops.recorded_otherwise import OTHERWISE
from fdtensor.ops.saved_values import apart, phase
from fdtensor.ops.transparent import needs_values, transparent
from fdtensor.ops.value_checks import CHECKED

__all__ = ["draw_from", "record"]

aten = torch.ops.aten
_C: Any = torch  # what torch does not declare

_SAME = {
    aten.detach.default,
    aten.alias.default,
    aten.clone.default,
    aten.contiguous.default,
    aten.lift_fresh.default,
    aten.lift_fresh_copy.default,
    aten.lift.default,
    aten.resolve_conj.default,
    aten.resolve_neg.default,
}
"""Ops whose result is their argument, to a program: what needs other strides makes them itself."""

_PHYSICAL: dict[Any, Any] = {
    aten._conj.default: aten._conj_physical.default,
    aten._neg_view.default: aten.neg.default,
}
"""Views that set a bit which kernels of views do not know, and the ops that compute the values."""

_PROMOTING = {aten.logsumexp.default}
"""Ops that are not elementwise, but take integers as numbers of the default dtype."""

_BATCH_NORM = aten.native_batch_norm.default


def draw_from(key: torch.Tensor) -> None:
    """Lets the random ops of the function that runs, or is recorded, draw from a key."""
    while _C._C._functorch.is_gradtrackingtensor(key):
        key = _C._C._functorch.get_unwrapped(key)
    Numbers.active[-1].key = _unwrapped(key)


class _Recorder(TorchDispatchMode):
    """Writes down every call below functionalization."""

    def __init__(self, fakes: FakeTensorMode, mark: Callable[[], Any], checks: bool) -> None:
        super().__init__()
        self.fakes, self.mark, self.outer = fakes, mark, _proxy_mode()
        self.checks = Checks(self) if checks else None
        self.types: list[Full] = []
        self.calls: list[Call] = []
        self.phases: list[int] = []
        self.constants: list[tuple[Var, torch.Tensor]] = []
        self.vars: dict[int, Var] = {}
        self.alive: list[torch.Tensor] = []  # an id means a tensor only while the tensor lives
        self.closed: dict[int, tuple[Var, torch.Tensor]] = {}
        self.numbers = Numbers()

    def var(self, tensor: torch.Tensor) -> Var:
        """A new value, for a tensor that was just made."""
        made = Var(len(self.types))
        self.types.append(Full(tuple(tensor.shape), tensor.dtype))
        self.vars[id(tensor)] = made
        self.alive.append(tensor)
        return made

    def known(self, tensor: torch.Tensor) -> Var:
        """The value that a tensor is."""
        if id(tensor) not in self.vars:  # torch makes parameters of tensors behind all modes
            same = next(t for t in reversed(self.alive) if _is_alias(t, tensor))
            self.vars[id(tensor)] = self.vars[id(same)]
            self.alive.append(tensor)
        return self.vars[id(tensor)]

    def constant(self, tensor: torch.Tensor) -> torch.Tensor:
        """The fake of a real tensor that the function closes over."""
        if tensor.layout not in (torch.strided, torch.jagged):  # nested ones are refused by name
            raise TraceError(
                f"a recorded function closes over a tensor of layout {tensor.layout}, and only "
                "dense ones are distributed.",
                line=user_line() or "not known",
                hint="Keep its indices and values as two dense tensors.",
            )
        if id(tensor) not in self.closed:
            shape, strides = tensor.shape, tensor.stride()
            with self.fakes:
                fake = torch.empty_strided(shape, strides, dtype=tensor.dtype, device=tensor.device)
            made = self.var(fake)
            self.constants.append((made, tensor))
            self.closed[id(tensor)] = made, fake
            self.alive.append(tensor)
        return self.closed[id(tensor)][1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _proxy_mode() is not self.outer:
            raise TraceError(
                "a function is traced by make_fx, as torch.cond, torch.func.linearize and "
                "torch.export do, inside of a recorded function.",
                line=user_line() or "not known",
                hint="torch.func.jvp gives the tangents of linearize; trace before, or record "
                "the function alone.",
            )
        drawn = replacement(func)
        if drawn is not None and not is_quiet(func, args):
            return self._drawn(drawn, func, args, kwargs)
        _refuse(func, args)
        if func is _BATCH_NORM and args[5] and args[3] is not None:
            if not all(isinstance(t, FakeTensor) for t in args[3:5]):
                raise _writes("batch norm in training mode")
            return self._batch_norm(args)
        args, kwargs = _mapped((args, kwargs), self.fake)
        otherwise = OTHERWISE.get(func)
        if otherwise is not None:
            out = otherwise(self, func, args, kwargs)
            if out is not NotImplemented:
                return out
        if func in REQUIREMENTS:
            return self.checks and self.checks.required(func, args)
        if self.checks is not None and func in CHECKED:
            args, kwargs = self.checks.within(func, args, kwargs)
        return self.recorded(func, args, kwargs)

    def recorded(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What a call gives, written down unless it gives its argument."""
        try:
            out = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise needs_values(func, args) from error
        out = _unmasked(func, args, out)
        if func in IN_OTHER_ORDER:
            out = in_order_of_kernel(func, args, kwargs, out)
        results = tensors_of(out)
        if not results:
            return out
        args, kwargs = self._with_dtype(func, args, kwargs, results[0].dtype)
        if any(t.layout is not torch.strided for t in results):
            raise TraceError(
                f"{func} gives a sparse tensor, and only dense ones are distributed.",
                hint="Keep its indices and values as two dense tensors.",
            )
        if func in _SAME or (args and out is args[0]):
            self.vars[id(out)] = self.known(args[0])
            self.alive.append(out)
            return out
        outs = tuple([self.var(t) for t in results])
        known = _frozen((args, tuple(kwargs.items())), self.known)
        if func in _PHYSICAL and isinstance(args[0], torch.Tensor):  # a number has no bits
            func = _PHYSICAL[func]
        self.calls.append(Call(func, known[0], known[1], outs, self.mark()))
        self.phases.append(phase())
        return out

    def _with_dtype(self, func: Any, args: Any, kwargs: Any, dtype: torch.dtype) -> Any:
        """The arguments, with what comes from the default dtype said: `dtype` is the result's."""
        operands = tensors_of((args, tuple(kwargs.values())))
        if not _smooth(dtype) or any(_smooth(t.dtype) for t in operands):
            return args, kwargs
        names = [a.name for a in func._schema.arguments]
        if "dtype" in names:
            return args, kwargs if len(args) > names.index("dtype") else {**kwargs, "dtype": dtype}
        if operands and (torch.Tag.pointwise in func.tags or func in _PROMOTING):
            return _mapped((args, kwargs), lambda t: self._cast(t, dtype))
        return args, kwargs

    def _cast(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return self.__torch_dispatch__(aten._to_copy.default, (), (tensor,), {"dtype": dtype})

    def _drawn(self, drawn: Callable[..., Any], func: Any, args: Any, kwargs: Any) -> Any:
        """A random op, as draws from a key."""
        if kwargs.get("generator") is not None:
            raise TraceError(
                f"{func} draws from a generator, and each rank would draw its own numbers.",
                hint="Leave the generator out, and pass key=random.key(0) in the call.",
            )
        args, kwargs = _mapped((args, kwargs), self.fake)
        with self:
            return drawn(functools.partial(self.numbers.draw, func), *args, **kwargs)

    def _batch_norm(self, args: Any) -> Any:
        """A batch norm that says what it writes to its running statistics."""
        if any(self._is_view(t) for t in args[3:5]):  # the write would miss what it is a view of
            raise TraceError(
                "batch norm in training mode writes to running statistics that are views.",
                line=user_line() or "not known",
                hint="Give it tensors of their own, not under vmap; or track no statistics.",
            )
        out = self.__torch_dispatch__(aten._native_batch_norm_legit_functional.default, (), args)
        for old, new in zip(args[3:5], out[3:], strict=True):
            kept = new if new.dtype == old.dtype else self._cast(new, old.dtype)
            self.vars[id(old)] = self.vars[id(kept)]
        return out[:3]

    def _is_view(self, tensor: torch.Tensor) -> bool:
        v = self.known(tensor)
        return any(v in call.outs and is_view(call) for call in self.calls)

    def fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """The fake of a tensor, which is itself unless the function closes over it."""
        return tensor if isinstance(tensor, FakeTensor) else self.constant(tensor)


def record(
    f: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]],
    types: Sequence[Full],
    *,
    device: str | torch.device = "cpu",
    requires_grad: Sequence[bool] = (),
    mark: Callable[[], Any] = lambda: None,
    of_caller: bool = False,
    checks: bool = False,
) -> Graph:
    """The graph of `f`, which takes a list of tensors of these types and returns a list.

    Each call is given what `mark()` returns when it is made. Where the function is `of_caller`, it
    runs under the settings of torch that the caller has; else under those of a fresh process. Of
    what they are the graph does not depend any more: what default dtypes and autocast did is
    written out. With `checks`, the graph ends with one of all operands that ops refuse for their
    values.
    Raises `DataDependentError` where shapes or Python control flow depend on the values of tensors,
    and `TraceError` for what cannot be a pure function: in-place writes to closed-over tensors,
    random numbers, gradients left in closed-over tensors.
    """
    fakes = FakeTensorMode(allow_non_fake_inputs=False)
    recorder = _Recorder(fakes, mark, checks)
    grads = list(requires_grad) or [False] * len(types)
    with torch.inference_mode(False), fakes:  # an inference tensor hides what ops are made of
        bare = [torch.empty(t.shape, dtype=t.dtype, device=device) for t in types]
    inputs = tuple(map(recorder.var, bare))
    try:
        with contextlib.ExitStack() as stack:
            if not of_caller:
                stack.enter_context(neutral())
            grad = torch.is_grad_enabled()
            stack.enter_context(torch.inference_mode(False))  # which turns gradients on
            stack.enter_context(torch.set_grad_enabled(grad))
            stack.enter_context(recorder.numbers)
            stack.enter_context(without_rejection())
            stack.enter_context(transparent(of_caller))
            stack.enter_context(fakes)
            stack.enter_context(recorder)
            wrapped = [_C._to_functional_tensor(t) for t in bare]
            for t, wanted in zip(wrapped, grads, strict=True):
                t.requires_grad_(wanted)
            _C._enable_functionalization(reapply_views=True)
            try:
                results = [_unwrapped(t) for t in f(wrapped)]
            finally:
                _C._disable_functionalization()
            outs = tuple(recorder.known(recorder.fake(t)) for t in results)
            if recorder.checks is not None:
                recorder.checks.finish(outs)
    except RuntimeError as error:
        if "mutating a non-functional tensor" in str(error):
            raise _writes("an op") from error
        if "erroneously tracing" in str(error):  # a kernel asked for the memory of a tensor
            raise needs_values(torch.Tensor.data_ptr, ()) from error
        raise
    _no_gradients_left(recorder)
    calls, outs = apart(recorder.calls, recorder.phases, outs, recorder.types)
    constants = tuple(recorder.constants)
    return pruned(Graph(inputs, constants, calls, outs, tuple(recorder.types)))


def _unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    if not _C._is_functional_tensor(tensor):
        return tensor
    _C._sync(tensor)
    return _C._from_functional_tensor(tensor)


def _no_gradients_left(recorder: _Recorder) -> None:
    for _, tensor in recorder.constants:
        grad = tensor.grad if tensor.is_leaf else None
        if grad is not None and _C._is_functional_tensor(grad):
            tensor.grad = None
            raise TraceError(
                "backward() of a traced function left a gradient in a tensor that it closes over.",
                shape=tuple(tensor.shape),
                hint="Pass the tensor as an argument and use torch.func.grad or autograd.grad.",
            )


def _refuse(func: Any, args: Any) -> None:
    refuse_random(func, args)
    if func._schema.is_mutable:
        raise _writes(str(func))
    if func._opname.startswith(("quantize_per_", "dequantize")):
        raise TraceError(
            f"{func} is of quantized tensors, and only plain ones are recorded.",
            line=user_line() or "not known",
            hint="fake_quantize_per_tensor_affine gives the same numbers as plain floats.",
        )


def _unmasked(func: Any, args: Any, out: Any) -> Any:
    """What kernels give: not the outputs that a mask leaves out, though a fake may have them."""
    names = [a.name for a in func._schema.arguments]
    if "output_mask" not in names or not isinstance(out, (tuple, list)):
        return out
    mask = args[names.index("output_mask")]
    return tuple(t if wanted else None for t, wanted in zip(out, mask, strict=True))


def _smooth(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _is_alias(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are the same elements of one memory."""

    def place(t: torch.Tensor) -> Any:
        return t.shape, t.stride(), t.storage_offset(), t.dtype, t.untyped_storage()._cdata

    return place(a) == place(b)


def _proxy_mode() -> Any:
    """What `make_fx` records by, which would see none of the tensors that a recorder does."""
    return _C._C._get_dispatch_mode(_C._C._TorchDispatchModeKey.PROXY)


def _writes(what: str) -> TraceError:
    return TraceError(
        f"{what} writes to a tensor that the function closes over.",
        hint="Pass the tensor as an argument and return its new value.",
    )


def _mapped(tree: Any, of: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The arguments with `of(t)` for each tensor `t`."""
    if isinstance(tree, torch.Tensor):
        return of(tree)
    if isinstance(tree, (tuple, list)):
        return type(tree)([_mapped(entry, of) for entry in tree])
    if isinstance(tree, dict):
        return {key: _mapped(entry, of) for key, entry in tree.items()}
    return tree


def _frozen(tree: Any, of: Callable[[torch.Tensor], Var]) -> Any:
    """The arguments with values for tensors and tuples for lists."""
    if isinstance(tree, torch.Tensor):
        return of(tree)
    if isinstance(tree, (tuple, list)):
        return tuple([_frozen(entry, of) for entry in tree])
    return tree
