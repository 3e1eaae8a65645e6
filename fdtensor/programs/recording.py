"""`recorded`: a function of pytrees as a graph, and the structure of its result."""

from __future__ import annotations

import contextlib
import functools
import inspect
import traceback
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any

import attrs
import optree
import torch

from fdtensor.layouts.callsite import user_line, user_line_of, warn_user
from fdtensor.layouts.errors import FallbackWarning, FdtensorError, IndexRangeError, TraceError
from fdtensor.layouts.free_type import FreeType
from fdtensor.layouts.tensor_type import TensorType
from fdtensor.layouts.torch_private import is_functional_tensor
from fdtensor.layouts.tree import argument, flatten_admitting, paths, unflatten
from fdtensor.layouts.words import first_sentence, shown
from fdtensor.ops.graph import Call, Full, Graph
from fdtensor.ops.left_behind import left_behind
from fdtensor.ops.recorder import record
from fdtensor.ops.rewrite import rewritten
from fdtensor.ops.sizes import Sizes
from fdtensor.ops.sources import Sources
from fdtensor.ops.write_errors import AS_BUFFERS
from fdtensor.programs.failure_hints import INSIDE, hint_for, hint_for_torch, instead
from fdtensor.programs.hidden import refuse_hidden

__all__ = ["TENSOR", "Recorded", "filled", "name_of", "recorded", "refuse_no_function"]

TENSOR = object()
"""The mark, among the leaves of a result, of a tensor that the program computes."""


def name_of(f: Callable[..., Any]) -> str:
    """The name of a function, for readers of its program."""
    own: str | None = getattr(f, "__name__", None) or getattr(f, "_name", None)
    if own is None and isinstance(f, functools.partial):
        return name_of(f.func)
    return own or type(f).__name__


def refuse_no_function(f: object) -> None:
    """Raises `TraceError` for what cannot be called, and for a class of modules."""
    if not callable(f):
        raise TraceError(
            f"{shown(f)} is no function.",
            hint="Give a function first, then its arguments: call(f, x), spmd(f)(x), trace(f, x).",
        )
    if inspect.isclass(f) and issubclass(f, torch.nn.Module):
        raise TraceError(
            f"{f.__name__} is a class of modules, and no module.",
            hint=f"Make one first: call({f.__name__}(...), x).",
        )


def filled(
    leaves: Sequence[Any],
    types: Sequence[TensorType | FreeType | None],
    tensors: Iterable[torch.Tensor],
) -> list[Any]:
    """The leaves of arguments, tensors for those with types: one for an object that comes twice."""
    tensors = iter(tensors)
    known: dict[int, torch.Tensor] = {}
    full: list[Any] = []
    for leaf, type in zip(leaves, types, strict=True):
        if type is None:
            full.append(leaf)
        elif leaf is None or leaf is type:  # equal types, one object, stand for any two tensors
            full.append(next(tensors))
        else:
            full.append(known.setdefault(id(leaf), next(tensors)))
    return full


@attrs.frozen(eq=False)
class Recorded:
    """The graph of a function of pytrees, and the pytree of its results."""

    graph: Graph
    out_tree: optree.PyTreeSpec
    statics: tuple[Any, ...]
    """The leaves of the result, with `TENSOR` for each that is computed."""
    new: tuple[int, ...]
    """The numbers of the tensors that require grad but depend on no argument."""
    tracked: bool
    """Whether autograd follows a result, apart from leaves that the function creates."""


