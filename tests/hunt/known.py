"""Failures that are known and open: a pattern of their signature, and a sentence about each."""

from __future__ import annotations

__all__ = ["KNOWN"]

KNOWN: dict[str, str] = {
    r"has internal overlap|mutation on a view chain": "Functionalization refuses these writes.",
    r"Output size is too small": "Torch's own shapes refuse a transposed convolution to size 0.",
    r"with max pending is not linear|with min pending": "A pending max has no derivative.",
    r"derivative for .* is not implemented": "It is refused before the backward is asked for.",
    r"DataDependentError of DataDependentOutputException": "A backward that depends on data.",
    r"InferenceMode::is_enabled|^poisoned: .*quantile": (
        "Torch fails in the jvp of quantile below functionalization."
    ),
    r"^shape: shuffle": "The kernel of pixel_unshuffle gives empty tensors another shape.",
    r"^error KeyError: #": "A write through flatten of overlapping windows of unfold.",
    r"cond must be a bool": "Torch's own shapes refuse to interpolate an empty tensor.",
    r"^value: .*part_scattered.* unfold": "Torch writes to windows of unfold that overlap.",
    r"^dtype: .*linalg": "pinv under autocast: torch casts the products inside of the kernel.",
    r"index of one_hot, # to #": "Under vmap torch's one_hot looks at no values.",
    r"running statistics that are views": "Batch norm under vmap writes to views.",
    r"several elements share one place": "Writes to what expand gave are refused.",
    r"expected scalar type .*but found": "Torch's own shapes refuse a product of no integers.",
    r"Subtraction, the `-` operator": "A write to an expanded bool tensor.",
}
"""A test that meets one of these is skipped, with its sentence."""
