"""mkdocs' hook: links of the pages to files of the repository also work on the site.

README.md is the site's home, and the notebook a page with its pictures; the footer has the version. Other files that
pages link to are copied to repository/ beside the pages, Markdown as pages, and so are the files that these link to;
of a folder its README.md, or else a list.
"""

from __future__ import annotations

import json
import posixpath
import re
import tomllib
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(\]\()([^)\s#:]+)((?:#[^)\s]*)?\))")
HOME = "README.md"


def site_path(path: str) -> str:
    """Where a file of the repository lies in the site's sources: docs/a.md -> a.md, LICENSE -> repository/LICENSE."""
    if path == HOME:
        return "index.md"
    if path.endswith(".ipynb"):
        return path.removeprefix("docs/").replace(".ipynb", ".md")
    if (ROOT / path).is_dir():
        return f"repository/{path}/index.md"
    return path.removeprefix("docs/") if path.startswith("docs/") else f"repository/{path}"


def text_of(path: str) -> str:
    """The Markdown of a page, or of the list of a folder's files; "" of another file."""
    if (ROOT / path).is_dir():
        names = sorted(entry.name for entry in (ROOT / path).iterdir() if entry.is_file())
        return f"# {path}\n\n" + "".join(f"- [{name}]({name})\n" for name in names)
    if path.endswith(".ipynb"):
        return notebook((ROOT / path).read_text(encoding="utf-8"))
    return (ROOT / path).read_text(encoding="utf-8") if path.endswith(".md") else ""


def notebook(text: str) -> str:
    """A notebook as Markdown: code in fences, and the outputs' pictures, or text where they have none."""
    parts = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if picture := data.get("image/png"):
                parts.append(f"![Figure](data:image/png;base64,{''.join(picture).replace(chr(10), '')})")
            elif words := "".join(data.get("text/plain", output.get("text", ""))):
                parts.append(f"```text\n{words.rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    config.copyright = f"Version {project['version']}"
    return config


def target_of(path: str, link: str) -> str | None:
    """The file of the repository that a link of one of its files leads to; None if there is none."""
    folder = path if (ROOT / path).is_dir() else posixpath.dirname(path)
    target = posixpath.normpath(posixpath.join(folder, link))
    if target.startswith("..") or not (ROOT / target).exists():
        return None
    readme = posixpath.normpath(posixpath.join(target, "README.md"))
    return readme if (ROOT / readme).is_file() else target


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the README, and what is reached from it and from the pages."""
    to_do, sources = [HOME, *(f"docs/{file.src_uri}" for file in files.documentation_pages())], {}
    while to_do:
        path = to_do.pop()
        if path not in sources.values():
            sources[site_path(path)] = path
            to_do += filter(None, (target_of(path, link) for _, link, _ in LINK.findall(text_of(path))))
    for name, path in sources.items():
        if files.get_file_from_path(name) is None:
            level = InclusionLevel.INCLUDED if path == HOME else InclusionLevel.NOT_IN_NAV
            of = {"content": text_of(path)} if text_of(path) else {"abs_src_path": str(ROOT / path)}
            files.append(File.generated(config, name, inclusion=level, **of))
    config.extra["sources"] = sources
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point its links at where their files lie on the site."""
    path, here = config.extra["sources"][page.file.src_uri], posixpath.dirname(page.file.src_uri) or "."

    def moved(match: re.Match[str]) -> str:
        target = target_of(path, match[2])
        return match[0] if target is None else match[1] + posixpath.relpath(site_path(target), here) + match[3]

    return LINK.sub(moved, markdown)
