"""The site of texts and docstrings: every public name is on a page, and mkdocs warns of nothing."""

import inspect

import pytest

import fdtensor
from tests.pages import build, pages


def test_every_public_name_is_on_a_page():
    texts = dict(pages())
    for name in sorted({*dir(fdtensor)} - {"__version__"}):
        value = getattr(fdtensor, name)
        if not inspect.ismodule(value):
            assert f"::: fdtensor.{name}" in texts["api/fdtensor.md"].splitlines()
            continue
        lines = texts[f"api/{name}.md"].splitlines()
        assert [n for n in value.__all__ if f"::: fdtensor.{name}.{n}" not in lines] == []


def test_links_lead_to_pages_or_are_text():
    texts = dict(pages())
    assert "[The manual](manual.md)" in texts["index.md"]
    assert "[the README](index.md)" in texts["manual.md"]
    assert not any("](notebooks)" in text for text in texts.values())


@pytest.mark.slow
def test_the_pages_are_built_without_a_warning(tmp_path):
    assert build(tmp_path) == len(list(pages()))
    page = (tmp_path / "api" / "plans.html").read_text()
    assert '<pre><code class="language-pycon">&gt;&gt;&gt; ' in page
    assert "AllGather" in page
    assert "[A] [B]  -&gt;  [A B] [A B]" in page
