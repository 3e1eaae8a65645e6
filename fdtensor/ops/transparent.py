"""`transparent`: the context in which a function is recorded, so that no op is hidden."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import optree
import torch
from torch.masked import MaskedTensor
from torch.overrides import TorchFunctionMode

from fdtensor.layouts.callsite import torch_line, user_line
from fdtensor.layouts.dtypes import dtype_name
from fdtensor.layouts.errors import DataDependentError, TraceError
from fdtensor.layouts.torch_private import (
    FAKES_LOG,
    TENSOR_TYPE,
    FakeTensor,
    HigherOrderOperator,
    as_if_compiling,
    at_import_of_compiler,
    folding,
    is_functional_tensor,
    is_functorch_wrapped_tensor,
    onednn_enabled,
    packet_name,
    qualified_name_or,
    recorded_saving_hooks,
    schema_of,
    set_onednn_enabled,
    without_saving_hooks,
    without_validation,
)
from fdtensor.ops.again import recomputed
from fdtensor.ops.parts import refuse_old
from fdtensor.ops.torch_refusal import tensors_in_arguments
from fdtensor.ops.writes import checked_write

__all__ = [
    "ALONE",
    "checks_nans",
    "has_values",
    "needs_values",
    "recorded_as",
    "recording",
    "transparent",
]

ALONE = threading.RLock()
"""Held while a function is recorded: what is set for that is set for all threads."""


class _Depth(threading.local):
    """How many functions are being recorded in this thread, one inside of the other."""

    count = 0


_DEPTH = _Depth()


def recording() -> bool:
    """Whether a function is being recorded, in this thread."""
    return _DEPTH.count > 0


def needs_values(func: Any, args: Any) -> DataDependentError:
    """The error for a call whose result is no function of shapes and dtypes alone."""
    name = func.__name__ if func in _READS else packet_name(func)
    operand = next((t for t in args if isinstance(t, torch.Tensor)), None)
    type = "a tensor" if operand is None else _type_text(operand)
    if func is _ITEM:
        sentence = f"{type} is asked for its value, by .item(), float(), if or the like"
    elif func in _READS or not schema_of(func).returns[0].type.isSubtypeOf(TENSOR_TYPE):
        sentence = f"{name} reads the values of {type}"
    else:
        sentence = f"the shape of what {name} gives depends on the values of {type}"
    asking = torch_line()
    return DataDependentError(
        f"{sentence}, which a traced function does not know.",
        line=user_line() or "not known",
        **({"inside": asking} if asking else {}),
        hint=_OF_DISTRIBUTIONS if "/distributions/" in (asking or "") else _OF_VALUES,
    )


_OF_VALUES = (
    "Use torch.where, masks or sizes that are known, or return the tensor and look at it "
    'outside; `call` and spmd(f, on_data_dependent="replicate") run all of it on replicas.'
)

_OF_DISTRIBUTIONS = (
    "Leave out validate_args=True: by default a distribution in a traced function checks no values."
)


_ITEM = torch.ops.aten._local_scalar_dense.default


def _type_text(tensor: torch.Tensor) -> str:
    """A tensor in the notation of types: `f32[8,16]`."""
    return f"{dtype_name(tensor.dtype)}[{','.join(map(str, tensor.shape))}]"


@contextlib.contextmanager
def transparent(of_caller: bool) -> Iterator[None]:
    """A context without fused ops that no rule describes, such as whole encoder layers and LSTMs.

    To a function `of_caller`, `torch.compiler.is_compiling()` is true: libraries then leave out
    warnings and shortcuts that read values.
    """
    _DEPTH.count += 1
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    log = logging.getLogger(FAKES_LOG)
    quiet, log.disabled = log.disabled, True  # it prints every error, which is raised too
    onednn = onednn_enabled()
    set_onednn_enabled(False)
    try:
        with (
            as_if_compiling(of_caller),
            without_validation(),
            _Plain(),
            _as_written(),
            _without_masked(),
            _without_nan_checks(),
            folding(),
            without_saving_hooks(),
            recorded_saving_hooks(recomputed),
        ):
            yield
    finally:
        set_onednn_enabled(onednn)
        log.disabled = quiet
        torch.backends.mha.set_fastpath_enabled(fast)
        _DEPTH.count -= 1


@contextlib.contextmanager
def _as_written() -> Iterator[None]:
    """A context in which compiled functions run op by op, so that they are recorded.

    `torch.cond` compiles too, and may be the first to import the compiler, which takes seconds.
    """
    with contextlib.ExitStack() as stack:

        def run_op_by_op() -> None:
            stack.enter_context(torch.compiler.set_stance("force_eager"))

        with at_import_of_compiler(run_op_by_op):
            yield


def checks_nans() -> bool:
    """Whether autograd's anomaly mode looks for nans in gradients."""
    return torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()


