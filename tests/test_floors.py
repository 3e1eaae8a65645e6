"""Each file imports only from floors below it, or from files to its left on its own floor."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "fdtensor"

FLOORS = (
    (
        "errors",
        "callsite",
        "progress",
        "json_fields",
        "opaque",
        "record",
        "text",
        "tree",
        "options",
        "placement",
        "mesh",
    ),
    ("blocks", "dtypes", "wire", "layout", "line_checks"),
    ("collective", "exchange", "transition", "random_bits"),
    (
        "traffic",
        "bound",
        "tiling",
        "memory",
        "cost",
        "search",
        "plan_check",
        "plan_json",
        "plan_text",
        "planner",
        "fused",
    ),
    (
        "ambient",
        "randomness",
        "graph",
        "rewrite",
        "apart",
        "value_checks",
        "recorded_checks",
        "transparent",
        "pins",
        "precision",
        "rounding",
        "recorder",
        "saved",
        "notation",
        "rules",
        "rows",
        "decompositions",
        "lower",
        "solver",
        "work",
        "lift",
        "choice",
        "eqn",
        "program_text",
        "program_json",
        "program_check",
        "program",
        "schedule",
        "assembly",
        "keyed",
        "tracer",
    ),
    (
        "parts",
        "kernel",
        "comm",
        "watch",
        "process_groups",
        "funcol",
        "spelled",
        "local_program",
        "export",
        "runner",
        "derivative",
        "interpreter",
        "simulator",
    ),
    ("transforms",),
    (
        "dtensor",
        "distribution",
        "cluster",
        "testing/values",
        "verify",
        "discovery",
        "adjoint",
        "fallback",
        "spmd",
        "foreach",
        "eager",
        "initialize",
        "api",
        "random",
        "agreement",
        "blockwise",
        "gradients",
        "scaling",
        "optim",
        "fibers",
        "moves",
        "places",
        "varying",
        "named",
        "joint",
        "shard_map",
        "explanation",
        "pictures",
        "calibrate",
        "testing",
        "interop",
        "checkpoint",
        "safetensors",
        "train",
        "bench",
        "demo",
        "cli",
        "__main__",
        "__init__",
    ),
)

HEIGHT = {name: (i, j) for i, floor in enumerate(FLOORS) for j, name in enumerate(floor)}

DOORS_UPWARD = {
    ("mesh.py", "layout"),
    ("program.py", "explanation"),
    ("program.py", "export"),
    ("layout.py", "pictures"),
    ("planner.py", "pictures"),
    ("program.py", "pictures"),
    ("dtensor.py", "pictures"),
}
"""Imports inside of functions that may go up."""

DISTRIBUTED = {
    "funcol.py",
    "spelled.py",
    "process_groups.py",
    "cluster",
    "testing/fixtures.py",
    "interop",
    "checkpoint",
    "bench",
    "demo",
    "train/command.py",
    "cli",
}
"""The files, or names of files and packages, that may import torch.distributed."""

FILES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py"))


def home(file: str) -> str:
    """The name of a file or, where it is in a package and has no floor of its own, of that."""
    name = file.removesuffix(".py")
    return name if name in HEIGHT else name.partition("/")[0]


def imported(source: str, file: str) -> Iterator[str]:
    """The full name of every module, or thing of a module, that runs of the file may import."""
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


def of_fdtensor(name: str) -> str | None:
    """The file or package of fdtensor that the import of `name` needs, or None."""
    root, _, rest = name.partition(".")
    first, inner, *_ = [*rest.split("."), ""]
    if root != "fdtensor":
        return None
    if f"{first}/{inner}" in HEIGHT:
        return f"{first}/{inner}"
    return first if first in HEIGHT or (ROOT / f"{first}.py").is_file() else "__init__"


def refused(source: str, file: str) -> list[str]:
    """What the file imports but may not."""
    wrong = []
    for name in imported(source, file):
        needs = of_fdtensor(name)
        below = needs in (None, home(file)) or HEIGHT[needs] < HEIGHT[home(file)]
        if not below and (file, needs) not in DOORS_UPWARD:
            wrong.append(name)
        if f"{name}.".startswith("torch.distributed.") and not DISTRIBUTED & {file, home(file)}:
            wrong.append(name)
    return wrong


@pytest.mark.parametrize("file", FILES)
def test_a_file_has_a_floor(file):
    assert home(file) in HEIGHT, f"give {file} its place in FLOORS."


@pytest.mark.parametrize("file", FILES)
def test_a_file_imports_only_from_below(file):
    assert refused((ROOT / file).read_text(), file) == []


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("errors.py", "from fdtensor.layout import Layout"),
        ("errors.py", "from fdtensor.record import Record"),
        ("layout.py", "import fdtensor.planner"),
        ("layout.py", "from fdtensor import planner"),
        ("layout.py", "from fdtensor import Layout"),
        ("layout.py", "def f():\n    from fdtensor.planner import plan"),
        ("rules/matmul.py", "from fdtensor.comm import Comm"),
        ("planner.py", "import torch.distributed as dist"),
        ("planner.py", "from torch import distributed"),
        ("planner.py", "from torch.distributed.tensor import DTensor"),
        ("planner.py", "import torch\ntorch.distributed.barrier()"),
    ],
)
def test_an_import_upward_is_seen(file, source):
    assert len(refused(source, file)) == 1


def test_imports_for_type_checkers_do_not_count():
    assert refused("if TYPE_CHECKING:\n    from fdtensor.layout import Layout", "mesh.py") == []
