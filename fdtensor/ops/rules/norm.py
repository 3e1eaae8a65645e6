"""Normalizations: each slice has a mean and a deviation, and a cut between slices leaves all whole.

A cut of a dim that is averaged over needs sums of all blocks: see `ops.decompositions`.

    native_layer_norm   `out[i, j] = xhat[i, j] * weight[j] + bias[j]`
                        `xhat[i, j] = (x[i, j] - mean_j x[i, j]) * rstd[i]`
    _fused_rms_norm     `out[i, j] = x[i, j] * rstd[i] * weight[j]`
    native_group_norm   `out[n, g, c] = xhat[n, g, c] * weight[g, c] + bias[g, c]`
                        `xhat[n, g, c] = (x[n, g, c] - mean_c x[n, g, c]) * rstd[n, g]`
    batch norms         `out[n, c] = (x[n, c] - mean[c]) * invstd[c] * weight[c] + bias[c]`
    their backward      `dweight[j] = sum_i grad[i, j] * xhat[i, j], dbias[j] = sum_i grad[i, j]`
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import prod
from typing import Any

import torch

from fdtensor.layouts.torch_private import schema_of
from fdtensor.ops.graph import Full
from fdtensor.ops.notation.core import P, R, S, Units
from fdtensor.ops.notation.each import each
from fdtensor.ops.notation.empty import never_empty
from fdtensor.ops.notation.ops import overloads

aten = torch.ops.aten

Cuts = Callable[[Any, dict[str, Any]], Iterable[tuple[Any, Any, Any]]]
"""The cuts of an op and its arguments: of inputs and gradients, of statistics, of parameters."""


def of_layers(op, named):
    """Leading dims `i`."""
    for d in range(named["input"].ndim - len(named["normalized_shape"])):
        yield S(d), S(d), R


def of_groups(op, named):
    """Images, and whole groups of channels."""
    if named["input"].numel:
        per = named["C"] // named["group"]
        yield S(0), S(0), R
        yield Units(1, per), S(1), Units(0, per)


def of_batches(op, named):
    """Channels; where the statistics are operands, also every other dim."""
    yield S(1), S(0), S(0)
    trains = all(named.get(flag, True) for flag in ("training", "train", "update"))
    if op is aten._batch_norm_no_update.default:
        trains = named["running_mean"] is None
    for d in range(0 if trains else named["input"].ndim):
        if d != 1:
            yield S(d), R, R


def _on_groups(op: Any) -> Any:
    """The kernel with the sizes of a block: N, C, HxW and the number of its groups."""
    x_at = 0 if op is aten.native_group_norm.default else 1

    def sized(*args):
        tensors = [t.contiguous() if isinstance(t, torch.Tensor) else t for t in args[:-5]]
        per = args[-4] // args[-2]
        shape = tensors[x_at].shape
        return op(*tensors, shape[0], shape[1], prod(shape[2:]), shape[1] // per or 1, args[-1])

    return sized


GRADS = {"grad_out", "grad_output"}
"""The names of the gradient of the output in schemas."""

PARAMETERS = ("weight", "bias")


def _normalization(cuts: Cuts, names: str) -> None:
    def rows(op, named):
        """The cuts, and sums: of gradients, of a weight, of weight and bias together."""
        tensors = [name for name, t in named.items() if isinstance(t, Full)]
        width = len(schema_of(op).returns)
        mask = named.get("output_mask", (True,) * width)

        def row(ins, others, *outs):
            before = tuple(ins.get(name, others) for name in tensors)
            return before, tuple(
                out for out, wanted in zip(outs[:width], mask, strict=True) if wanted
            )

        back = not GRADS.isdisjoint(tensors)
        for x, statistic, parameter in cuts(op, named):
            total = P if parameter == R else parameter
            outs = (total, total) if back else [statistic] * (width - 1)
            ins = {"input": x, **dict.fromkeys(GRADS, x), **dict.fromkeys(PARAMETERS, parameter)}
            yield row(ins, statistic, x, *outs)
        if back:
            yield row(dict.fromkeys(GRADS, P), R, P, P, P)
        if "weight" in tensors:
            yield row(
                dict.fromkeys(["weight"] if back else PARAMETERS, P), R, P, *[R] * (width - 1)
            )

    for op in overloads(names):
        each(op, local=never_empty(_on_groups(op) if cuts is of_groups else op))(rows)


_normalization(
    of_layers,
    "native_layer_norm native_layer_norm_backward _fused_rms_norm _fused_rms_norm_backward",
)
_normalization(of_groups, "native_group_norm native_group_norm_backward")
_normalization(
    of_batches,
    """
    native_batch_norm _native_batch_norm_legit_functional _native_batch_norm_legit.no_stats
    _batch_norm_with_update_functional _batch_norm_no_update cudnn_batch_norm
    native_batch_norm_backward batch_norm_backward cudnn_batch_norm_backward
    """,
)
