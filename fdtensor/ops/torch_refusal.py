"""`refuse_overlap` and others: raise for writes as torch does, where functionalization does not.

Torch itself is run, on twins of the tensors: of few elements, with the same fault.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import optree
import torch

from fdtensor.ops.overlap import is_expanded, overlap_partly

__all__ = ["dtypes_of", "refuse_cast", "refuse_out", "refuse_overlap", "tensors_in_arguments"]

FEW = 2**16
"""The most elements of twins that have values; with more they are on the meta device."""

_NO_CAST = (
    "can't be cast",
    "cannot be converted",
    "out tensor",
    "dtype",
    "scalar type",
    "out type",
    "only supports",
    "result tensor",
    "the same type as",
)


def refuse_cast(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Raises what torch raises where the first argument cannot take the result in place."""
    if _may_need_a_cast(args[0], args[1:], kwargs):
        _raise(_error_of(func, args, kwargs, _of_one), _NO_CAST)


def refuse_out(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Raises what torch raises where the tensors of `out=` cannot take the result."""
    if tensors_in_arguments(kwargs["out"]):
        _raise(_error_of(func, args, kwargs, _twins(args, kwargs)), _NO_CAST)


def dtypes_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.dtype]:
    """The dtypes of what a function gives, by torch; none where it fails on ones."""
    result, _ = _answer(func, args, kwargs, _twins(args, kwargs))
    return [t.dtype for t in tensors_in_arguments(result)]


def refuse_overlap(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Raises what torch raises where the first argument shares memory that a write to it needs."""
    target, others = args[0], tensors_in_arguments((args[1:], kwargs))
    across = [t for t in others if overlap_partly(target, t)]
    if not across and not is_expanded(target):
        return
    memory = functools.cache(lambda: torch.ones(3, dtype=target.dtype))

    def twin(t: torch.Tensor) -> torch.Tensor:
        if t is target:
            return memory()[1:] if across else memory()[:1].expand(2)
        if any(t is other for other in across):
            return memory()[:-1]
        return torch.ones(2, dtype=t.dtype)

    _raise(_error_of(func, args, kwargs, twin), ("single memory location",))


def _may_need_a_cast(target: torch.Tensor, others: Any, kwargs: Any) -> bool:
    """Whether a result may have another dtype than the tensor that takes it."""
    if not (target.is_floating_point() or target.is_complex()):
        return True
    if any(t.dtype is not target.dtype for t in tensors_in_arguments((others, kwargs))):
        return True
    numbers = [leaf for leaf in _leaves((others, kwargs)) if isinstance(leaf, (float, complex))]
    most = torch.finfo(target.dtype).max
    return any(isinstance(n, complex) or most < abs(n) < float("inf") for n in numbers)


def _error_of(
    func: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    twin: Callable[[torch.Tensor], torch.Tensor],
) -> BaseException | None:
    """The error of torch for twins of the tensors."""
    return _answer(func, args, kwargs, twin)[1]


def _answer(
    func: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    twin: Callable[[torch.Tensor], torch.Tensor],
) -> tuple[Any, BaseException | None]:
    """What torch gives or raises for twins of the tensors, in a thread, where no mode is active."""
    given: list[Any] = []
    raised: list[BaseException] = []
    whole: Any = (tuple(args), kwargs)

    def ask() -> None:
        def of(leaf: Any) -> Any:
            return twin(leaf) if isinstance(leaf, torch.Tensor) else leaf

        try:
            with warnings.catch_warnings(), torch.random.fork_rng(devices=()):
                warnings.simplefilter("ignore")
                twins, named = optree.tree_map(of, whole, none_is_leaf=True)
                given.append(func(*twins, **named))
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    return (given[0] if given else None), (raised[0] if raised else None)


def _raise(error: BaseException | None, texts: Sequence[str]) -> None:
    """Raises the error if it has one of these texts; twins may raise others."""
    known = isinstance(error, (RuntimeError, TypeError))
    if known and any(text in str(error) for text in texts):
        raise type(error)(str(error)) from None


def _twins(args: Any, kwargs: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Twins of the shapes of tensors: with values, if there are few."""
    few = sum(t.numel() for t in tensors_in_arguments((args, kwargs))) <= FEW
    return _of_ones if few else _without_values


def _of_one(t: torch.Tensor) -> torch.Tensor:
    return torch.ones((1,) * t.ndim, dtype=t.dtype)


def _of_ones(t: torch.Tensor) -> torch.Tensor:
    return torch.ones(t.shape, dtype=t.dtype)


def _without_values(t: torch.Tensor) -> torch.Tensor:
    return torch.empty(t.shape, dtype=t.dtype, device="meta")


def _leaves(tree: Any) -> list[Any]:
    return optree.tree_leaves(tree, none_is_leaf=True)


def tensors_in_arguments(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in _leaves(tree) if isinstance(leaf, torch.Tensor)]
