"""`CallRecorder`: a dispatch mode that writes down the aten calls below functionalization."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from fdtensor.layouts.callsite import user_line
from fdtensor.layouts.errors import TraceError
from fdtensor.layouts.torch_private import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    enable_python_dispatcher,
    packet_name,
    proxy_mode,
    schema_of,
    uncompiled,
)
from fdtensor.ops.again import refuse_other_parameter
from fdtensor.ops.graph import Call, Full, Var, is_view, tensors_of
from fdtensor.ops.loop_ops import LOOP_OPS, WITH_ENTRY
from fdtensor.ops.mapped import frozen, mapped
from fdtensor.ops.memory_order import IN_OTHER_ORDER, in_order_of_kernel
from fdtensor.ops.overlap import alias_among
from fdtensor.ops.randomness import Numbers, is_quiet, refuse_numbers, refuse_random, replacement
from fdtensor.ops.recorded_checks import REQUIREMENTS, Checks
from fdtensor.ops.recorded_otherwise import OTHERWISE
from fdtensor.ops.region import pin_of_region
from fdtensor.ops.same_dtypes import refuse_mixed
from fdtensor.ops.saved_values import CONSTRAIN, phase
from fdtensor.ops.sizes import Sizes
from fdtensor.ops.transparent import needs_values
from fdtensor.ops.write_errors import write_error

__all__ = ["CallRecorder"]

aten = torch.ops.aten

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
"""Ops that a program leaves out: ops that need contiguous blocks make them so themselves."""

_PHYSICAL: dict[Any, Any] = {
    aten._conj.default: aten._conj_physical.default,
    aten._neg_view.default: aten.neg.default,
}
"""Views that set a bit, which local tensors do not have, and the ops that compute the values."""

_PROMOTING = {aten.logsumexp.default}
"""Ops that are not elementwise, but cast integers to the default dtype."""

_NOT_PINNED = {CONSTRAIN, WITH_ENTRY, *LOOP_OPS}
"""Ops of which no region pins the results: those of loops follow what is carried."""

_BATCH_NORM = aten.native_batch_norm.default


@uncompiled
class CallRecorder(TorchDispatchMode):
    """Writes down every call below functionalization, on fake tensors."""

    running: ClassVar[list[CallRecorder]] = []
    """Those at work, innermost last."""

    def __init__(
        self,
        fakes: FakeTensorMode,
        mark: Callable[[], Any],
        checks: bool,
        sizes: Sizes | None = None,
    ) -> None:
        super().__init__()
        self.fakes, self.mark, self.outer, self.sizes = fakes, mark, proxy_mode(), sizes
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
        """A new value, for a new tensor."""
        v = Var(len(self.types))
        self.types.append(Full(self.plain(tuple(tensor.shape)), tensor.dtype))
        self.vars[id(tensor)] = v
        self.alive.append(tensor)
        return v

    def plain(self, tree: Any) -> Any:
        """Arguments with expressions for numbers that depend on sizes which are not known."""
        if self.sizes is None:
            return tree
        if isinstance(tree, tuple):
            return tuple([self.plain(entry) for entry in tree])
        return self.sizes.plain(tree)

    def known(self, tensor: torch.Tensor) -> Var:
        """The value that stands for a tensor."""
        if id(tensor) not in self.vars:  # torch makes parameters of tensors behind all modes
            same = alias_among(self.alive, tensor)
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
            refuse_other_parameter(tensor)
            shape, strides = tensor.shape, tensor.stride()
            with self.fakes:
                fake = torch.empty_strided(shape, strides, dtype=tensor.dtype, device=tensor.device)
            v = self.var(fake)
            self.constants.append((v, tensor))
            self.closed[id(tensor)] = v, fake
            self.alive.append(tensor)
        return self.closed[id(tensor)][1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if proxy_mode() is not self.outer:
            raise TraceError(
                "a function is traced by make_fx, as torch.func.linearize and "
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
                raise write_error("batch norm in training mode", args[3])
            return self._batch_norm(args)
        args, kwargs = mapped((args, kwargs), self.fake)
        otherwise = OTHERWISE.get(func)
        if otherwise is not None:
            out = otherwise(self, func, args, kwargs)
            if out is not NotImplemented:
                return out
        if func in REQUIREMENTS:
            return self.checks and self.checks.required(func, args)
        if self.checks is not None:
            args, kwargs = self.checks.within(func, args, kwargs)
        return self.recorded(func, args, kwargs)

    def recorded(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of a call, which is written down unless the result is its argument."""
        refuse_mixed(func, args)
        try:
            out = self.run(func, args, kwargs)
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
                hint="Pass sparse=False to an embedding; keep indices and values of others as two "
                "dense tensors.",
            )
        if func in _SAME or (args and out is args[0]):
            self.vars[id(out)] = self.known(args[0])
            self.alive.append(out)
            return out
        outs = tuple([self.var(t) for t in results])
        known = self.plain(frozen((args, tuple(kwargs.items())), self.known))
        if func in _PHYSICAL and isinstance(args[0], torch.Tensor):  # a number has no bits
            func = _PHYSICAL[func]
        self.calls.append(Call(func, known[0], known[1], outs, self.mark()))
        self.phases.append(phase())
        if func not in _NOT_PINNED:
            self._pinned_by_region(results)
        return out

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of a call, on fake tensors."""
        if self.sizes is None:
            return func(*args, **kwargs)
        with enable_python_dispatcher():  # some kernels take no symbols for sizes
            return func(*args, **kwargs)

    def _pinned_by_region(self, results: Sequence[torch.Tensor]) -> None:
        """Values that the region around pins are, from now on, those of its layout."""
        for tensor in results:
            layout = pin_of_region(tensor)
            if layout is not None:
                v = self.vars[id(tensor)]
                args = (v, repr(layout))
                self.calls.append(Call(CONSTRAIN, args, (), (self.var(tensor),), self.mark()))
                self.phases.append(phase())

    def _with_dtype(self, func: Any, args: Any, kwargs: Any, dtype: torch.dtype) -> Any:
        """The arguments with `dtype`, that of the result, where it comes from the default dtype."""
        operands = tensors_of((args, tuple(kwargs.values())))
        if not _smooth(dtype) or any(_smooth(t.dtype) for t in operands):
            return args, kwargs
        names = [a.name for a in schema_of(func).arguments]
        if "dtype" in names:
            return args, kwargs if len(args) > names.index("dtype") else {**kwargs, "dtype": dtype}
        if operands and (torch.Tag.pointwise in func.tags or func in _PROMOTING):
            return mapped((args, kwargs), lambda t: self._cast(t, dtype))
        return args, kwargs

    def _cast(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return self.__torch_dispatch__(aten._to_copy.default, (), (tensor,), {"dtype": dtype})

    def _drawn(self, drawn: Callable[..., Any], func: Any, args: Any, kwargs: Any) -> Any:
        """The result of a random op, recorded as draws from a key."""
        if kwargs.get("generator") is not None:
            raise TraceError(
                f"{func} draws from a generator, and each rank would draw its own numbers.",
                hint="Leave the generator out, and pass key=random.key(0) in the call.",
            )
        refuse_numbers(func, args)
        args, kwargs = mapped((args, kwargs), self.fake)
        if self.checks is not None:
            args, kwargs = self.checks.within(func, args, kwargs)
        with self:
            return drawn(functools.partial(self.numbers.draw, func), *args, **kwargs)

    def _batch_norm(self, args: Any) -> Any:
        """The result of a batch norm, recorded as an op that returns its new running statistics."""
        if any(self._is_view(t) for t in args[3:5]):  # the write would miss their base
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


def _refuse(func: Any, args: Any) -> None:
    refuse_random(func, args)
    if schema_of(func).is_mutable:
        raise write_error(str(func), *args[:1])
    if packet_name(func).startswith(("quantize_per_", "dequantize")):
        raise TraceError(
            f"{func} is of quantized tensors, and only plain ones are recorded.",
            line=user_line() or "not known",
            hint="fake_quantize_per_tensor_affine gives the same numbers as plain floats.",
        )


def _unmasked(func: Any, args: Any, out: Any) -> Any:
    """The result without outputs that a mask leaves out, as of kernels; fakes may have them."""
    names = [a.name for a in schema_of(func).arguments]
    if "output_mask" not in names or not isinstance(out, (tuple, list)):
        return out
    mask = args[names.index("output_mask")]
    return tuple(t if is_wanted else None for t, is_wanted in zip(out, mask, strict=True))


def _smooth(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex
