"""The notebooks: run in a clean kernel, written in one form, compared with what is stored.

python -m tests.notebooks [--write] [names...]
"""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import os
import re
import sys
import tempfile
import time
import zlib
from collections.abc import Iterable, Sequence
from copy import deepcopy
from datetime import datetime
from pathlib import Path

import nbformat
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell
from nbformat.v4.rwbase import split_lines

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "notebooks"
FAILS = "raises-exception"  # the tag of a cell that is meant to fail
ANSWER = "answer"  # the tag of a cell that answers an exercise; JupyterLab folds it
SVG = "image/svg+xml"


def notebooks(names: Iterable[str] = ()) -> list[Path]:
    """The notebooks whose file names start with one of `names`, all without any."""
    paths = sorted(FOLDER.glob("*.ipynb"))
    starts = tuple(Path(name).name for name in names) or ("",)
    return [path for path in paths if path.name.startswith(starts)]


def read(path: Path) -> NotebookNode:
    """The notebook that is stored at `path`."""
    return nbformat.read(path, as_version=4)


def executed(notebook: NotebookNode, allow_errors: bool = False) -> NotebookNode:
    """`notebook` with the outputs of a fresh kernel of this Python, which runs in an empty folder.

    Raises nbclient's CellExecutionError where a cell fails that is not tagged as such, unless it
    may: then its error is its output.
    """
    paths = [str(ROOT), os.environ.get("PYTHONPATH")]
    with tempfile.TemporaryDirectory() as folder:
        manager = AsyncKernelManager(transport="ipc", ip=f"{folder}/kernel")
        manager._kernel_spec = KernelSpec(  # not one that is installed for all Pythons
            argv=[sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
            display_name="Python 3",
            language="python",
        )
        client = NotebookClient(
            deepcopy(notebook), km=manager, timeout=300, allow_errors=allow_errors
        )
        client.execute(
            cleanup_kc=True,  # it leaves a kernel of ours running otherwise
            cwd=folder,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(filter(None, paths)),
                "IPYTHONDIR": folder,  # nobody's own start-up files
                "OMP_NUM_THREADS": "1",
                "PYTHONWARNINGS": "ignore:IProgress not found",  # tqdm, without widgets
            },
        )
    return client.nb


FORGET = "get_ipython().reset(new_session=False)"


def executed_together(some: Sequence[NotebookNode]) -> list[NotebookNode]:
    """Each notebook with its outputs, all in one kernel, which forgets the names of the one before.

    A cell that fails has its error as its output, and those after it run.
    """
    joined = deepcopy(some[0])
    joined.cells = []
    for notebook in some:
        joined.cells += [*deepcopy(notebook.cells), new_code_cell(FORGET)]
    cells = iter(executed(joined, allow_errors=True).cells)
    found = []
    for notebook in some:
        made = deepcopy(notebook)
        made.cells = [next(cells) for _ in notebook.cells]
        assert next(cells).source == FORGET
        found.append(made)
    return found


def plain(notebook: NotebookNode) -> NotebookNode:
    """`notebook` without counts, ids, versions and HTML: what is stored of it."""
    cells = []
    for cell in notebook.cells:
        tags = cell.metadata.get("tags", [])
        kept = {
            "cell_type": cell.cell_type,
            "metadata": {
                **({"tags": list(tags)} if tags else {}),
                **({"jupyter": {"source_hidden": True}} if ANSWER in tags else {}),
            },
            "source": cell.source.strip("\n"),
        }
        if cell.cell_type == "code":
            kept["execution_count"] = None
            kept["outputs"] = [_plain_output(output) for output in _merged(cell.outputs)]
        cells.append(kept)
    metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    # 4.4 is the last version without cell ids
    made = NotebookNode(metadata=nbformat.from_dict(metadata), nbformat=4, nbformat_minor=4)
    made.cells = nbformat.from_dict(cells)
    return made


