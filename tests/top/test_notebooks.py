"""Tests of the notebooks: what they show is what a clean kernel shows, and all have one form."""

from pathlib import Path

import pytest
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode, v4

from tests import notebooks as machinery
from tests.notebooks import (
    canonical,
    complaints,
    differences,
    executed,
    executed_together,
    notebooks,
    plain,
    read,
)

ALL = notebooks()


def _has_ranks(path: Path) -> bool:
    return any("local_cluster" in cell.source for cell in read(path).cells)


LONG = "11_memory_for_time", "16_a_llama"
"""Those that trace most: gradients within ten budgets, training steps on each of four ranks."""

SHORT = [path for path in ALL if path.stem not in LONG]
PLAIN = [path for path in SHORT if not _has_ranks(path)]
WITH_RANKS = [path for path in SHORT if _has_ranks(path)]


def _together(paths: list[Path]) -> dict[Path, NotebookNode]:
    return dict(zip(paths, executed_together([read(path) for path in paths]), strict=True))


@pytest.fixture(scope="module")
def together() -> dict[Path, NotebookNode]:
    """Short notebooks without ranks, from one kernel: most of the time of one is its imports."""
    return _together(PLAIN)


@pytest.fixture(scope="module")
def together_on_ranks() -> dict[Path, NotebookNode]:
    """Short notebooks with ranks, in the same way."""
    return _together(WITH_RANKS)


def _stale(path: Path, fresh: NotebookNode) -> str:
    stale = differences(read(path), fresh)
    return stale and f"python -m tests.notebooks --write {path.stem}\n{stale}"


@pytest.mark.slow
@pytest.mark.parametrize("path", PLAIN, ids=lambda path: path.stem)
def test_a_notebook_shows_what_it_shows_after_the_others(path: Path, together) -> None:
    assert not _stale(path, together[path])


@pytest.mark.slow
@pytest.mark.mesh
@pytest.mark.parametrize("path", WITH_RANKS, ids=lambda path: path.stem)
def test_a_notebook_with_ranks_shows_what_it_shows_after_the_others(
    path: Path, together_on_ranks
) -> None:
    assert not _stale(path, together_on_ranks[path])


@pytest.mark.slow
@pytest.mark.mesh
@pytest.mark.deep
@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
def test_a_notebook_shows_what_a_clean_kernel_shows(path: Path) -> None:
    assert not _stale(path, executed(read(path)))


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
def test_a_notebook_is_in_the_form_of_all(path: Path) -> None:
    assert complaints(path) == []


def test_notebooks_are_numbered_from_one() -> None:
    assert [int(path.name[:2]) for path in ALL] == list(range(1, len(ALL) + 1))


def _notebook(*sources: str, tags: tuple[str, ...] = ()) -> NotebookNode:
    """One prose cell, and a code cell for each of `sources`, the last of them with `tags`."""
    cells = [v4.new_markdown_cell("# Title"), *map(v4.new_code_cell, sources)]
    cells[-1].metadata["tags"] = list(tags)
    return v4.new_notebook(cells=cells)


def _with_exercises(notebook: NotebookNode) -> NotebookNode:
    """The notebook with three exercises, their answers and a link after it."""
    cells = [v4.new_code_cell(f"# {i}: so\n{i}") for i in (1, 2, 3)]
    for cell in cells:
        cell.metadata["tags"] = ["answer"]
    notebook.cells += [v4.new_markdown_cell("Exercises:\n\n1. a\n2. b\n3. c"), *cells]
    notebook.cells.append(v4.new_markdown_cell("Next: [two](02_x.ipynb)"))
    return notebook


@pytest.fixture(scope="module")
def ran() -> NotebookNode:
    """A notebook that prints, returns and fails, executed."""
    sources = (
        "import sys\nfrom IPython.display import HTML, display",
        'for i in range(3):\n    print("line", i, flush=True)\nprint("warned", file=sys.stderr)',
        "display(HTML('<b>bold</b>'))\n[1, 2]",
        'raise ValueError("two\\nlines")',
    )
    return executed(_notebook(*sources, tags=("raises-exception",)))


def test_text_is_kept_of_outputs_and_nothing_else(ran: NotebookNode) -> None:
    outputs = [output for cell in plain(ran).cells[1:] for output in cell.outputs]
    assert outputs == [
        {"output_type": "stream", "name": "stdout", "text": "line 0\nline 1\nline 2\n"},
        {"output_type": "stream", "name": "stderr", "text": "warned\n"},
        {
            "output_type": "display_data",
            "data": {"text/plain": "<IPython.core.display.HTML object>"},
            "metadata": {},
        },
        {
            "output_type": "execute_result",
            "data": {"text/plain": "[1, 2]"},
            "metadata": {},
            "execution_count": None,
        },
        {
            "output_type": "error",
            "ename": "ValueError",
            "evalue": "two\nlines",
            "traceback": ["ValueError: two", "lines"],
        },
    ]


def test_the_canonical_form_is_read_back_as_itself(ran: NotebookNode) -> None:
    text = canonical(ran)
    again = v4.reads(text)
    assert canonical(again) == text
    assert again == plain(ran)
    assert text.endswith("}\n")


def test_the_canonical_form_has_no_ids_and_counts_and_its_keys_are_sorted() -> None:
    notebook = _notebook("x", tags=("raises-exception",))
    notebook.cells.pop(0)
    notebook.cells[0].execution_count = 3
    assert canonical(notebook) == CANONICAL


def test_stale_output_is_told_line_by_line(ran: NotebookNode) -> None:
    stored = plain(ran)
    assert differences(stored, ran) == ""
    stored.cells[2].outputs[0].text = "line 0\nline one\nline 2\n"
    assert differences(stored, ran) == STALE