# what one recording needs, and what is known when it ends
def recorded(
    f: Callable[..., Any],
    spec: optree.PyTreeSpec,
    leaves: Sequence[Any],
    types: Sequence[TensorType | FreeType | None],
    device: str | torch.device = "cpu",
    requires_grad: Sequence[bool] = (),
    checks: bool = False,
    sizes: Sizes | None = None,
) -> Recorded:
    """The graph of a function of pytrees, and the pytree of its results.

    With `sizes` it has `Computed` for numbers that depend on them, and is one for a template.
    """
    __tracebackhide__ = True
    result: list[Any] = []

    def flat(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        args, kwargs = unflatten(spec, filled(leaves, types, tensors))
        out, tree = flatten_admitting(f(*args, **kwargs))
        out = [_full(o) for o in out]
        refuse_hidden(name_of(f), out)
        results = [o for o in out if isinstance(o, torch.Tensor)]
        taken = {id(t) for t in tensors}
        followed = [i for i, o in enumerate(results) if o.requires_grad and id(o) not in taken]
        new = tuple([i for i in followed if results[i].is_leaf])
        created = [i for i in new if is_functional_tensor(results[i])]
        statics = tuple([TENSOR if isinstance(o, torch.Tensor) else o for o in out])
        statics = statics if sizes is None else tuple(map(sizes.plain, statics))
        result[:] = [tree, statics, new, followed != created]
        return results

    fulls = [Full(t.shape, t.dtype) for t in types if t is not None]
    record_these = functools.partial(
        record,
        device=device,
        requires_grad=requires_grad,
        mark=Sources().mark,
        checks=checks,
        of_caller=True,
        sizes=sizes,
        lost=functools.partial(_tell_lost, f, spec, types),
    )
    with _told(f, spec, types), left_behind() as left:
        graph = record_these(flat, fulls)
    for text in left.told(name_of(f), user_line() or "not known"):
        warn_user(text, FallbackWarning)
    return Recorded(graph if sizes is not None else rewritten(graph), *result)


def _full(leaf: Any) -> Any:
    """A leaf of the result; of a DTensor inside of the function, the full tensor."""
    full = getattr(leaf, "traced", None)
    return full if isinstance(full, torch.Tensor) else leaf


@contextlib.contextmanager
def _told(
    f: Callable[..., Any], spec: optree.PyTreeSpec, types: Sequence[TensorType | FreeType | None]
) -> Generator[None]:
    """A context in which what a function raises names the line of the user, and the types."""
    __tracebackhide__ = True
    try:
        yield
    except FdtensorError as error:
        error.facts.setdefault("line", _line_of(error))
        error.hint = hint_for_torch(f, error.hint)
        raise
    except (RuntimeError, TypeError, IndexError, AttributeError) as error:
        nested = _raised_below(error, "/torch/nested/")
        if isinstance(error, AttributeError) and not nested:
            if error.name in OF_RECORDS and isinstance(error.obj, torch.Tensor):
                raise _plain_inside(f, error) from error
            raise
        if nested:
            raise TraceError(
                f"{name_of(f)} makes nested tensors, and only plain ones are recorded.",
                hint="Write it with the values and the offsets as two tensors, or padded.",
            ) from error
        told = instead(error)
        if told is not None:
            sentence = f"{name_of(f)} {told[0]}."
            raise TraceError(sentence, line=_line_of(error), hint=told[1]) from error
        raise _failure(f, spec, types, error) from error
    except (AssertionError, ValueError) as error:
        by_torch = isinstance(error, ValueError) and _raised_by_torch(error)
        if not by_torch and not _of_control_flow(error):
            raise
        raise _failure(f, spec, types, error) from error


def _failure(
    f: Callable[..., Any],
    spec: optree.PyTreeSpec,
    types: Sequence[TensorType | FreeType | None],
    error: Exception,
) -> TraceError | IndexRangeError:
    """The error for a function that fails on full tensors of these types."""
    facts = {name: t for name, t in zip(_names(spec), types, strict=True) if t is not None}
    text, line = first_sentence(error), _line_of(error)
    if _of_control_flow(error):
        return TraceError(
            f"{name_of(f)} gives a DTensor to a function of torch that takes plain tensors only.",
            **facts,
            line=line,
            hint="Where torch.cond or while_loop stands in f, write fd.spmd(torch.func.grad(f)), "
            "in which f gets tensors of torch, and not fd.func.grad(f).",
        )
    kind = IndexRangeError if isinstance(error, IndexError) else TraceError
    return kind(
        f"{name_of(f)} fails on these types: {text}.",
        **facts,
        line=line,
        hint=hint_for(text, of_library=_raised_below(error, "/torch/_library/")),
    )


def _names(spec: optree.PyTreeSpec) -> list[str]:
    """How each leaf of the arguments is called in errors."""
    return list(map(argument, paths(spec, "args")))


def _tell_lost(
    f: Callable[..., Any],
    spec: optree.PyTreeSpec,
    types: Sequence[TensorType | FreeType | None],
    writers: Mapping[int, Call],
) -> None:
    """Says that what is written to arguments is lost; raises where the caller cannot return it.

    That is so for a function of torch itself, such as `batch_norm` with running statistics.
    """
    if not writers:
        return
    given = [name for name, t in zip(_names(spec), types, strict=True) if t is not None]
    names, call = ", ".join(given[i] for i in writers), next(iter(writers.values()))
    sentence = f"{name_of(f)} writes to {names}, and what it writes is lost: arguments never change"
    line = getattr(call.mark, "line", None) or user_line() or "not known"
    while isinstance(f, functools.partial):
        f = f.func
    of_torch = (getattr(f, "__module__", None) or "").partition(".")[0] == "torch"
    if of_torch and f is not torch.func.functional_call:  # whose module is of the user
        raise TraceError(
            f"{sentence}.",
            line=line,
            hint="Call it in a function that returns the new values too, or leave out what it "
            "writes to: running statistics may be None.",
        )
    cure = (
        AS_BUFFERS if getattr(call.mark, "module", "") else "Return it too, or write to a clone()."
    )
    warn_user(f"{sentence} ({line}). {cure}", FallbackWarning)


def _line_of(error: BaseException) -> str:
    """The line of the user where a function fails, or that which calls it."""
    return user_line_of(error) or user_line() or "not known"


def _of_control_flow(error: Exception) -> bool:
    """Whether control flow of torch refuses a DTensor, for which it has no place."""
    return INSIDE in str(error) and _raised_below(error, "/torch/_higher_order_ops/")


def _plain_inside(f: Callable[..., Any], error: AttributeError) -> TraceError:
    """The error for a function that takes its arguments for DTensors."""
    return TraceError(
        f"{name_of(f)} asks a tensor for {error.name!r}, which only a DTensor has.",
        line=_line_of(error),
        hint="A traced function computes with full tensors of torch: constrain(x, layout) pins a "
        "layout inside, out_layouts those of results; redistribute and full() come outside.",
    )


OF_RECORDS = ("comm", "full", "local", "mesh", "plan_to", "redistribute", "to_local")
"""What a DTensor has, and no tensor of torch."""


def _raised_by_torch(error: BaseException) -> bool:
    """Whether it is a file of torch that raises, and not a function that it calls."""
    return "/torch/" in _files(error)[-1]


def _raised_below(error: BaseException, folder: str) -> bool:
    """Whether an error comes from a file below this folder."""
    return any(folder in file for file in _files(error))


def _files(error: BaseException) -> list[str]:
    """The files that an error has come through, the one that raised it last."""
    return [f.filename.replace("\\", "/") for f in traceback.extract_tb(error.__traceback__)]
