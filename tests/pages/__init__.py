"""`python -m tests.pages [--out DIR]`: the README, the manual and the API as a site, by mkdocs.

The API has a page for the names that are used daily and one for each namespace, built from the
docstrings. What mkdocs warns of is an error.
"""

from __future__ import annotations

import argparse
import inspect
import logging
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

import fdtensor

__all__ = ["build", "pages"]

ROOT = Path(fdtensor.__file__).parents[1]

TEXTS = {
    "index.md": ROOT / "README.md",
    "manual.md": ROOT / "notebooks" / "MANUAL.md",
    "results.md": ROOT / "tests" / "bench" / "RESULTS.md",
    "operators.md": ROOT / "tests" / "operators" / "TABLE.md",
    "contributing.md": ROOT / "CONTRIBUTING.md",
    "changes.md": ROOT / "CHANGELOG.md",
}
"""The pages that are files of the repository."""


def pages() -> Iterator[tuple[str, str]]:
    """The path and the Markdown of each page."""
    for path, source in TEXTS.items():
        yield path, _linked(source)
    yield "api/fdtensor.md", _api("fdtensor", fdtensor)
    for name in dir(fdtensor):
        value = getattr(fdtensor, name)
        if inspect.ismodule(value):
            yield f"api/{name}.md", _api(f"fdtensor.{name}", value)


def _linked(source: Path) -> str:
    """The text of a file; links to other pages lead there, those to other files are plain text."""
    homes = {path.resolve(): page for page, path in TEXTS.items()}

    def link(match: re.Match[str]) -> str:
        text, target = match.groups()
        page = homes.get((source.parent / target).resolve())
        return match[0] if "://" in target else f"[{text}]({page})" if page else text

    return re.sub(r"\[([^\]]+)\]\(([^)#]+)\)", link, source.read_text())


def _api(title: str, module: ModuleType) -> str:
    """The page of a namespace: what it says of itself, then each of its names."""
    named = [(name, getattr(module, name)) for name in module.__all__]
    lines = [f"# {title}", "" if module is fdtensor else inspect.getdoc(module) or ""]
    for name, value in named:
        if not inspect.ismodule(value):
            lines.append(f"::: {title}.{name}")
    return "\n\n".join(lines)


def build(out: Path) -> int:
    """Builds the site in a folder and returns how many pages it has; raises where mkdocs warns."""
    from mkdocs.commands.build import build as mkdocs_build
    from mkdocs.config import load_config

    with tempfile.TemporaryDirectory() as folder:
        written = list(pages())
        for path, text in written:
            target = Path(folder, "docs", path)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
        Path(folder, "mkdocs.yml").write_text("site_name: fdtensor\n")
        options = {
            "docstring_style": None,
            "extensions": ["tests.pages.examples"],
            "heading_level": 2,
            "separate_signature": True,
            "show_labels": False,
            "show_root_full_path": False,
            "show_root_heading": True,
            "show_signature_annotations": True,
            "show_source": False,
        }
        config = load_config(
            str(Path(folder, "mkdocs.yml")),
            site_dir=str(out),
            strict=True,
            use_directory_urls=False,
            theme={"name": "mkdocs", "highlightjs": False},
            plugins=[{"mkdocstrings": {"handlers": {"python": {"options": options}}}}],
        )
        mkdocs_build(config)
    return len(written)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m tests.pages", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/pages"), help="the folder")
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    out = parser.parse_args(arguments).out
    print(f"{build(out.resolve())} pages in {out}")
    return 0
