"""What a DTensor does not do though tensors of torch do, and what to write instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import optree
import torch
import torch.nn.functional as F

from fdtensor.layouts.callsite import user_line
from fdtensor.layouts.errors import FdtensorError, NotTorchError
from fdtensor.layouts.expected import no_argument
from fdtensor.layouts.torch_private import OF_PARAMETERS, OpOverload, schema_of
from fdtensor.programs.failure_hints import name_of_torch
from fdtensor.tensors.owed import at_hand
from fdtensor.tensors.torch_transforms import (
    INSTEAD,
    asked_by_a_transform,
    asked_by_control_flow,
    asked_by_functional_call,
)

__all__ = [
    "Absent",
    "lacked",
    "refuse_clipping",
    "refuse_device",
    "refuse_many",
    "refuse_no_cotangents",
    "refuse_no_dims",
    "refuse_of_torch_alone",
    "refuse_other_shapes",
    "refuse_untracked",
    "refuse_write",
    "refuse_writing",
    "unchanging",
]

K = TypeVar("K", bound=type)


class Absent:
    """An attribute of tensors that a DTensor lacks; whoever asks for it is told what there is."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, x: object, kind: type) -> NoReturn:
        facts = {} if x is None else {"x": x}
        hint = f"{INSTEAD}." if asked_by_a_transform() else _instead(self.name)
        raise _error(f"a DTensor has no attribute {self.name!r}.", hint, facts)


_INSTEAD = {
    "data": "Write x.detach().",
    "full_tensor": "Write x.full().",
    "placements": "Write x.layout.placements, or x.layout['dp'] for one axis.",
    "device_mesh": "Write x.mesh.",
    "local_shape": "Write x.type.local_shape(rank).",
} | dict.fromkeys(
    ("cuda", "cpu", "xpu", "ipu", "pin_memory"),
    "It stays on the device of its Comm, by connect(mesh, device).",
)

_OF_MEMORY = (
    *("stride", "is_contiguous", "storage", "untyped_storage", "data_ptr", "storage_offset"),
    *("is_leaf", "grad_fn", "retain_grad", "register_hook", "names", "output_nr", "is_view"),
    *("register_post_accumulate_grad_hook", "is_shared", "is_pinned", "storage_type", "grad_dtype"),
)

OF_OTHERS = ("full_tensor", "placements", "device_mesh", "local_shape")
"""Names of torch's own DTensor, and of types."""


_IN_SPMD = "or keep the line in a function f: spmd(f)(x) and fd.grad(spmd(f))(x) take writes."


def lacked(name: str) -> bool:
    """Whether a DTensor lacks this attribute of tensors: what writes to one, or tells of memory."""
    return name in _INSTEAD or name in _OF_MEMORY or name.endswith("_")


def _instead(name: str) -> str:
    """What to write for an attribute that is not there."""
    if name in _INSTEAD:
        return _INSTEAD[name]
    if name in _OF_MEMORY:
        return (
            "x.local has the tensors of torch: that of this rank, or a tuple on a simulated mesh."
        )
    if not name.endswith("_"):
        return f"Write call(lambda x: x.{name}, x), or look at the tensors of x.local."
    new = name.removesuffix("_")
    own = hasattr(torch.Tensor, new)
    written = f"x = x.{new}(...)" if own else f"x = call(torch.Tensor.{name}, x, ...)"
    return f"A DTensor never changes: write {written}, which gives a new one; {_IN_SPMD}"


