"""The pages of the documentation: their code blocks, the commands in these, and the names of their headings."""

import itertools
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from markdown.extensions.toc import slugify

from multilin.cli.main import VERBS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")),
         *sorted((ROOT / "results").rglob("*.md"))]  # fmt: skip
FENCED = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"""('[^']*'|"(?:\\.|[^"\\])*")|(?<!\S)#.*""")  # after the quotes, in which # begins none
OPERATORS = {"|", "||", "&&", ";", "&", "(", ")", "|&"}
PREFIXES = {"do", "then", "else", "!", "time", "exec", "sudo", "srun", "{"}


class Block(NamedTuple):
    """The text between two fences."""

    language: str
    text: str


def name_of(page: Path) -> str:
    """The path of a page in the project, as in the names of tests."""
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, without the spaces that they are indented by."""
    found = FENCED.findall(page.read_text(encoding="utf-8"))
    return [Block(language, re.sub(rf"(?m)^{indent}", "", text)) for indent, language, text in found]


def prose(page: Path) -> str:
    """A page without its code."""
    return re.sub(r"`[^`\n]+`", "``", FENCED.sub("", page.read_text(encoding="utf-8")))


def anchors(page: Path) -> set[str]:
    """What may follow # in links to a page: headings, as the site and as GitHub name them, and objects of the API."""
    text = FENCED.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ +(.+?)[ #]*$", text, re.MULTILINE)
    shown = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").replace("*", "") for heading in headings]
    on_github = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in shown}
    on_site = {slugify(heading, "-") for heading in shown}
    return on_github & on_site | set(re.findall(r"^::: (\S+)$|<a (?:id|name)=\"([^\"]+)\"", text, re.MULTILINE))


def bash_reads(script: str) -> str:
    """What bash complains about in a script; empty where it can run."""
    return subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True).stderr


def commands(script: str) -> Iterator[str]:
    """The commands of a script, with lines joined that belong together, as those of a loop do; without comments."""
    lines: list[str] = []
    for line in script.splitlines():
        lines += [line] if lines or (line.strip() and not line.startswith("#")) else []
        if lines and not lines[-1].endswith("\\") and not bash_reads("\n".join(lines)):
            yield "\n".join(lines)
            lines = []
    assert not lines, lines


def simple_commands(command: str) -> Iterator[list[str]]:
    """The words of each command that a line has between its pipes, `&&` and brackets, without assignments."""
    command = re.sub(r"<<-?\s*(['\"]?)(\w+)\1(.*?)\n.*?\n\2$", r"\3", command, flags=re.DOTALL | re.MULTILINE)
    command = COMMENT.sub(r"\1", command)
    lexer = shlex.shlex(command.replace("\\\n", " ").replace("\n", " ; "), posix=True, punctuation_chars=True)
    lexer.commenters, lexer.whitespace_split = "", True
    words: list[str] = []
    skips = False
    for word in [*lexer, ";"]:
        if skips:  # a file that is read or written
            skips = False
        elif re.fullmatch(r"[<>&]*[<>][<>&]*", word):
            skips, words = True, words[:-1] if words[-1:] == ["2"] else words
        elif word in OPERATORS:
            yield from [words] if words else []
            words = []
        elif words or not (word in PREFIXES or re.match(r"\w+=", word)):
            words.append(word)


def multilin_call(words: list[str]) -> tuple[str, list[str]] | None:
    """The verb and its arguments, if these are the words of a command that starts multilin; also under torchrun."""
    starts = words[:1] == ["multilin"] or words[0].endswith("/multilin")
    first = (
        1
        if starts
        else next((i + 2 for i, pair in enumerate(itertools.pairwise(words)) if pair == ("-m", "multilin")), None)
    )
    if first is None or not words[first:] or words[first] in ("--version", "--help"):
        return None
    given = [word for word in words[first:] if not word.startswith("${")]  # arrays of words, of scripts
    for number in (2, 1):
        if " ".join(given[:number]) in VERBS:
            return " ".join(given[:number]), given[number:]
    raise AssertionError(f"multilin has no verb {given[0]!r}")
