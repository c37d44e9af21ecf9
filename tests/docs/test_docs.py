"""The documentation tells the truth: generated pages are fresh, and what the README names exists."""

import re
from pathlib import Path

import pytest

from multilin.training.recipe import builtin_recipes
from tests.docs.generator import generate

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted(ROOT.glob("results/*.md")),
]


def test_generated_pages_follow_the_code() -> None:
    for path, text in generate.pages().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name} is stale: run python docs/generate.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_to_files_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_name_what_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"^make (\w+)", text, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    commands = "\n".join(re.findall(r"```bash\n(.*?)```", text, re.DOTALL))
    verbs = re.findall(r"^\S*multilin (\w+)", commands, re.MULTILINE)
    surface = (ROOT / "tests" / "cli" / "surface.txt").read_text(encoding="utf-8")
    assert all(verb in surface for verb in verbs)
    for recipe in re.findall(r"^\S*multilin train (\w+)(?: |$)", commands, re.MULTILINE):
        assert recipe in builtin_recipes()
