"""Architectures stay short and say what they are: one file each, and what needs more belongs into layers or ops."""

import ast
import io
import tokenize
from pathlib import Path

import pytest

from multilin.architectures import base
from multilin.architectures.base import architectures
from multilin.settings import field_help
from tests.docs.generator import generate

FILES = sorted(path for path in Path(base.__file__).parent.glob("*.py") if path.name not in ("base.py", "__init__.py"))
MOST_CODE, MOST_LINES = 150, 190
NO_CODE = (
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER
)  # fmt: skip


def code_lines(text: str) -> set[int]:
    """The numbers of the lines that hold code: no docstrings, nor comments alone, nor blank lines."""
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type not in NO_CODE]
    lines = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(text)):
        for part in getattr(node, "body", []) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) else []:
            if isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant):
                lines -= set(range(part.lineno, part.end_lineno + 1))
    return lines


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_an_architecture_fits_on_a_few_screens(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(code_lines(text)) <= MOST_CODE
    assert len(text.splitlines()) <= MOST_LINES


def test_code_lines_are_counted() -> None:
    assert code_lines('"""A\nfile."""\n\n# A comment.\nx = """a\nb"""  # one\n\ndef f():\n    """F."""\n') == {5, 6, 8}


@pytest.mark.parametrize("name", architectures())
def test_pages_have_their_sections(name: str) -> None:
    page = generate.architecture_page(architectures()[name])
    assert "## State\n\nMeasured" not in page, "the docstring of the file has no paragraph that starts with `State:`"
    sections = ["State", "Limits", "When to use it", "Options of a model", "Options of a layer", "Source"]
    assert [line[3:] for line in page.splitlines() if line.startswith("## ")] == sections


@pytest.mark.parametrize("name", architectures())
def test_options_have_comments(name: str) -> None:
    for options in (architectures()[name].options, architectures()[name].preset_options):
        assert all(field_help(options).values()), f"a field of {options.__name__} has no comment, which is its help"
