"""`NoTensor`: what a DTensor answers where it is used as a tensor of torch: what to write instead.

Each name is on the class, so that those that a DTensor has are looked up as fast as without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from inspect import getattr_static
from typing import Any, NoReturn, TypeVar

import optree
import torch

from fdtensor.layouts.callsite import user_line
from fdtensor.layouts.errors import NotTorchError
from fdtensor.layouts.torch_private import OpOverload, OpOverloadPacket
from fdtensor.ops.transparent import recording

__all__ = ["NoTensor", "unchanging"]

K = TypeVar("K", bound=type)

_IS_NONE = "and a DTensor is a record of them."
_WHOLE = "for a whole module or function, call(module, x) or spmd(f)(x)"
_INSIDE = "Pass it as an argument: a traced function computes with the full tensors of arguments."


class NoTensor:
    """The base of a record that torch, Python's operators and numpy do not take for a tensor."""

    __slots__ = ()

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> NoReturn:
        """Raises `NotTorchError`: torch asks it where an argument of a function is a record."""
        name = _name_of(func)
        raise _error(
            f"{name} takes tensors, {_IS_NONE}",
            f"Write call({name}, ...); {_WHOLE}.",
            _arguments((args, kwargs or {}), cls),
        )

    def __format__(self, spec: str) -> str:
        if not spec:
            return str(self)
        raise _error(
            f"'{{x:{spec}}}' formats tensors, {_IS_NONE}",
            f'Write f"{{x.full().item():{spec}}}".',
            {"x": self},
        )

    def __dir__(self) -> Iterable[str]:
        kind = type(self)
        return [n for n in object.__dir__(self) if not isinstance(getattr_static(kind, n), Absent)]


class Absent:
    """An attribute of tensors that a DTensor lacks; whoever asks for it is told what there is."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, x: object, kind: type) -> NoReturn:
        facts = {} if x is None else {"x": x}
        raise _error(f"a DTensor has no attribute {self.name!r}.", _instead(self.name), facts)


def _error(sentence: str, hint: str, facts: Mapping[str, object]) -> NotTorchError:
    shown = {name: _shown(value) for name, value in facts.items()}
    line = user_line()
    if recording():
        hint = _INSIDE
    return NotTorchError(sentence, **shown, **({"line": line} if line else {}), hint=hint)


def _shown(value: object) -> str:
    """An operand in a line: the type of a distributed one, the shape of a plain one."""
    if isinstance(value, NoTensor):
        return str(getattr(value, "type", "a DTensor"))
    if isinstance(value, torch.Tensor):
        return f"a plain tensor of shape {tuple(value.shape)}"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _arguments(tree: Any, kind: type) -> dict[str, object]:
    """The records among the arguments of a function, by number."""
    leaves = optree.tree_leaves(tree, is_leaf=lambda leaf: isinstance(leaf, kind))
    return {f"argument {i}": leaf for i, leaf in enumerate(leaves) if isinstance(leaf, kind)}


def _name_of(func: Any) -> str:
    """The name under which users know a function of torch."""
    if isinstance(func, (OpOverload, OpOverloadPacket)):
        return f"torch.ops.{func}"
    name = torch.overrides.resolve_name(func) or f"{func.__module__}.{func.__name__}"
    method = name.rpartition(".")[2]
    if not method.endswith("__"):
        return name
    own = method.strip("_")
    return _OPERATORS.get(own, _OPERATORS.get(own[1:], ("", name)))[1]


# --- methods and attributes ----------------------------------------------------------------------

_INSTEAD = {
    "backward": "Write x.full().backward(), or differentiate inside: spmd(torch.func.grad(f))(x).",
    "grad": "Write gradients(x), after a backward.",
    "requires_grad": "Write x.requires_grad_(); whether they do the tensors of x.local say.",
    "data": "Write x.detach().",
    "device": "It is that of the Comm: x.comm.device, which connect(mesh, device) sets.",
    "size": "Write x.shape.",
    "dim": "Write x.ndim.",
    "numel": "Write x.type.numel.",
    "nbytes": "Write x.type.nbytes, or x.type.local_nbytes(rank).",
    "full_tensor": "Write x.full().",
    "placements": "Write x.layout.placements, or x.layout['dp'] for one axis.",
    "device_mesh": "Write x.mesh.",
    "local_shape": "Write x.type.local_shape(rank).",
} | dict.fromkeys(
    ("to", "cuda", "cpu"),
    "It stays on the device of its Comm, by connect(mesh, device); for another dtype write "
    "call(torch.Tensor.to, x, dtype).",
)

_OF_VALUES = ("item", "tolist", "numpy")
_OF_MEMORY = (
    *("stride", "is_contiguous", "storage", "untyped_storage", "data_ptr", "storage_offset"),
    *("element_size", "is_leaf", "grad_fn", "retain_grad", "register_hook", "pin_memory"),
)


def _instead(name: str) -> str:
    """What to write for an attribute that is not there."""
    if name in _INSTEAD:
        return _INSTEAD[name]
    if name in _OF_VALUES:
        return f"Write x.full().{name}()."
    if name in _OF_MEMORY:
        return (
            "x.local has the tensors of torch: that of this rank, or a tuple on a simulated mesh."
        )
    if not callable(getattr(torch.Tensor, name, None)):
        return f"Write call(lambda x: x.{name}, x)."
    new = " It gives a new one: a DTensor never changes." if name.endswith("_") else ""
    return f"Write call(torch.Tensor.{name}, x, ...); {_WHOLE}.{new}"


_OTHERS = ("full_tensor", "placements", "device_mesh", "local_shape")
"""Names of torch's own DTensor, and of types."""

