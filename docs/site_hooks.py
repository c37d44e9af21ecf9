"""Hooks of mkdocs, which put the pages of results/ on the site."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]


def on_files(files: Files, *, config: Any) -> Files:
    """Adds results/*.md and their images."""
    for path in sorted([*ROOT.glob("results/*.md"), *ROOT.glob("results/images/*")]):
        name = path.relative_to(ROOT).as_posix()
        files.append(File.generated(config, name.replace("README", "index"), abs_src_path=str(path)))
    return files


def on_page_markdown(text: str, *, page: Any, **_: Any) -> str:
    """Links between docs/ and results/ as they are on the site, where results/ lies in docs/."""
    if page.file.src_uri.startswith("results/"):
        return text.replace("](../docs/", "](../").replace("](README.md", "](index.md")
    return re.sub(r"\]\(\.\./((?:\.\./)*results/)(README(?=\.md))?", lambda m: f"]({m[1]}{'index' * bool(m[2])}", text)
