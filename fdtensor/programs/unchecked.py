"""`refuse_unchecked`: refuses lines whose operands the kernels of torch take without a look.

A program that comes from outside could read and write memory with them that it does not own.
Operands that a forward saves for its backward are such: shapes follow from the other operands, and
indices into an image must come from the pooling that made them, of an image of that size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fdtensor.layouts.errors import TraceError
from fdtensor.layouts.torch_private import packet_name, schema_of
from fdtensor.ops.graph import Call, Full, Var
from fdtensor.ops.notation.core import rule_of
from fdtensor.ops.rows import arguments
from fdtensor.programs.eqn import Eqn

__all__ = ["refuse_unchecked"]

Shapes = Mapping[str, Any]
"""The arguments of a call by name, with a `Full` for each tensor."""


def refuse_unchecked(call: Call, fulls: Mapping[Var, Full], makers: Mapping[Var, Eqn]) -> None:
    """Raises `TraceError` for a call whose kernel would trust what it must not."""
    name, op = packet_name(call.op), call.op
    internal = name.startswith("_") or name.endswith("backward")
    if name in _TRUSTING or (op.namespace == "aten" and internal and _is_unruled(call)):
        raise TraceError(f"{op} trusts its operands, and nothing says that they are right.")
    given, kwargs = arguments(call, fulls.__getitem__)
    by_place = [a.name for a in schema_of(op).arguments if not a.kwarg_only]
    named = {**dict(zip(by_place, given, strict=True)), **kwargs}
    if op.namespace == "aten" and named.get("reduction", 0) not in (0, 1, 2):
        raise TraceError(f"{op} has no reduction {named['reduction']}.")
    fits = _FITS.get(name)
    if fits is not None and not fits(named):
        raise TraceError(f"{op} gets operands whose shapes do not fit each other.")
    if name in _POOLS and not _pooled(call, name, fulls, makers):
        raise TraceError(f"{op} gets indices that are not those of a pooling of its operand.")


_TRUSTING = (
    *("_embedding_bag_backward", "_embedding_bag_dense_backward"),
    *("_embedding_bag_per_sample_weights_backward", "_segment_reduce_backward", "segment_reduce"),
)
"""Ops that trust values which nothing in a program says anything about."""


def _is_unruled(call: Call) -> bool:
    return rule_of(call.op) is None and not packet_name(call.op).startswith(_SAFE)


_SAFE = ("_linalg", "_fft", "_foreach", "_efficientzerotensor", "_pdist_forward")
"""How the names of internal ops begin that look at their operands, though no rule is theirs."""


# --- shapes ------------------------------------------------------------------------------------


def _are(shape: tuple[int, ...], *operands: Full | None) -> bool:
    return all(x is None or tuple(x.shape) == shape for x in operands)


def _normalized(a: Shapes) -> bool:
    """Statistics of rows: one for each, with 1 in place of the dims that are normalized."""
    shape, dims = tuple(a["input"].shape), tuple(a["normalized_shape"])
    whole = shape[: len(shape) - len(dims)] + (1,) * len(dims)
    return (
        shape[len(shape) - len(dims) :] == dims
        and _are(shape, a["grad_out"])
        and _are(whole, a.get("mean"), a["rstd"])
        and _are(dims, a["weight"], a.get("bias"))
    )


def _by_channel(a: Shapes) -> bool:
    """Statistics and parameters of channels; what is saved may be empty in evaluation."""
    image = a.get("input", a.get("self"))
    if image is None or image.ndim < 2:
        return False
    channels = (image.shape[1],)
    own = [a.get(n) for n in ("weight", "bias", "running_mean", "running_var")]
    saved = [a.get(n) for n in ("save_mean", "save_invstd", "save_var")]
    kept = [x for x in saved if x is not None and (a.get("train", True) or tuple(x.shape) != (0,))]
    grad = a.get("grad_out", a.get("grad_output"))
    return _are(channels, *own, *kept) and _are(tuple(image.shape), grad)


def _attended(a: Shapes) -> bool:
    """`out[b, h, s, e]` of `query[b, h, s, d]`, `key[b, h, t, d]` and `value[b, h, t, e]`."""
    query, key, value = a["query"], a["key"], a["value"]
    if not query.ndim == key.ndim == value.ndim == 4:
        return False
    (*batch, s, d), (*_, t, _), e = query.shape, key.shape, value.shape[3]
    mask = a.get("attn_mask")
    sizes = (*batch, s, t)
    if mask is not None:
        around = zip(reversed(mask.shape), reversed(sizes), strict=False)
        if mask.ndim > 4 or any(m not in (1, n) for m, n in around):
            return False
    saved = [x for x in (a.get("out"), a.get("grad_out")) if x is not None]
    alike = all(x.dtype == query.dtype for x in (key, value, *saved))
    logs = a.get("logsumexp")
    return (
        alike
        and _are((*batch, t, d), key)
        and _are((*batch, t, e), value)
        and _are((*batch, s, e), *saved)
        and _are((*batch, s), logs)
    )


_FITS: Mapping[str, Callable[[Shapes], bool]] = {
    "native_layer_norm_backward": _normalized,
    "_fused_rms_norm_backward": _normalized,
    **dict.fromkeys(
        (
            *("native_batch_norm", "native_batch_norm_backward", "_native_batch_norm_legit"),
            *("_native_batch_norm_legit_no_training", "batch_norm_backward", "cudnn_batch_norm"),
            *("cudnn_batch_norm_backward", "_batch_norm_no_update"),
        ),
        _by_channel,
    ),
    "_scaled_dot_product_flash_attention_for_cpu": _attended,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attended,
    "_cdist_backward": lambda a: _are(tuple(a["grad"].shape), a["cdist"]),
    "_pdist_backward": lambda a: _are(tuple(a["grad"].shape), a["pdist"]),
}
"""Whether the shapes of what a kernel takes fit each other."""


# --- indices of poolings -----------------------------------------------------------------------

_POOLS = {
    "max_pool2d_with_indices_backward": ("max_pool2d_with_indices", 2),
    "max_pool3d_with_indices_backward": ("max_pool3d_with_indices", 3),
    "adaptive_max_pool2d_backward": ("adaptive_max_pool2d", 2),
    "adaptive_max_pool3d_backward": ("adaptive_max_pool3d", 3),
}
"""The pooling whose indices a backward takes, and how many dims an image has."""

_MOVES = {
    *("alias", "clone", "reshape", "view", "_unsafe_view", "expand", "permute", "transpose"),
    *("unsqueeze", "squeeze", "slice", "select", "contiguous", "detach", "movedim"),
}
"""Ops that give values of their operand elsewhere, and no others."""


def _pooled(call: Call, name: str, fulls: Mapping[Var, Full], makers: Mapping[Var, Eqn]) -> bool:
    """Whether the indices are those that the pooling gave for an image of this size."""
    pooling, dims = _POOLS[name]
    args, _ = arguments(call, lambda v: v)
    names = [a.name for a in schema_of(call.op).arguments]
    image, indices = (args[names.index(n)] for n in ("self", "indices"))
    maker = makers.get(indices)
    while maker is not None and (maker.steps or packet_name(maker.call.op) in _MOVES):
        indices = maker.ins[maker.outs.index(indices) if maker.steps else 0]
        maker = makers.get(indices)
    if maker is None or packet_name(maker.call.op) != pooling or indices != maker.outs[1]:
        return False
    return fulls[maker.ins[0]].shape[-dims:] == fulls[image].shape[-dims:]