for _name in (*dir(torch.Tensor), *_OTHERS):
    if not _name.startswith("_"):
        setattr(NoTensor, _name, Absent(_name))


# --- operators -----------------------------------------------------------------------------------

_OPERATORS = {
    "add": ("{} + {}", "torch.add"),
    "sub": ("{} - {}", "torch.sub"),
    "mul": ("{} * {}", "torch.mul"),
    "truediv": ("{} / {}", "torch.div"),
    "floordiv": ("{} // {}", "torch.floor_divide"),
    "mod": ("{} % {}", "torch.remainder"),
    "pow": ("{} ** {}", "torch.pow"),
    "matmul": ("{} @ {}", "torch.matmul"),
    "and": ("{} & {}", "torch.bitwise_and"),
    "or": ("{} | {}", "torch.bitwise_or"),
    "xor": ("{} ^ {}", "torch.bitwise_xor"),
    "lt": ("{} < {}", "torch.lt"),
    "le": ("{} <= {}", "torch.le"),
    "gt": ("{} > {}", "torch.gt"),
    "ge": ("{} >= {}", "torch.ge"),
    "eq": ("{} == {}", "torch.eq"),
    "ne": ("{} != {}", "torch.ne"),
    "neg": ("-{}", "torch.neg"),
    "abs": ("abs({})", "torch.abs"),
    "invert": ("~{}", "torch.bitwise_not"),
    "round": ("round({})", "torch.round"),
}
"""How an operator is written, and the function that does the same."""

_UNARY = ("neg", "abs", "invert", "round")
_COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")

_PROTOCOLS = {
    "getitem": ("x[...]", "Write call(lambda x: x[...], x), with the index in place of the dots."),
    "setitem": (
        "x[...] = y",
        "It never changes: write call(lambda x: torch.where(...), x), or index_put.",
    ),
    "delitem": ("del x[...]", "It never changes: write call(f, x) for another one."),
    "len": ("len(x)", "Write x.shape[0]."),
    "iter": ("for row in x", "Write call(torch.unbind, x), which gives a tuple of DTensors."),
    "contains": ("y in x", "Write call(lambda x: (x == y).any(), x), and look at it by full()."),
    "bool": ("if x", "Write if x.full(): the same answer on all ranks; or x is not None."),
    "float": ("float(x)", "Write x.full().item()."),
    "int": ("int(x)", "Write int(x.full())."),
    "complex": ("complex(x)", "Write complex(x.full())."),
    "array": ("np.asarray(x)", "Write x.full().numpy()."),
}


def _operator(key: str, swapped: bool) -> Callable[..., NoReturn]:
    sign, function = _OPERATORS[key]
    names = ("x",) if key in _UNARY else ("x", "y")
    written = sign.format(*names)
    hint = f"Write call({function}, {', '.join(names)}); {_WHOLE}."

    def refuse(own: object, *others: object) -> NoReturn:
        operands = (*others[:1], own) if swapped else (own, *others[:1])
        facts: dict[str, object] = dict(zip(names, operands, strict=False))
        raise _error(f"'{written}' takes tensors, {_IS_NONE}", hint, facts)

    return refuse


def _protocol(key: str) -> Callable[..., NoReturn]:
    written, hint = _PROTOCOLS[key]

    def refuse(x: object, *_: object, **__: object) -> NoReturn:
        raise _error(f"'{written}' takes tensors, {_IS_NONE}", hint, {"x": x})

    return refuse


for _name in _OPERATORS:
    setattr(NoTensor, f"__{_name}__", _operator(_name, swapped=False))
    if _name not in (*_UNARY, *_COMPARISONS):
        setattr(NoTensor, f"__r{_name}__", _operator(_name, swapped=True))
for _name in _PROTOCOLS:
    setattr(NoTensor, f"__{_name}__", _protocol(_name))


# --- writes --------------------------------------------------------------------------------------


def unchanging(kind: K) -> K:
    """A frozen class whose attributes say, where one is set, that nothing of it changes."""

    def refuse(x: object, name: str, *_: object) -> NoReturn:
        raise _error(
            f"a DTensor never changes: {name!r} cannot be set.",
            "Make another: call(f, x), x.redistribute(layout), attrs.evolve(x, local=...).",
            {"x": x},
        )

    for name in ("__setattr__", "__delattr__"):
        setattr(kind, name, refuse)
    return kind
