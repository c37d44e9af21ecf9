"""The documentation tells the truth: generated pages are fresh, and what the README names exists."""

import importlib.util
import re
from pathlib import Path

import pytest

from multilin import architectures
from multilin.training.recipe import builtin_recipes

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def load_generator():
    spec = importlib.util.spec_from_file_location("generate_docs", ROOT / "docs" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_pages_follow_the_code() -> None:
    for path, text in load_generator().pages().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name} is stale: run python docs/generate.py"


def test_the_readme_lists_the_registered_architectures() -> None:
    rows = re.findall(r"^\| .*?\| `(\w+)` \|.*ready", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(rows) == sorted(architectures())


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
