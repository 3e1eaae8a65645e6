"""Files import from rooms before their own, not from each other in circles; tests mirror rooms.

Files and functions are short.
"""

import ast
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent / "fdtensor"

ROOMS = (
    "layouts",
    "plans",
    "ops",
    "programs",
    "runtime",
    "tensors",
    "parallel",
    "io",
    "inspect",
    "cluster",
    "testing",
    "",
)
"""In the order of imports; the last is the top: what a user types, the demo and the commands."""

NAMESPACES = {"collectives", "cost", "errors", "func", "optim", "random"}
"""Names from rooms below, as users look for them; the other namespaces are rooms."""

TOP = {"__init__", "__main__", "cli", "demo", "train", *NAMESPACES}

DISTRIBUTED = {
    "runtime",
    "cluster",
    "testing/fixtures",
    "testing/pool",
    "io/interop",
    "io/checkpoint",
    "cli",
    "demo",
    "train/command",
}
"""The rooms, packages and files that may import torch.distributed."""

FILES = sorted(path.relative_to(ROOT).with_suffix("").as_posix() for path in ROOT.rglob("*.py"))


def room(file: str) -> str:
    """The room of a file: its folder, or the top."""
    first = file.partition("/")[0]
    return "" if first in TOP else first


def imported(source: str, file: str) -> Iterator[str]:
    """The full name of every module, or thing of a module, that a run of the file may import.

    Imports inside of functions count; those for type checkers alone do not.
    """
    waiting: list[ast.AST] = [ast.parse(source)]
    while waiting:
        node = waiting.pop()
        match node:
            case ast.If(test=ast.Name("TYPE_CHECKING"), orelse=orelse):
                waiting += orelse
                continue
            case ast.Import(names):
                yield from (name.name for name in names)
            case ast.ImportFrom(module, names, level):
                assert level == 0, f"{file} has a relative import."
                yield from (f"{module}.{name.name}" for name in names)
            case ast.Attribute(ast.Name("torch"), "distributed"):
                yield "torch.distributed"
        waiting += ast.iter_child_nodes(node)


def file_of(name: str) -> str | None:
    """The file of fdtensor that the import of `name` reads, or None."""
    if name.partition(".")[0] != "fdtensor":
        return None
    parts = name.split(".")[1:]
    while parts:
        path = "/".join(parts)
        for file in (path, f"{path}/__init__"):
            if file in FILES:
                return file
        parts.pop()
    return "__init__"


def refused(source: str, file: str) -> list[str]:
    """The names that the file imports but may not."""
    wrong = []
    for name in imported(source, file):
        needed = file_of(name)
        if needed is not None:
            below = ROOMS.index(room(needed)) <= ROOMS.index(room(file))
            private = name.rpartition(".")[2].startswith("_")
            if not below or (private and room(needed) != room(file)):
                wrong.append(name)
        parts = file.split("/")
        within = {"/".join(parts[:n]) for n in range(1, len(parts) + 1)}
        if f"{name}.".startswith("torch.distributed.") and not DISTRIBUTED & within:
            wrong.append(name)
    return wrong


def test_the_house_has_these_rooms():
    assert {room(file) for file in FILES} == set(ROOMS)


@pytest.mark.parametrize("file", FILES)
def test_a_file_imports_only_from_its_room_and_those_before(file):
    assert refused((ROOT / file).with_suffix(".py").read_text(), file) == []


@pytest.mark.parametrize("name", ROOMS)
def test_the_files_of_a_room_have_an_order(name):
    """Imports inside of functions count: a circle of files is one file in pieces."""
    files = [file for file in FILES if room(file) == name and not file.endswith("__init__")]
    needs = {
        file: {
            needed
            for imports in imported((ROOT / file).with_suffix(".py").read_text(), file)
            if (needed := file_of(imports)) in files and needed != file
        }
        for file in files
    }
    assert len(list(TopologicalSorter(needs).static_order())) == len(files)