def refuse_writing(func: Any, args: Any, kwargs: Mapping[str, Any], kind: type) -> None:
    """Raises for a function of torch that would write to one of its arguments."""
    name = name_of_torch(func)
    short = name.rpartition(".")[2]
    if short in ("__setitem__", "__delitem__"):
        written = "Write t = torch.where(...), or t = t.index_put(...)."
    elif short.startswith("__i") and short.endswith("__") and short not in _NO_WRITES:
        written = "Write t = t + x and the like."
    elif short.endswith("_") and not short.endswith("__"):
        written = f"Write x = {name.removesuffix('_')}(...), which gives a new one."
    elif kwargs.get("out") is not None:
        written = f"Without out= write y = {name}(...)."
    elif kwargs.get("inplace"):
        written = f"Write x = {name}(...) without inplace=True."
    elif isinstance(func, OpOverload) and schema_of(func).is_mutable:
        written = f"Write {name.replace('_.', '.')}, which gives a new value."
    elif func in (F.embedding, F.embedding_bag) and _max_norm(args, kwargs) is not None:
        written = "Write it without max_norm, and shorten the rows of the weight before."
    else:
        return
    given: Any = args, dict(kwargs)
    leaves = optree.tree_leaves(given, is_leaf=lambda leaf: isinstance(leaf, kind))
    facts = {f"argument {i}": leaf for i, leaf in enumerate(leaves) if isinstance(leaf, kind)}
    if short in ("copy_", "set_") and args and isinstance(args[0], torch.Tensor):
        raise _error(  # of the error load_state_dict shows the sentence alone
            f"{name} would write a DTensor to a plain tensor: pass its x.full(), or call the "
            "module of a parameter by fd.bind(module, {name: x}).",
            "x.full() is all of it, on every rank.",
            facts,
        )
    hint = f"{written[:-1]}; {_IN_SPMD}"
    raise _error(f"{name} writes to a tensor, and a DTensor never changes.", hint, facts)


def _max_norm(args: Any, kwargs: Mapping[str, Any]) -> Any:
    """The argument by which rows of a weight are shortened, in place; None where none is given."""
    return args[3] if len(args) > 3 else kwargs.get("max_norm")


_NO_WRITES = ("__invert__", "__index__", "__int__")


def refuse_write(written: str, x: object, instead: str) -> NotTorchError:
    """The error for a statement that would write to a DTensor."""
    hint = f"Write y = {instead}; {_IN_SPMD}"
    return _error(f"a DTensor never changes: '{written}'.", hint, {"x": x})


def refuse_augmented(x: Any) -> None:
    """Raises for `x += y` and the like where `x` is a leaf that requires grad.

    torch writes to it, as parameters are updated; the name alone would change.
    """
    if all(leaf.is_leaf for leaf in x.comm.leaves(at_hand(x.held))):
        raise _error(
            "x += y, x -= y and the like would leave this leaf that requires grad as it is: a "
            "DTensor never changes.",
            "Write x = (x + y).detach().requires_grad_() and put it where x was, or let an "
            "optimizer do it: fd.optim.",
            {"x": x},
        )


def refuse_many(x: Any) -> NotTorchError:
    """The error for the one number of a tensor that has several, or none."""
    count = x.type.numel
    return _error(
        f"a DTensor of {count} elements is no single number.",
        "Write x.full() for all of them, (x == y).all() for a condition, x is not None for None.",
        {"x": x},
    )


def refuse_no_cotangents(name: str, given: Any, kind: type) -> None:
    """Raises `ArgumentError` for cotangents of which one is no DTensor, this `kind`."""
    for x in given:
        if not isinstance(x, kind):
            hint = "Give one like the result: distribute(tensor, x.layout, x.comm)."
            raise no_argument(name, x, "DTensor", hint)


def refuse_other_shapes(ends: Sequence[Any], cotangents: Sequence[Any]) -> None:
    """Raises where cotangents have other shapes than the results that they are of."""
    wrong = {
        f"cotangent {i}": f"{_shown(ct)}, of a result {_shown(end)}"
        for i, (end, ct) in enumerate(zip(ends, cotangents, strict=True))
        if end.shape != ct.shape
    }
    if wrong:
        raise FdtensorError(
            f"{len(wrong)} of {len(ends)} cotangents have another shape than their result.",
            **wrong,
            hint="Give DTensors like the results, in any layouts: torch.ones_like(y).",
        )


