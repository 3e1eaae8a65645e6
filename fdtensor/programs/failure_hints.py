"""`hint_for`: what to do about what torch says of a function that fails while it is recorded."""

from __future__ import annotations

import re

from fdtensor.layouts.words import near

__all__ = ["INSIDE", "hint_for"]

INSIDE = "inside of a traced function"
"""How a DTensor that stands for a full tensor is printed."""

OPTIONS = (
    *("out_layouts", "regather", "on_missing_rule", "on_data_dependent", "plain", "check"),
    *("check_indices", "reduce_dtype", "max_bytes", "as_if", "cost", "mesh"),
    *("choice", "deterministic", "dynamic"),
)
"""The names of options that stand beside the arguments of a function."""


def hint_for(text: str) -> str:
    """What to do about an error of torch with this text."""
    return _misspelled(text) or _hooked(text) or _without_context(text) or _on_full_tensors(text)


def _misspelled(text: str) -> str:
    """A hint for an argument that no function has, where an option of this library is near."""
    unknown = re.search(r"unexpected keyword argument '(\w+)'|(\w+)=\w+\)$", text)
    meant = near(unknown[1] or unknown[2], OPTIONS) if unknown else ""
    return f"{meant}It is an option of spmd, call and trace, and no argument." if meant else ""


def _hooked(text: str) -> str:
    """A hint for `checkpoint` in a derivative of torch.func, which does not take its hooks."""
    if "saved tensor hooks" not in text:
        return ""
    return (
        "torch.utils.checkpoint stands where the loss calls backward(), or in torch.autograd.grad: "
        "write it so inside of the traced function."
    )


def _without_context(text: str) -> str:
    """A hint for an `autograd.Function` of the old form, of which torch.func takes none."""
    if "setup_context" not in text:
        return ""
    return (
        "Write forward(x) without ctx, and setup_context(ctx, inputs, output) beside it; or take "
        "the gradient by backward() or torch.autograd.grad, which need none."
    )


def _on_full_tensors(text: str) -> str:
    """A hint for a function that fails as it would in one process, or on a DTensor by itself."""
    if INSIDE in text:
        return (
            "A function of fd.func gets DTensors, and this one of torch takes tensors alone: write "
            "fd.spmd(torch.func.grad(f)), in which f gets tensors of torch."
        )
    return "It gets full tensors of these shapes: see whether it takes such in one process."
