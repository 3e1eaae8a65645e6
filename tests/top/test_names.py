"""Docstrings of the package name what exists: objects, modules, arguments, files."""

import ast
import builtins
import keyword
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import fdtensor

ROOT = Path(fdtensor.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
TREES = {file: ast.parse(file.read_text()) for file in FILES}

ELSEWHERE = (torch, torch.nn, torch.nn.functional, torch.nn.init, torch.func, torch.Tensor)
OTHERS = {
    *(
        "assert_close",
        "dcp",
        "dist",
        "load",
        "new_group",
    ),  # torch.distributed, which nothing here imports
    *("StorageReader", "make_fx", "reset_parameters"),
    *("0", "double", "py", "fdshow", "layers", "mylib", "op", "w", "dim_0", "dim_1", "n_j"),
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


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_docstrings_name_what_exists(file):
    own = {*names_of(TREES[file]), *DEFINED, *MODULES, *OTHERS, *dir(builtins), *keyword.kwlist}
    unknown = [
        name
        for text in docstrings(TREES[file])
        for name in named(text)
        for part in name.split(".")
        if part not in own and not any(hasattr(place, part) for place in ELSEWHERE)
    ]
    assert unknown == []


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_docstrings_name_files_that_exist(file):
    for text in docstrings(TREES[file]):
        for path in re.findall(r"`((?:tests|fdtensor|notebooks)/[\w/.]+)`", text):
            assert (ROOT.parent / path).exists(), path


def test_a_name_that_does_not_exist_is_seen():
    assert [*named("`no_such_thing(x)` and `Plan.no_such_part`, `a + b`")] == [
        "no_such_thing",
        "Plan.no_such_part",
    ]
    assert "no_such_thing" not in DEFINED
