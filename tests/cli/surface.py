"""The verbs and flags of the command line as text; `python -m tests.cli.surface` writes surface.txt anew."""

from pathlib import Path

from multilin.cli.arguments import flags
from multilin.cli.main import VERBS

FILE = Path(__file__).with_name("surface.txt")


def surface() -> str:
    """One line per verb and per flag, with what it takes and its default."""
    lines = []
    for verb, function in VERBS.items():
        lines.append(f"multilin {verb}")
        lines += [f"  {flag.text} {flag.takes}".rstrip() for flag in flags(function)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    FILE.write_text(surface(), encoding="utf-8")