@pytest.mark.parametrize("name", sorted(NAMESPACES))
def test_a_namespace_at_the_top_defines_nothing(name):
    body = ast.parse((ROOT / name).with_suffix(".py").read_text()).body
    kinds = (ast.Expr, ast.ImportFrom, ast.Assign, ast.If)
    assert [node for node in body if not isinstance(node, kinds)] == []


@pytest.mark.parametrize("file", FILES)
def test_a_file_has_at_most_300_lines(file):
    """Examples at the ends of docstrings are not counted."""
    source = (ROOT / file).with_suffix(".py").read_text()
    code = re.sub(r'\n+ *>>> (?:(?!""").)*"""', '\n"""', source, flags=re.DOTALL)
    assert len(code.splitlines()) <= 300


TOLD_IN_ORDER = {"demo.stops"}
"""What a reader follows from top to bottom, however long it is."""


def long_functions(source: str) -> list[str]:
    """The functions of more than 40 lines, docstrings left out, that no comment gives a reason for.

    The comment is the line above the `def`, or above its first decorator.
    """
    lines, names = source.splitlines(), []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            start = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            count = node.end_lineno - start + 1
            if ast.get_docstring(node) is not None:
                count -= node.body[0].end_lineno - node.body[0].lineno + 1
            if count > 40 and not (start > 1 and lines[start - 2].lstrip().startswith("#")):
                names.append(node.name)
    return names


@pytest.mark.parametrize("file", FILES)
def test_a_function_has_at_most_40_lines_or_a_reason(file):
    names = long_functions((ROOT / file).with_suffix(".py").read_text())
    assert [name for name in names if f"{file}.{name}" not in TOLD_IN_ORDER] == []


def test_a_long_function_is_seen():
    body = '    """Text,\n\n    more."""\n' + "    pass\n" * 38
    assert long_functions(f"@cache\ndef f():\n{body}") == []
    assert long_functions(f"@cache\ndef f():\n{body}    pass\n") == ["f"]
    assert long_functions(f"# one table\n@cache\ndef f():\n{body}    pass\n") == []


BESIDE = {"laws", "mesh", "support", "bench", "faults", "hunt", "operators", "pages", "workloads"}
"""The folders of tests that are no rooms: laws across these, real ranks, helpers and measures."""


def test_tests_live_in_the_same_rooms():
    """And in no other folder: `tests/top` has those of the top."""
    folders = {path.parent.relative_to(TESTS).as_posix() for path in TESTS.rglob("test_*.py")}
    assert folders == {room or "top" for room in ROOMS} | (BESIDE - {"support"})
    assert {path.parent.name for path in TESTS.glob("*/__init__.py")} == folders | {"support"}


@pytest.mark.parametrize("name", ROOMS)
def test_a_room_says_what_lives_in_it(name):
    text = ast.get_docstring(ast.parse((ROOT / name / "__init__.py").read_text()))
    assert text is not None
    assert len(text) > 200
    assert name in ("", "layouts") or "imports from" in " ".join(text.split())


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("layouts/layout", "from fdtensor.plans.planner import Plan"),
        ("layouts/layout", "import fdtensor.plans.planner"),
        ("layouts/layout", "from fdtensor import Layout"),
        ("layouts/layout", "def f():\n    from fdtensor.plans.planner import plan"),
        ("ops/rules/matmul", "from fdtensor.runtime.comm import Comm"),
        ("programs/choice", "from fdtensor.ops.rows import _private"),
        ("plans/planner", "import torch.distributed as dist"),
        ("plans/planner", "from torch import distributed"),
        ("plans/planner", "from torch.distributed.tensor import DTensor"),
        ("plans/planner", "import torch\ntorch.distributed.barrier()"),
    ],
)
def test_an_import_that_may_not_be_is_seen(file, source):
    assert len(refused(source, file)) == 1


def test_imports_for_type_checkers_do_not_count():
    source = "if TYPE_CHECKING:\n    from fdtensor.layouts.layout import Layout"
    assert refused(source, "layouts/mesh") == []
