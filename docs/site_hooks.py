"""Hooks of mkdocs: they put results/ on the site, and whole docstrings below the tables of docs/api."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
API_NAME = re.compile(r"^\| `(multilin\.[\w.]+)`", re.MULTILINE)


def on_files(files: Files, *, config: Any) -> Files:
    """Adds results/*.md and their images."""
    for path in sorted([*ROOT.glob("results/*.md"), *ROOT.glob("results/images/*")]):
        name = path.relative_to(ROOT).as_posix()
        files.append(File.generated(config, name.replace("README", "index"), abs_src_path=str(path)))
    return files


def on_page_markdown(text: str, *, page: Any, **_: Any) -> str:
    """Adds docstrings to the API pages, and adapts links to results/, which lies in docs/ on the site."""
    if page.file.src_uri.startswith("api/"):
        blocks = [f"::: {name}" for name in API_NAME.findall(text)]
        return "\n\n".join([API_NAME.sub(r"| [`\1`][\1]", text), *blocks])
    if page.file.src_uri.startswith("results/"):
        return text.replace("](../docs/", "](../").replace("](README.md", "](index.md")
    return re.sub(r"\]\(\.\./((?:\.\./)*results/)(README(?=\.md))?", lambda m: f"]({m[1]}{'index' * bool(m[2])}", text)
