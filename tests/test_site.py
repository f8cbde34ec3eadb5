"""The documents as a site (mkdocs.yml): complete, without dead links; a reader's browser fetches nothing elsewhere."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from html.parser import HTMLParser
from itertools import groupby
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.conftest import ROOT

pytest.importorskip("mkdocs", reason="mkdocs is not installed")
PAGES = sorted(path.stem for path in (ROOT / "docs").glob("*.md"))


def build(source: Path, site: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", site]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True)


def test_site_has_every_page_and_fetches_nothing_elsewhere(tmp_path):
    done = build(ROOT, tmp_path)
    assert done.returncode == 0, done.stderr
    assert {page for page in PAGES if not (tmp_path / f"{page}.html").exists()} == set()
    assert "repository/benchmarks/results/" in (tmp_path / "training.html").read_text(), "links that leave docs/"
    pages = [page.read_text() for page in tmp_path.rglob("*.html")]
    assert len(pages) > len(PAGES)
    assert re.findall(r'<(?:script|link|img)[^>]*="(?:https?:)?//[^"]*"', "".join(pages)) == []


def test_site_with_dead_links_is_not_built(tmp_path):
    """A file of the repository that is gone, a heading that is none, and a page that is not in the menu."""
    (tmp_path / "docs").mkdir()
    for name in ("mkdocs.yml", "pyproject.toml", "docs/site_hook.py", "docs/my_proteins.ipynb"):
        shutil.copy(ROOT / name, tmp_path / name)
    for page in PAGES:
        (tmp_path / "docs" / f"{page}.md").write_text(f"# {page}\n")
    (tmp_path / "docs" / "other.md").write_text("# Other\n")
    (tmp_path / "README.md").write_text("[a](docs/data.md#data) [b](docs/data.md#b) [c](benchmarks/c.md)\n")
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode != 0
    named = {word for word in ("'#b'", "benchmarks/c.md", "other.md", "'#data'") if word in done.stderr}
    assert named == {"'#b'", "benchmarks/c.md", "other.md"}, done.stderr


class Parsed(HTMLParser):
    """Of a page: links and sources, palette inputs, and words of the footer's copyright."""

    def __init__(self, page: Path):
        super().__init__()
        self.addresses, self.palettes, self.images, self.within, self.footer = [], [], 0, 0, ""
        self.feed(page.read_text())

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.addresses += [found[name] for name in ("href", "src") if found.get(name)]
        if found.get("name") == "__palette":
            self.palettes.append(found["data-md-color-scheme"])
        self.images += tag == "img" and found["src"].startswith("data:image/png;base64,")
        self.within += tag == "div" and (self.within > 0 or found.get("class") == "md-copyright")

    def handle_endtag(self, tag):
        self.within -= tag == "div" and self.within > 0

    def handle_data(self, text):
        self.footer += text * (self.within > 0)


def test_site_has_version_dark_mode_repository_notebook_and_search(tmp_path, monkeypatch):
    monkeypatch.setenv("SITE_REPOSITORY", "https://example.org/owner/name")
    done = build(ROOT, tmp_path)
    assert done.returncode == 0, done.stderr
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    home, deep, notebook = (
        Parsed(tmp_path / page)
        for page in ("index.html", "repository/benchmarks/results/step_model.html", "my_proteins.html")
    )
    for page, up in ((home, ""), (deep, "../../../")):
        assert page.palettes == ["default", "slate"]
        assert f"Version {version}" in page.footer
        assert "https://example.org/owner/name" in page.addresses
        assert {f"{up}iframe-worker.js", f"{up}site.css"} <= set(page.addresses)
    cells = json.loads((ROOT / "docs" / "my_proteins.ipynb").read_text())["cells"]
    pictures = sum("image/png" in output.get("data", {}) for cell in cells for output in cell.get("outputs", []))
    assert notebook.images == pictures > 0
    assert "my_proteins.html" in home.addresses
    # What a search reads in a site that is opened from a folder.
    index = (tmp_path / "search" / "search_index.js").read_text()
    assert index.startswith("var __index = {")
    documents = json.loads(index.removeprefix("var __index = "))["docs"]
    assert any("price_per_gpu_hour" in entry["text"] for entry in documents)


def test_site_has_no_link_to_a_file_that_is_not_there(tmp_path):
    assert build(ROOT, tmp_path).returncode == 0
    missing = set()
    for page in tmp_path.rglob("*.html"):
        for address in Parsed(page).addresses:
            path = address.partition("#")[0].partition("?")[0]
            if path and ":" not in path and page.name != "404.html" and not (page.parent / unquote(path)).exists():
                missing.add((str(page.relative_to(tmp_path)), address))
    assert missing == set()


COLUMN = 690  # px of text beside both menus at 1,280 px: 61 rem less two menus of 12.1 and margins, of 20 px
LETTER, PADDING = 7.2, 14.1  # px at most of a digit or letter at .64 rem, and of a cell's sides (docs/site.css)


def test_tables_of_sizes_fit_a_window_of_1280_pixels():
    """No browser here: a column is as wide as its longest word, and code breaks anywhere (docs/site.css)."""
    css = (ROOT / "docs" / "site.css").read_text()
    assert "white-space: pre-wrap" in css, "commands wrap"
    assert "min-width: 0" in css, "else a heading takes 100 px"
    lines = (ROOT / "docs" / "sizes.md").read_text().splitlines()
    tables = [list(rows) for is_row, rows in groupby(lines, lambda line: line.startswith("|")) if is_row]
    assert len(tables) == 4
    for table in tables:
        cells = [re.sub(r"`[^`]*`", "", row).strip("|").split("|") for row in table if not row.startswith("|--")]
        widths = [
            max(len(word) for cell in column for word in [*cell.split(), ""]) for column in zip(*cells, strict=True)
        ]
        assert sum(width * LETTER + PADDING for width in widths) < COLUMN, table[0]