def _without_nan_checks() -> Any:
    """A context in which anomaly mode looks at no values: what is recorded has none."""
    if not checks_nans():
        return contextlib.nullcontext()
    return torch.autograd.set_detect_anomaly(True, check_nan=False)


@contextlib.contextmanager
def _without_masked() -> Iterator[None]:
    """A context that refuses MaskedTensors, which crash the process around a recorded tensor."""

    def refuse(*_: Any, **__: Any) -> None:
        raise TraceError(
            "a MaskedTensor is made, and only plain tensors are recorded.",
            line=user_line() or "not known",
            hint="Write it with the values and the mask as two tensors, by torch.where.",
        )

    kind: Any = MaskedTensor
    before = kind.__new__
    kind.__new__ = refuse
    try:
        yield
    finally:
        kind.__new__ = before


_RECORDED_AS: dict[Any, Any] = {}


def recorded_as(*functions: Any) -> Callable[[Callable], Callable]:
    """Registers the decorated function, which is recorded in place of these functions.

    Ops of libraries that may not be installed are given by name.
    """

    def register(f: Callable) -> Callable:
        _RECORDED_AS.update(dict.fromkeys(functions, f))
        return f

    return register


def control_flow(op: Any) -> Callable[..., Any] | None:
    """What is recorded in place of an op that takes functions; None for anything else."""
    return _RECORDED_AS.get(op) if isinstance(op, HigherOrderOperator) else None


@recorded_as(torch.Tensor.__deepcopy__)
def _deep_copy(tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    """A copy of a tensor, as by `copy.deepcopy`; raises as torch does for one that is no leaf."""
    if id(tensor) not in memo:
        if not tensor.is_leaf:
            raise RuntimeError("Only Tensors created explicitly by the user support deepcopy.")
        memo[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    return memo[id(tensor)]


_READS = {torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__, torch.Tensor.data_ptr}


def has_values(tensor: torch.Tensor) -> bool:
    """Whether a tensor has values: it is neither a fake nor a wrapper of one."""
    wrapped = is_functional_tensor(tensor) or is_functorch_wrapped_tensor(tensor)
    return not wrapped and not isinstance(tensor, FakeTensor)


def _refuse_copied(func: Any, args: Any) -> None:
    """Refuses `torch.tensor` of lists with tensors, which it reads one by one."""
    if func not in _COPIES or not args or not isinstance(args[0], (list, tuple)):
        return
    tensors = [t for t in optree.tree_leaves(args[0]) if isinstance(t, torch.Tensor)]
    if not all(map(has_values, tensors)):
        raise DataDependentError(
            f"torch.{func.__name__} of a list reads the values of its tensors, which a traced "
            "function does not know.",
            line=user_line() or "not known",
            hint=f"Write torch.stack([...]), which has derivatives too, for torch.{func.__name__}"
            "([...]).",
        )


_COPIES = {torch.tensor, torch.as_tensor, torch.asarray}


def _refuse_fused(func: Any) -> None:
    """Refuses the steps of fused optimizers, which functionalization supports in some cases."""
    name = getattr(func, "__name__", "").partition(".")[0]
    if name.startswith("_fused_") and name.endswith("_"):
        raise TraceError(
            f"{name} steps all parameters of an optimizer in one kernel, and is not recorded.",
            line=user_line() or "not known",
            hint="Take the optimizer of fdtensor.optim, or one of torch.optim with fused=False.",
        )


class _Plain(TorchFunctionMode):
    """Replaces functions that read values by others, and raises where values are asked for."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS and args and not has_values(args[0]):
            raise needs_values(func, args)
        name = qualified_name_or(func)
        _refuse_fused(func)
        _refuse_copied(func, args)
        refuse_old(tensors_in_arguments((args, kwargs)))
        replacement = _RECORDED_AS.get(func, _RECORDED_AS.get(name))
        if replacement is not None:
            for kind in types:
                if not issubclass(kind, torch.Tensor):  # it calls the function on what it wraps
                    with self:
                        return kind.__torch_function__(func, types, args, kwargs or {})
            if isinstance(func, HigherOrderOperator):
                with self:  # its functions run here too
                    return replacement(*args, **(kwargs or {}))
            return replacement(*args, **(kwargs or {}))
        return checked_write(func, args, kwargs or {})