def refuse_of_torch_alone(x: object) -> None:
    """Raises where torch is about to say of a DTensor that it is no tensor of torch."""
    if asked_by_control_flow():
        raise _error(
            "torch.cond, while_loop, scan and map take tensors of torch, and not a DTensor.",
            "Write them inside of a traced function, which gets tensors of torch: "
            "fd.spmd(lambda x: torch.cond(x.sum() > 0, f, g, (x,)))(x).",
            {"x": x},
        )
    if asked_by_functional_call():
        raise _error(
            "torch.func.functional_call takes tensors of torch, and not a DTensor.",
            "Write fd.bind(module, params)(x). In a traced function it takes arguments of that, no "
            "DTensors from around: spmd(lambda params, x: functional_call(module, params, x)).",
            {"x": x},
        )


def refuse_untracked(what: str, x: object) -> NotTorchError:
    """The error where torch would take a DTensor for a value without a derivative."""
    return _error(
        f"{what} takes derivatives of tensors of torch, and of no DTensor.",
        "Give it as a function to call or spmd, which have its derivative: call(F.apply, x), "
        "call(module, x). A checkpoint takes use_reentrant=False.",
        {"x": x},
    )


def refuse_no_dims(x: Any) -> NotTorchError:
    """The error for the length of a tensor without dims."""
    return _error(
        "a DTensor without dims has no length.",
        "Write x.item() for its number; torch.stack([...]), not torch.tensor([...]), for one "
        "of several; x.full(), not torch.tensor(x), for a tensor of torch.",
        {"x": x},
    )


def refuse_device(x: Any, given: Any) -> None:
    """Raises for a device that is not the one of the local tensors."""
    if not isinstance(given, (str, torch.device)):
        return
    wanted, own = torch.device(given), x.device
    if wanted.type != own.type or wanted.index not in (None, own.index):
        raise _error(
            f"a DTensor stays on the device of its Comm, and does not move to {str(wanted)!r}.",
            "Connect the mesh on the other device: connect(mesh, device).",
            {"x": x, "device": own},
        )


_ANOTHER = "Make another: call(f, x), x.redistribute(layout), attrs.evolve(x, local=...)."

_SET_INSTEAD = {
    "grad": "Write x = x.detach().requires_grad_() for a leaf with these values and no gradient.",
    "data": "Write x = y.detach().requires_grad_() for a leaf with other values.",
    "requires_grad": "Write x.requires_grad_(), or x = x.detach().",
    OF_PARAMETERS: "Write x = x.detach().requires_grad_(), and fd.bind(module, {name: x}) for a "
    "module with it.",
}
"""What to write for an attribute of a tensor that torch lets one set."""


def refuse_clipping(x: object) -> NotTorchError:
    """The error for `torch.nn.utils.clip_grad_norm_` of DTensors, of which it sees no blocks."""
    return _error(
        "torch.nn.utils clips the gradients of tensors of torch, and not of a DTensor.",
        "Write fd.optim.clip_grad_norm_(params, max_norm), which counts each element once and all "
        "ranks call; or optimizer.step(params, {name: g.clamp(-1, 1)}, state) with fd.optim.",
        {"x": x},
    )


def unchanging(kind: K) -> K:
    """A frozen class whose attributes say, where one is set, that nothing of it changes."""

    def refuse(x: object, name: str, *_: object) -> NoReturn:
        sentence = f"a DTensor never changes: {name!r} cannot be set."
        if name == OF_PARAMETERS:
            sentence = "a DTensor is no torch.nn.Parameter, and never changes to one."
        raise _error(sentence, _SET_INSTEAD.get(name, _ANOTHER), {"x": x})

    for name in ("__setattr__", "__delattr__"):
        setattr(kind, name, refuse)
    return kind


def _error(sentence: str, hint: str, facts: Mapping[str, object]) -> NotTorchError:
    shown = {name: _shown(value) for name, value in facts.items()}
    line = user_line()
    return NotTorchError(sentence, **shown, **({"line": line} if line else {}), hint=hint)


def _shown(value: Any) -> str:
    """A value in a line: the type of a distributed tensor."""
    text = str(getattr(value, "type", value)) if hasattr(type(value), "comm") else repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