def _merged(outputs: Sequence[NotebookNode]) -> list[NotebookNode]:
    """`outputs` with what was printed in several pieces joined, one stream after the other."""
    merged: list[NotebookNode] = []
    for output in outputs:
        last = merged[-1] if merged else None
        if last and output.output_type == "stream" and last.get("name") == output.name:
            last.text += output.text
        else:
            merged.append(deepcopy(output))
    return merged


def _plain_output(output: NotebookNode) -> dict[str, object]:
    match output.output_type:
        case "stream":
            return {"output_type": "stream", "name": output.name, "text": output.text}
        case "error":
            message = f"{output.ename}: {output.evalue}"
            return {
                "output_type": "error",
                "ename": output.ename,
                "evalue": output.evalue,
                "traceback": message.splitlines(),
            }
        case kind:
            kept = {"text/plain": output.data.get("text/plain", "")}
            if SVG in output.data:
                kept[SVG] = output.data[SVG]
            of_cell = {"execution_count": None} if kind == "execute_result" else {}
            return {"output_type": kind, "data": kept, "metadata": {}, **of_cell}


def canonical(notebook: NotebookNode) -> str:
    """The text of the file that stores `notebook`."""
    lines = split_lines(plain(notebook))
    return json.dumps(lines, sort_keys=True, indent=1, ensure_ascii=False) + "\n"


def shown(notebook: NotebookNode) -> list[str]:
    """The lines that a reader sees under the cells of `notebook`."""
    lines = []
    for number, cell in enumerate(notebook.cells, 1):
        if cell.cell_type != "code":
            continue
        lines.append(f"cell {number}: {cell.source.splitlines()[0] if cell.source else ''}")
        for output in cell.outputs:
            match output.output_type:
                case "stream":
                    text = output.text
                case "error":
                    text = "\n".join(output.traceback)
                case _:
                    text = output.data["text/plain"]
                    if SVG in output.data:
                        drawn = output.data[SVG].encode()
                        text += f"\na drawing of {len(drawn)} bytes, {zlib.crc32(drawn):08x}"
            lines += [f"  {line}" for line in text.splitlines()]
    return lines


def differences(stored: NotebookNode, fresh: NotebookNode) -> str:
    """The lines that `fresh` shows and `stored` does not, and the other way; empty if none."""
    pair = shown(plain(stored)), shown(plain(fresh))
    return "\n".join(difflib.unified_diff(*pair, "stored", "fresh", n=2, lineterm=""))


def complaints(path: Path) -> list[str]:
    """What is not in the form of these notebooks, in the file at `path`."""
    notebook = read(path)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    found = []
    if not re.fullmatch(r"\d\d_[a-z0-9_]+\.ipynb", path.name):
        found.append("a name is two digits and words: 01_layouts.ipynb")
    told, asked = _parts(notebook)
    if not 8 <= len(told) <= 15:
        found.append(f"{len(told)} cells before the exercises: there should be 8 to 15")
    if not any(_is_drawn(cell) for cell in code[:3]):
        found.append("none of the first three code cells draws")
    found += _of_exercises(asked)
    if path.read_text(encoding="utf-8") != canonical(notebook):
        found.append(f"not in canonical form: python -m tests.notebooks --write {path.stem}")
    if not code or not _imports(code[0].source):
        found.append("the first code cell imports")
    for number, cell in enumerate(notebook.cells, 1):
        problems = _of_code(cell) if cell.cell_type == "code" else _of_prose(cell)
        if cell.cell_type == "code" and cell is not code[0] and _imports(cell.source):
            problems.append("imports; the first code cell does")
        found += [f"cell {number} {problem}" for problem in problems]
    return found


def _parts(notebook: NotebookNode) -> tuple[list[NotebookNode], list[NotebookNode]]:
    """The cells before the exercises, and those from there on."""
    cells = notebook.cells
    starts = [i for i, cell in enumerate(cells) if cell.source.startswith("Exercises")]
    return cells[: starts[0]] if starts else cells, cells[starts[0] :] if starts else []


