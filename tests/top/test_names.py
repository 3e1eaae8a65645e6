"""Docstrings of the package name what exists: objects, modules, arguments, files."""

import ast
import builtins
import keyword
import re
from collections.abc import Iterator
from pathlib import Path

import torch

import fdtensor

ROOT = Path(fdtensor.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
TREES = {file: ast.parse(file.read_text()) for file in FILES}

ELSEWHERE = (torch, torch.nn, torch.nn.functional, torch.nn.init, torch.func, torch.Tensor)
OTHERS = {
    *("assert_close", "dcp", "dist", "load", "new_group"),
    *("StorageReader", "make_fx", "reset_parameters"),
    *(
        "0",
        "double",
        "py",
        "fdshow",
        "layers",
        "medium",
        "mylib",
        "op",
        "w",
        "dim_0",
        "dim_1",
        "n_j",
    ),
}
"""Names of torch that the objects above lack, and those of examples, formulas and styles."""


def names_of(tree: ast.AST) -> Iterator[str]:
    """The identifiers of a file, and the words of its short texts, which are options and keys."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Name(id=name):
                yield name
            case ast.arg(arg=name) | ast.Attribute(attr=name) | ast.keyword(arg=str() as name):
                yield name
            case ast.alias(name=name, asname=other):
                yield from (other or name).split(".")
            case ast.Constant(str() as text) if len(text) < 60:
                yield from re.findall(r"\w+", text)


def definitions_of(tree: ast.AST) -> Iterator[str]:
    """The classes, functions, methods and attributes that other files may name."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.arg(arg=name) | ast.Attribute(attr=name):
                yield name
            case ast.Assign([ast.Name(name)]) | ast.AnnAssign(ast.Name(name)):
                yield name


DEFINED = {name for tree in TREES.values() for name in definitions_of(tree)}
MODULES = {part for file in FILES for part in file.relative_to(ROOT.parent).with_suffix("").parts}
EVERYWHERE = {*DEFINED, *MODULES, *OTHERS, *dir(builtins), *keyword.kwlist}


def docstrings(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Expr(ast.Constant(str() as text)):
                yield text


def named(text: str) -> Iterator[str]:
    """What stands in backticks and is an object, or a call of one."""
    for quoted in re.findall(r"`([^`\n]+)`", text):
        match = re.fullmatch(r"([A-Za-z_][\w.]*)(\(.*\))?", quoted)
        if match:
            yield match[1]


def is_known(part: str, own: set[str]) -> bool:
    return part in own or part in EVERYWHERE or any(hasattr(place, part) for place in ELSEWHERE)


def test_docstrings_name_what_exists():
    unknown = []
    for file, tree in TREES.items():
        own = set(names_of(tree))
        for name in (name for text in docstrings(tree) for name in named(text)):
            if not all(is_known(part, own) for part in name.split(".")):
                unknown.append(f"{file.relative_to(ROOT)}: {name}")
    assert unknown == []


def test_docstrings_name_files_that_exist():
    for text in (text for tree in TREES.values() for text in docstrings(tree)):
        for path in re.findall(r"`((?:tests|fdtensor|notebooks)/[\w/.]+)`", text):
            assert (ROOT.parent / path).exists(), path


def test_a_name_that_does_not_exist_is_seen():
    assert [*named("`no_such_thing(x)` and `Plan.no_such_part`, `a + b`")] == [
        "no_such_thing",
        "Plan.no_such_part",
    ]
    assert "no_such_thing" not in DEFINED
