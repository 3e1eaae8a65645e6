"""`samples_of`: what torch's database of ops calls an op with, as plain functions of tensors."""

from __future__ import annotations

import functools
import random
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import optree
import torch
from hypothesis import settings

__all__ = ["Sample", "entries", "parts_of", "samples_of"]

UNSET = {
    "empty",
    "empty_like",
    "empty_permuted",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
}
"""Ops whose results have no values, only shapes."""

ANY_OF_EQUALS = {"kthvalue", "median", "mode", "nanmedian", "topk"}
"""Ops that may say any of the places of equal elements: their samples have none."""


@attrs.frozen(eq=False)
class Sample:
    """A plain function of tensors, and tensors to call it with."""

    f: Callable[..., Any]
    tensors: tuple[torch.Tensor, ...]
    text: str
    unset: bool
    """Whether what comes out has no values."""

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the tensors."""
        return tuple(tuple(t.shape) for t in self.tensors)


@functools.cache
def entries(dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """The entries of the database that take a dtype on CPU, by name and variant."""
    before = settings()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    settings.register_profile("before", before)
    settings.load_profile("before")  # the import loads one of torch's own
    found = {}
    for op in op_db:
        if dtype in op.supported_dtypes("cpu"):
            name = f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name
            found[name] = op
    return found


def samples_of(name: str, most: int, dtype: torch.dtype = torch.float32) -> list[Sample]:
    """At most so many samples of an op, of shapes that differ; none where no tensor goes in."""
    op = entries(dtype)[name]
    torch.manual_seed(0)
    found: dict[Any, Sample] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for given in op.sample_inputs("cpu", dtype, requires_grad=False):
            sample = _sample(name, op, given)
            if sample.tensors:
                found.setdefault((sample.shapes, sample.text), sample)
    kept = list(found.values())
    if len(kept) <= most:
        return kept
    first, *rest = kept  # the first is the plain case
    return [first, *random.Random(name).sample(rest, most - 1)] if most else []


def parts_of(sample: Sample) -> list[Sample]:
    """The sample with each of its outputs alone, and with all but each; none where it has one."""
    count = len(_tensors_in(sample.f(*sample.tensors)))
    ones = [(i,) for i in range(count)]
    rests = [tuple(j for j in range(count) if j != i) for i in range(count)]
    chosen = dict.fromkeys([*ones, *(rests if count > 2 else ())])
    return [_part(sample, places) for places in chosen] if count > 1 else []


def _part(sample: Sample, places: Sequence[int]) -> Sample:
    def f(*tensors: torch.Tensor) -> list[torch.Tensor]:
        outs = _tensors_in(sample.f(*tensors))
        return [outs[i] for i in places]

    f.__name__ = sample.f.__name__
    text = f"outputs {', '.join(map(str, places))} of {sample.text}"
    return attrs.evolve(sample, f=f, text=text[:200])


def _tensors_in(out: Any) -> list[torch.Tensor]:
    return [t for t in optree.tree_leaves(out) if isinstance(t, torch.Tensor)]


def _sample(name: str, op: Any, given: Any) -> Sample:
    leaves, spec = optree.tree_flatten(
        (given.input, tuple(given.args), given.kwargs),
        none_is_leaf=True,
    )
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    if any(leaves[i].layout is not torch.strided for i in places):
        places = []  # only dense tensors are distributed
    made = _distinct if op.name in ANY_OF_EQUALS else _rounded
    tensors = tuple(made(leaves[i].detach()) for i in places)

    def f(*given: torch.Tensor) -> Any:
        full = list(leaves)
        for i, t in zip(places, given, strict=True):
            full[i] = t
        first, args, kwargs = optree.tree_unflatten(spec, full)
        return op.op(first, *args, **kwargs)

    f.__name__ = name
    shown = [f"{list(t.shape)}" if isinstance(t, torch.Tensor) else repr(t) for t in leaves]
    return Sample(f, tensors, ", ".join(shown)[:200], op.name in UNSET)


def _distinct(tensor: torch.Tensor) -> torch.Tensor:
    """Small integers in the order of the elements, which differ."""
    return tensor.flatten().argsort().argsort().reshape(tensor.shape).to(tensor.dtype)


def _rounded(tensor: torch.Tensor) -> torch.Tensor:
    """Few binary digits, so that pending terms add up exactly."""
    if tensor.is_complex():
        return torch.complex(_rounded(tensor.real), _rounded(tensor.imag))
    if not tensor.is_floating_point():
        return tensor
    parts, most = {torch.bfloat16: (2, 2), torch.float16: (4, 16)}.get(tensor.dtype, (256, None))
    rounded = (tensor * parts).round() / parts + 0.0  # -0.0 is no sum of terms
    rounded = rounded if most is None else rounded.clamp(-most, most)
    return torch.where(rounded.isfinite(), rounded, tensor)


def float_tensors(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Which have derivatives."""
    return [i for i, t in enumerate(tensors) if t.dtype.is_floating_point or t.dtype.is_complex]
