"""Templates of reports, and the CSS and JavaScript that are copied into reports; all are in the folder assets."""

import functools
from importlib import resources
from typing import Any

import jinja2

from multilin.errors import plural
from multilin.settings.inputs import to_json


def asset(name: str) -> str:
    """The text of a file in the folder assets."""
    return (resources.files("multilin.analysis") / "assets" / name).read_text(encoding="utf-8")


def render(name: str, **values: Any) -> str:
    """Fill a template. HTML templates escape values; Markdown templates use the filters `text`, `cell` and `block`."""
    return _environment().get_template(name).render(values)


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(asset),
        autoescape=lambda name: name is None or name.endswith(".html.jinja"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )
    environment.filters |= {"plural": plural, "text": _as_text, "cell": _as_cell, "block": _as_block}
    environment.policies["json.dumps_function"] = to_json
    return environment


def _as_text(text: str) -> str:
    """The text with Markdown's special characters escaped."""
    return "".join(f"\\{character}" if character in "\\`*_<>[]" else character for character in text)


def _as_cell(text: str) -> str:
    """The text escaped for a cell of a Markdown table."""
    return _as_text(text).replace("|", "\\|")


def _as_block(text: str, language: str) -> str:
    """A Markdown code block, with a longer fence than any fence in the text."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"
