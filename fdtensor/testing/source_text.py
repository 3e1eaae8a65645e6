"""The text of functions and small tensors, and the names that a function takes from outside."""

from __future__ import annotations

import ast
import builtins
import dis
import inspect
import textwrap
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

import torch

__all__ = ["MISSING", "lambda_source", "literal", "needed_by", "source_of"]


MISSING = object()
"""Stands for what a function speaks of and nothing has."""


def needed_by(function: FunctionType, source: str) -> Iterator[tuple[str, Any]]:
    """The names that a function takes from outside, with what they are."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    names = {*_globals_of(function.__code__), *cells, *_outside(source)}
    for name in sorted(names):
        if name in cells:
            try:
                yield name, cells[name].cell_contents
            except ValueError:  # not assigned yet
                yield name, MISSING
        elif name in function.__globals__:
            yield name, function.__globals__[name]
        elif not hasattr(builtins, name):
            yield name, MISSING


def _globals_of(code: CodeType) -> Iterator[str]:
    """The global names that code reads."""
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield step.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _globals_of(constant)


def _outside(source: str) -> Iterator[str]:
    """The names in decorators and defaults, which are read where the function is made."""
    node: Any = ast.parse(source).body[0]
    node = node.value if isinstance(node, ast.Expr) else node
    parts = [*node.args.defaults, *(d for d in node.args.kw_defaults if d)]
    parts += getattr(node, "decorator_list", [])
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    parts += [a.annotation for a in arguments if a.annotation]
    parts += [node.returns] if getattr(node, "returns", None) else []
    for part in parts:
        for name in ast.walk(part):
            if isinstance(name, ast.Name):
                yield name.id


def source_of(function: FunctionType, decorated: bool) -> str | None:
    """The text of a function, with its decorators if they are wanted."""
    try:
        text = textwrap.dedent(inspect.getsource(function)).rstrip()
        node = ast.parse(text).body[0]
    except (OSError, TypeError, SyntaxError, IndexError):
        return None
    if not isinstance(node, ast.FunctionDef) or node.name != function.__name__:
        return None
    return text if decorated else "\n".join(text.splitlines()[node.lineno - 1 :])


def lambda_source(function: FunctionType) -> str | None:
    """The text of a lambda, if it is the only one on its line that is compiled to its code."""
    try:
        text = "".join(inspect.findsource(function)[0])
        tree = ast.parse(text)
    except (OSError, TypeError, SyntaxError):
        return None
    line = function.__code__.co_firstlineno
    texts_on_line = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Lambda) and node.lineno == line:
            texts_on_line.add(ast.unparse(node))
    same = [text for text in texts_on_line if _shape(text) == function.__code__.co_names]
    texts = list(texts_on_line) if len(texts_on_line) == 1 else same
    return texts[0] if len(texts) == 1 else None


def _shape(text: str) -> tuple[str, ...]:
    """The names in the code of a lambda."""
    code = compile(text, "", "eval")
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return inner[0].co_names if inner else ()


def literal(tensor: torch.Tensor) -> str:
    """A small tensor as source."""
    tensor = tensor.detach()
    values = repr(tensor.tolist()).replace("inf", "float('inf')").replace("nan", "float('nan')")
    shaped = f".reshape({tuple(tensor.shape)!r})" if 0 in tensor.shape else ""
    return f"torch.tensor({values}, dtype={tensor.dtype}){shaped}"
