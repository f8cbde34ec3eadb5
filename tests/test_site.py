"""The documents as a site (mkdocs.yml): complete, without dead links; a reader's browser fetches nothing elsewhere."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

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
    for name in ("mkdocs.yml", "docs/site_hook.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    for page in PAGES:
        (tmp_path / "docs" / f"{page}.md").write_text(f"# {page}\n")
    (tmp_path / "docs" / "other.md").write_text("# Other\n")
    (tmp_path / "README.md").write_text("[a](docs/data.md#data) [b](docs/data.md#b) [c](benchmarks/c.md)\n")
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode != 0
    named = {word for word in ("'#b'", "benchmarks/c.md", "other.md", "'#data'") if word in done.stderr}
    assert named == {"'#b'", "benchmarks/c.md", "other.md"}, done.stderr