def _is_drawn(cell: NotebookNode) -> bool:
    return any(SVG in output.get("data", {}) for output in cell.outputs)


def _of_exercises(cells: Sequence[NotebookNode]) -> list[str]:
    """Three questions in one cell, an answer to each, and where to go on."""
    if not cells:
        return ["no cell starts with Exercises"]
    found = []
    if re.findall(r"^(\d)\. ", cells[0].source, re.MULTILINE) != ["1", "2", "3"]:
        found.append("the exercises are not 1 to 3")
    for number, cell in enumerate(cells[1:4], 1):
        tagged = ANSWER in cell.metadata.get("tags", [])
        if not (tagged and cell.source.startswith(f"# {number}") and cell.outputs):
            found.append(f"no answer to exercise {number}: tagged {ANSWER!r}, with an output")
    if len(cells) != 5 or "](" not in cells[-1].source:
        found.append("the last cell, after the answers, has links")
    return found


def _imports(source: str) -> bool:
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return False
    return any(isinstance(node, ast.Import | ast.ImportFrom) for node in tree.body)


def _of_code(cell: NotebookNode) -> list[str]:
    found = []
    lines = cell.source.splitlines()
    if len(lines) >= 10:
        found.append(f"has {len(lines)} lines of code: under 10")
    if any(line.lstrip().startswith(("%", "!")) for line in lines):
        found.append("has a magic")
    fails = any(output.output_type == "error" for output in cell.outputs)
    if fails != (FAILS in cell.metadata.get("tags", [])):
        found.append(f"fails without the tag {FAILS!r}" if fails else f"is tagged {FAILS!r}, runs")
    if any(re.search(r"\bat 0x[0-9a-f]+", line) for line in shown(NotebookNode(cells=[cell]))):
        found.append("shows a memory address")
    return found


def _of_prose(cell: NotebookNode) -> list[str]:
    words = len(cell.source.split())
    return [f"has {words} words: under 60"] if words >= 60 else []


def seconds(notebook: NotebookNode) -> list[float]:
    """How long each code cell of an executed notebook took, by the clock of the client."""
    stamps = [cell.metadata["execution"] for cell in notebook.cells if "execution" in cell.metadata]
    ends = "iopub.execute_input", "shell.execute_reply"
    pairs = [
        [datetime.fromisoformat(stamp[end].replace("Z", "+00:00")) for end in ends]
        for stamp in stamps
    ]
    return [(stop - start).total_seconds() for start, stop in pairs]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs notebooks, prints what is stale or out of form, and returns how many are."""
    parser = argparse.ArgumentParser("python -m tests.notebooks", description=__doc__)
    parser.add_argument("--write", action="store_true", help="store the outputs")
    parser.add_argument("names", nargs="*", help="file names, or how they start: 01")
    asked = parser.parse_args(arguments)
    bad = 0
    for name in asked.names:
        if not notebooks([name]):
            parser.error(f"no file in {FOLDER} starts with {Path(name).name!r}")
    for path in notebooks(asked.names):
        begun = time.perf_counter()
        stored = read(path)
        try:
            fresh = executed(stored)
        except CellExecutionError as error:
            bad += 1
            print(f"{path.name}: fails\n{error}", flush=True)
            continue
        stale = differences(stored, fresh)
        if asked.write:
            path.write_text(canonical(fresh), encoding="utf-8")
        found = complaints(path)
        bad += bool(found or (stale and not asked.write))
        state = "same" if not stale else "written" if asked.write else "stale"
        slowest = max(seconds(fresh)[1:], default=0)  # the first one imports
        took = f"{time.perf_counter() - begun:.1f} s, slowest cell {slowest:.1f} s"
        print(f"{path.name}: {state}, {took}")
        lines = [*found, *(() if asked.write else stale.splitlines())]
        print("".join(f"  {line}\n" for line in lines), end="", flush=True)
    return bad


if __name__ == "__main__":
    sys.exit(min(1, main()))
