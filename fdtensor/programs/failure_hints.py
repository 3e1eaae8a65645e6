"""What to do about what torch says of a function that fails while it is recorded."""

from __future__ import annotations

import re
from typing import Any

import torch

from fdtensor.layouts.torch_private import OpOverload, OpOverloadPacket
from fdtensor.layouts.words import near
from fdtensor.ops.randomness import PASS_A_KEY

__all__ = ["INSIDE", "hint_for", "hint_for_torch", "instead", "name_of_torch"]

INSIDE = "inside of a traced function"
"""How a DTensor that stands for a full tensor is printed."""

_overrides: Any = torch.overrides
_resolved = _overrides.resolve_name

OPTIONS = (
    *("out_layouts", "regather", "on_missing_rule", "on_data_dependent", "plain", "check"),
    *("check_indices", "reduce_dtype", "max_bytes", "as_if", "cost", "mesh"),
    *("choice", "deterministic", "dynamic"),
)
"""The names of options that stand beside the arguments of a function."""

_INSTEAD = {
    "isFunctionalTensor": (
        "calls torch.func.functionalize inside of a traced function",
        "Call the function itself: what is traced writes to nothing anyhow.",
    ),
    "call Tensor.requires_grad_()": (
        "calls requires_grad_() inside of a transform of torch.func",
        "Write torch.func.grad, vjp or jvp of a function there, in place of torch.autograd.grad; "
        "or let the loss call backward(), outside of all transforms.",
    ),
    "escaped from inside a function being vmapped": (
        "reads a tensor of an entry outside of the vmap that made it",
        "Return it from the function that vmap takes.",
    ),
    "register a hook on a tensor": (
        "registers a hook on a tensor that requires no gradient",
        "Hooks run in a derivative: fd.grad(spmd(f)), or spmd(torch.func.grad(f)); where f also "
        "runs without one, write if y.requires_grad: y.register_hook(...).",
    ),
    "does not require grad and does not have": (
        "asks autograd for a derivative of what was computed from nothing that requires one",
        "Arguments of a traced function require none, even where the DTensor does. Write "
        "torch.func.grad of a function; or call x.requires_grad_() in it before, outside of "
        "no_grad and of the transforms of torch.func.",
    ),
}
"""By a text of torch's error: what the function does, and a hint."""


def instead(error: Exception) -> tuple[str, str] | None:
    """What a function that raised this error does, and a hint; None for any other error."""
    return next((told for text, told in _INSTEAD.items() if text in str(error)), None)


def name_of_torch(func: Any) -> str:
    """The name under which users know a function of torch."""
    if isinstance(func, (OpOverload, OpOverloadPacket)):
        return f"torch.ops.{func}"
    known = _resolved(func)
    return known or getattr(func, "__qualname__", None) or type(func).__name__


def hint_for_torch(f: Any, hint: str) -> str:
    """The hint of an error; for a function of torch, which takes no key, the call that does."""
    if hint != PASS_A_KEY or _resolved(f) is None:
        return hint
    return (
        f"Write fd.call({name_of_torch(f)}, ..., key=random.key(0)), or call the function around "
        "it so; or switch dropout off with eval()."
    )


def hint_for(text: str, *, of_library: bool = False) -> str:
    """What to do about an error of torch with this text, or of an op of `torch.library`."""
    context = _without_context(text, of_library) or _mapped(text)
    missing = _without_derivative(text)
    return _misspelled(text) or _hooked(text) or missing or context or _on_full_tensors(text)


def _misspelled(text: str) -> str:
    """A hint for an argument that no function has, where an option of this library is near."""
    unknown = re.search(r"unexpected keyword argument '(\w+)'|(\w+)=\w+\)$", text)
    meant = near(unknown[1] or unknown[2], OPTIONS) if unknown else ""
    return f"{meant}It is an option of spmd, call and trace, and no argument." if meant else ""


def _hooked(text: str) -> str:
    """A hint for `checkpoint` in derivatives of derivatives, or of what `vmap` goes over."""
    if "saved tensor hooks" not in text:
        return ""
    return (
        "torch.utils.checkpoint stands in one derivative: torch.func.grad, torch.autograd.grad or "
        "backward(). Leave it out of derivatives of those, and of what vmap and jacrev map."
    )


def lacks_derivative(text: str) -> bool:
    """Whether an error says that torch takes no derivative of an op."""
    return re.search(r"derivative for \S+ is not implemented", text) is not None


def _without_derivative(text: str) -> str:
    """A hint for an op of which torch takes no derivative."""
    if not lacks_derivative(text):
        return ""
    return (
        "torch has none of it: give it x.detach() where no gradient is to flow through, or write "
        "it with ops that have one."
    )


def _without_context(text: str, of_library: bool) -> str:
    """A hint for an `autograd.Function` of the old form, of which torch.func takes none.

    Such is what torch makes of an op of `torch.library` and its derivative.
    """
    if "setup_context" not in text:
        return ""
    if of_library:
        return (
            "torch.func takes no derivative of a torch.library.custom_op: take it by backward() or "
            "torch.autograd.grad; or call the op in an autograd.Function with setup_context."
        )
    return (
        "Write forward(x) without ctx, and setup_context(ctx, inputs, output) beside it; or take "
        "the gradient by backward() or torch.autograd.grad, which need none."
    )


def _mapped(text: str) -> str:
    """A hint for arguments that `vmap` does not go over together."""
    if not text.startswith("vmap") or ("mapped dim" not in text and "in_dim" not in text):
        return ""
    return (
        "in_dims says of each argument which dim is gone over, one of the same size in all, or "
        "None for an argument that each entry gets whole: in_dims=(0, None)."
    )


def _on_full_tensors(text: str) -> str:
    """A hint for a function that fails as it would in one process, or on a DTensor by itself."""
    if INSIDE in text:
        return (
            "A function of fd.func gets DTensors, and this one of torch takes tensors alone: write "
            "fd.spmd(torch.func.grad(f)), in which f gets tensors of torch."
        )
    return "It gets full tensors of these shapes: see whether it takes such in one process."
