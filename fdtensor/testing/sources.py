"""`Names`: functions and values as Python source, with what they need written before them."""

from __future__ import annotations

import builtins
import sys
import tempfile
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, ModuleType
from typing import Any

import attrs
import torch

from fdtensor.layouts.record import Record
from fdtensor.layouts.torch_private import (
    CustomOpDef,
    OpOverload,
    OpOverloadPacket,
    abstract_function,
    backward_function,
    op_function,
    overload_in,
    setup_context_function,
)
from fdtensor.ops.notation.core import rule_of
from fdtensor.ops.random_bits import Key
from fdtensor.programs.options import Options
from fdtensor.tensors.calls.function import Spmd
from fdtensor.testing.source_text import MISSING, lambda_source, literal, needed_by, source_of

__all__ = ["Names"]

_LITERAL = 24
"""Tensors with more elements go into a file."""

_SCRIPT = ("torch", "Mesh", "Layout", "TensorType", "assert_same_on_layouts", "full_tensor")
"""The names that the script itself uses, beside placements."""

_TORCH = ("torch", "torch.nn.functional", "torch.linalg", "torch.fft", "torch.special")


@attrs.define(eq=False)
class Names:
    """Imports and lines of a script, and the names that they give to objects."""

    imports: dict[str, None] = attrs.field(factory=dict)
    """In order."""
    lines: list[str] = attrs.field(factory=list)
    known: dict[int, str] = attrs.field(factory=dict)
    kept: list[Any] = attrs.field(factory=list)
    """The objects that `known` names, kept so that no other object takes their ids."""
    taken: set[str] = attrs.field(factory=lambda: {*_SCRIPT})

    def spelled(self, value: Any, name: str) -> str:
        """An expression for a value; `name` is what it is called if it needs a line of its own."""
        if id(value) in self.known:
            return self.known[id(value)]
        text = self._inline(value)
        if text is None:
            self.kept.append(value)
            text = self.known[id(value)] = self._defined(value, name)
        return text

    def fresh(self, name: str) -> str:
        """A name that nothing has."""
        free, count = name, 1
        while free in self.taken or hasattr(builtins, free):
            count += 1
            free = f"{name}_{count}"
        self.taken.add(free)
        return free

    def filed(self, value: Any, name: str) -> str:
        """An expression that reads a value from a file, which is written now."""
        import cloudpickle

        folder = Path(tempfile.mkdtemp(prefix="fdtensor-repro-"))
        file = folder / f"{name}.pkl"
        try:
            file.write_bytes(cloudpickle.dumps(value))
        except Exception:  # whatever a value says when it cannot be stored
            return f"...  # {name}: {type(value).__name__} of yours, which cannot be written here"
        self.imports["import cloudpickle, pathlib"] = None
        return f"cloudpickle.loads(pathlib.Path({str(file)!r}).read_bytes())"

    def _inline(self, value: Any) -> str | None:
        """A value as an expression without a line of its own, if it has one."""
        match value:
            case None | bool() | int() | str() | bytes() | torch.dtype() | torch.device():
                return repr(value)
            case float():
                return repr(value) if value - value == 0 else f"float({str(value)!r})"
            case Record():
                return repr(value)
            case Key():
                self.imports["from fdtensor.ops.random_bits import Key"] = None
                return repr(value)
            case Spmd() if value.options == Options():
                return f"spmd({self.spelled(value.f, 'f')})"
            case list() if type(value) is list:
                return f"[{', '.join(self.spelled(v, 'value') for v in value)}]"
            case tuple() if type(value) is tuple:
                inner = "".join(f"{self.spelled(v, 'value')}, " for v in value)
                return f"({inner.rstrip() if len(value) == 1 else inner.removesuffix(', ')})"
            case dict() if type(value) is dict:
                pairs = (
                    f"{self.spelled(k, 'k')}: {self.spelled(v, 'value')}" for k, v in value.items()
                )
                return f"{{{', '.join(pairs)}}}"
            case ModuleType():
                self._import(f"import {value.__name__}", value)
                return value.__name__
            case OpOverload() | OpOverloadPacket():
                return f"torch.ops.{value}"
            case MethodDescriptorType() if hasattr(torch.Tensor, value.__name__):
                return f"torch.Tensor.{value.__name__}"
            case BuiltinFunctionType():
                return self._of_torch(value)
        return self._imported(value)

    def _of_torch(self, value: BuiltinFunctionType) -> str | None:
        for home in _TORCH:
            if getattr(sys.modules[home], value.__name__, None) is value:
                return f"{home}.{value.__name__}"
        return self._imported(value)

    def _imported(self, value: Any) -> str | None:
        """The text of an object that has a place in a module that can be imported."""
        module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
        if not isinstance(module, str) or not isinstance(name, str) or module == "__main__":
            return None
        everything = sys.modules["fdtensor"]
        if name in everything.__all__ and getattr(everything, name) is value:
            return name
        home = sys.modules.get(module)
        if getattr(home, "__spec__", None) is None or _at(home, name) is not value:
            return None
        return self._from(home, name)

    def _from(self, home: Any, name: str) -> str | None:
        """A name of a module, imported; None where something else has it."""
        first = name.partition(".")[0]
        line = f"from {home.__name__} import {first}"
        if first in self.taken and line not in self.imports:
            return None
        self.taken.add(first)
        self._import(line, home)
        return name

    def _import(self, line: str, module: ModuleType) -> None:
        """Adds an import, and where to import from where Python would not look there."""
        file = getattr(module, "__file__", None)
        root = module.__name__.partition(".")[0]
        if file and "-packages" not in file and root not in {*sys.stdlib_module_names, "fdtensor"}:
            above = module.__name__.count(".") + (Path(file).name == "__init__.py")
            self.imports["import sys"] = None
            self.imports[f"sys.path.insert(0, {str(Path(file).absolute().parents[above])!r})"] = (
                None
            )
        if line != "import torch":
            self.imports[line] = None

    def _defined(self, value: Any, name: str) -> str:
        """The name of a value, after the lines that define it."""
        defined = None
        if isinstance(value, FunctionType):
            defined = self._function(value)
        elif isinstance(value, CustomOpDef):
            defined = self._op(value)
        if defined is not None:
            return defined
        name = self.fresh(name if name.isidentifier() else "value")
        if isinstance(value, torch.Tensor) and value.numel() <= _LITERAL:
            self.lines.append(f"{name} = {literal(value)}")
        else:
            self.lines.append(f"{name} = {self.filed(value, name)}")
        return name

    def _function(
        self, function: FunctionType, value: Any = None, decorated: bool = True
    ) -> str | None:
        """The name of a function, after its source and what that needs; None without source.

        `value` is what its decorators make of it; they are left out where it is not `decorated`.
        """
        bare = function.__name__ == "<lambda>"
        source = lambda_source(function) if bare else source_of(function, decorated)
        needed = {} if source is None else dict(needed_by(function, source))
        if source is None or any(value_needed is MISSING for value_needed in needed.values()):
            return None
        name = self.fresh("f" if bare else function.__name__)
        if not bare and name != function.__name__ and name.strip("_0123456789"):
            return None
        self.known[id(function if value is None else value)] = name
        for used, value_needed in needed.items():
            if value_needed is not function and (text := self._named(value_needed, used)) != used:
                self.lines.append(f"{used} = {text}")
        self.lines.append(f"{name} = {source}" if bare else f"\n{source}\n")
        return name

    def _named(self, value: Any, used: str) -> str:
        """A value under the name that a source uses for it, if that can be."""
        if not isinstance(value, ModuleType):
            return self.spelled(value, used)
        whole = value.__name__.partition(".")[0] == used
        self._import(f"import {value.__name__}" + ("" if whole else f" as {used}"), value)
        return used

    def _op(self, op: Any) -> str | None:
        """The name of an op of the user's, after it and what was registered for it."""
        function = op_function(op)
        home = sys.modules.get(function.__module__)
        if function.__module__ != "__main__" and getattr(home, function.__name__, None) is op:
            return self._from(home, function.__name__)
        name = self._function(function, op)
        if name is None:
            return f"torch.ops.{overload_in(op)}"
        known = rule_of(overload_in(op))
        for registered, by in (
            (abstract_function(op), f"{name}.register_fake"),
            (known and known.rows, f"rule({name})"),
        ):
            if isinstance(registered, FunctionType):
                self._registered(registered, by)
        backward = backward_function(op)
        if backward is not None:
            setup = setup_context_function(op)
            context = "" if setup is None else f", setup_context={self.spelled(setup, 'setup')}"
            back = self.spelled(backward, "backward")
            self.lines.append(f"{name}.register_autograd({back}{context})")
        return name

    def _registered(self, function: FunctionType, by: str) -> None:
        """Writes a function that was registered, by its decorator or by a call."""
        if self._function(function) is None:  # decorators may speak of what is not known here
            name = self._function(function, decorated=False)
        else:
            name = None if self.lines[-1].lstrip().startswith("@") else self.known[id(function)]
        if name is not None:
            called = name if function.__name__ == "<lambda>" else function.__name__
            self.lines.append(f"{by}({called})")


def _at(home: object, name: str) -> Any:
    """The object of a module under a dotted name, or None."""
    for part in name.split("."):
        home = getattr(home, part, None)
    return home
