"""An extension of griffe, which reads the code for the API pages: it makes a list of the attributes of a class.

Our docstrings have a paragraph of lines `name: meaning` or `name, other: meaning`, with further lines indented. Fields
of settings have comments. griffe knows neither form.
"""

import re
from typing import Any

from griffe import Class, Extension

_ENTRY = re.compile(r"\w+(, \w+)*: \S")


class Attributes(Extension):
    """Writes both in the form that griffe knows."""

    def on_class(self, *, cls: Class, **_: Any) -> None:
        """Called by griffe for every class."""
        if cls.docstring is None:
            return
        if any(decorator.callable_path == "multilin.settings.settings" for decorator in cls.decorators):
            cls.docstring.value += "\n\n" + "\n".join(_comments(cls))
        cls.docstring.value = with_sections(cls.docstring.value)


def with_sections(docstring: str) -> str:
    """The docstring with `Attributes:` above each such paragraph, whose lines are indented."""
    return "\n\n".join(map(_section, docstring.split("\n\n")))


def _section(paragraph: str) -> str:
    lines = paragraph.split("\n")
    if not _ENTRY.match(lines[0]) or not all(_ENTRY.match(line) or line.startswith("  ") for line in lines):
        return paragraph
    return "\n".join(["Attributes:", *(f"    {line}" for line in lines)])


def _comments(cls: Class) -> list[str]:
    """`name: meaning` of each field."""
    last_lines = {name: attribute.lines[-1] for name, attribute in cls.attributes.items() if attribute.lines}
    return [f"{name}: {line.partition('  # ')[2]}." for name, line in last_lines.items() if "  # " in line]