def test_a_cell_that_fails_without_the_tag_stops_the_run() -> None:
    with pytest.raises(CellExecutionError, match="ZeroDivisionError"):
        executed(_notebook("1 / 0"))


def test_writing_stores_what_a_run_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "01_sums.ipynb"
    drawn = "from IPython.display import SVG\nSVG('<svg/>')"  # loads nothing of fdtensor
    some = _notebook(drawn, "x = 1", "x < 2", *["x += x"] * 4)
    path.write_text(canonical(_with_exercises(some)))
    monkeypatch.setattr(machinery, "FOLDER", tmp_path)

    assert machinery.main(["01"]) == 1
    assert "01_sums.ipynb: stale" in capsys.readouterr().out
    assert machinery.main(["--write", "01"]) == 0
    assert machinery.main([]) == 0
    assert "01_sums.ipynb: same" in capsys.readouterr().out
    assert read(path).cells[3].outputs[0].data["text/plain"] == "True"
    with pytest.raises(SystemExit):
        machinery.main(["02"])


@pytest.mark.parametrize(
    ("name", "sources", "tags", "said"),
    [
        ("layouts.ipynb", (), (), "a name is two digits and words: 01_layouts.ipynb"),
        (
            "01_x.ipynb",
            ("x = 1",) * 15,
            (),
            "16 cells before the exercises: there should be 8 to 15",
        ),
        ("01_x.ipynb", ("x = 1",), (), "2 cells before the exercises: there should be 8 to 15"),
        ("01_x.ipynb", ("x = 1",), (), "the first code cell imports"),
        ("01_x.ipynb", ("x = 1",), (), "none of the first three code cells draws"),
        ("01_x.ipynb", ("x = 1",), (), "no cell starts with Exercises"),
        ("01_x.ipynb", ("import os", "import sys"), (), "cell 3 imports; the first code cell does"),
        ("01_x.ipynb", ("x = 1\n" * 10,), (), "cell 2 has 10 lines of code: under 10"),
        ("01_x.ipynb", ("%time 1",), (), "cell 2 has a magic"),
        (
            "01_x.ipynb",
            ("x = 1",),
            ("raises-exception",),
            "cell 2 is tagged 'raises-exception', runs",
        ),
    ],
)
def test_what_is_out_of_form_is_told(
    tmp_path: Path, name: str, sources: tuple[str, ...], tags: tuple[str, ...], said: str
) -> None:
    path = tmp_path / name
    path.write_text(canonical(_notebook(*sources, tags=tags)))
    assert said in complaints(path)


def test_exercises_have_answers_that_run_and_links(tmp_path: Path) -> None:
    notebook = _with_exercises(_notebook("x"))
    answers, path = notebook.cells[3:6], tmp_path / "01_x.ipynb"

    def said() -> set[str]:
        path.write_text(canonical(notebook))
        return {told for told in complaints(path) if "exercise" in told or "links" in told}

    for cell in answers:
        cell.outputs = [v4.new_output("execute_result", {"text/plain": "1"}, execution_count=7)]
    few = "2 cells before the exercises: there should be 8 to 15"
    assert said() == {few}
    assert read(path).cells[3].metadata["jupyter"] == {"source_hidden": True}  # JupyterLab folds it

    notebook.cells[2].source = "Exercises:\n\n1. a\n2. b"
    answers[0].source, answers[1].outputs, answers[2].metadata["tags"] = "1", [], []
    notebook.cells[-1].source = "The end"
    assert said() == {
        few,
        "the exercises are not 1 to 3",
        "the last cell, after the answers, has links",
        *(f"no answer to exercise {i}: tagged 'answer', with an output" for i in (1, 2, 3)),
    }


def test_drawings_are_kept_and_told_apart_by_their_bytes() -> None:
    notebook = executed(_notebook("import fdtensor as fd\nfd.show(fd.Mesh(dp=2))"))
    stored = plain(notebook)
    (output,) = stored.cells[1].outputs
    assert set(output.data) == {"text/plain", "image/svg+xml"}
    assert output.data["image/svg+xml"].startswith("<svg xmlns")
    assert differences(stored, notebook) == ""
    output.data["image/svg+xml"] = output.data["image/svg+xml"].replace("dp=0", "dp=7")
    (_, _, _, *lines) = differences(stored, notebook).splitlines()
    assert [line[:12] for line in lines if line[0] in "+-"] == ["-  a drawing", "+  a drawing"]


def test_long_prose_counts_and_addresses_are_out_of_form(tmp_path: Path) -> None:
    notebook = _notebook("object()")
    notebook.cells[0].source = "word " * 60
    result = {"text/plain": "<object object at 0x7f00>"}
    notebook.cells[1].outputs = [v4.new_output("execute_result", result, execution_count=7)]
    path = tmp_path / "01_x.ipynb"
    path.write_text(v4.writes(notebook))
    assert set(complaints(path)) >= {
        "not in canonical form: python -m tests.notebooks --write 01_x",
        "cell 1 has 60 words: under 60",
        "cell 2 shows a memory address",
    }


STALE = """\
--- stored
+++ fresh
@@ -2,5 +2,5 @@
 cell 3: for i in range(3):
   line 0
-  line one
+  line 1
   line 2
   warned"""

CANONICAL = """\
{
 "cells": [
  {
   "cell_type": "code",
   "execution_count": null,
   "metadata": {
    "tags": [
     "raises-exception"
    ]
   },
   "outputs": [],
   "source": [
    "x"
   ]
  }
 ],
 "metadata": {
  "kernelspec": {
   "display_name": "Python 3",
   "language": "python",
   "name": "python3"
  },
  "language_info": {
   "name": "python"
  }
 },
 "nbformat": 4,
 "nbformat_minor": 4
}
"""
