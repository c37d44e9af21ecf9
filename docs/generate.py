"""Write the parts of the documentation that follow from the code: `python docs/generate.py`.

- A page for each registered architecture, and its line in the site's menu.
- The tables below comments `<!-- table: NAME -->`: architectures, built-in recipes, and the fields of a recipe.
- The right column of the tables in docs/api: first sentences of docstrings. The left column is the list of names.
- The tutorial as a page, from the notebook.

The files are committed. A test fails if they differ from what this script writes.
"""

import dataclasses
import functools
import importlib
import inspect
import itertools
import json
import re
import types
import typing
from pathlib import Path
from typing import Any

from multilin.architectures.base import Architecture, architectures, get_architecture
from multilin.model.config import MultilinConfig
from multilin.model.language_model import MultilinForCausalLM
from multilin.settings import field_help
from multilin.training.recipe import Recipe, builtin_recipes

DOCS = Path(__file__).parent
SITE = DOCS.parent / "mkdocs.yml"
EXAMPLE = {"hidden_size": 256, "num_layers": 6, "vocab_size": 256, "n_positions": 1024}
SIZES = f"hidden size {EXAMPLE['hidden_size']}, {EXAMPLE['num_layers']} layers, one text, float32"
NOTE = "<!-- Written by docs/generate.py from the code: change it there. -->\n\n"
TABLE = re.compile(r"(<!-- table: (.+) -->\n\n)(?:\|.*\n)*")
FIELDS = "| field | type | default | meaning |", "|---|---|---|---|"
API_ROW = re.compile(r"^\| `(multilin\.[\w.]+)` \|.*$", re.MULTILINE)


def pages() -> dict[Path, str]:
    """Every generated file: its path and text."""
    written = {}
    for name, architecture in architectures().items():
        written[DOCS / "architectures" / f"{name}.md"] = NOTE + architecture_page(architecture)
    for path in (DOCS / "architectures" / "index.md", DOCS / "recipes.md"):
        written[path] = TABLE.sub(lambda found: found[1] + _table(found[2]), path.read_text(encoding="utf-8"))
    for path in sorted((DOCS / "api").glob("*.md")):
        written[path] = API_ROW.sub(lambda row: _api_row(row[1]), path.read_text(encoding="utf-8"))
    written[DOCS / "tutorial.md"] = _tutorial()
    written[SITE] = _site()
    return written


def architecture_table() -> str:
    """The registered architectures as a Markdown table."""
    rows = ["| architecture | what it is | state | longest text | source |", "|---|---|---|---|---|"]
    for name, found in architectures().items():
        title = f"[{found.title}]({name}.md) (`{name}`)"
        rows.append(_row([title, _summary(found), _size(_state_bytes(name)[1]), _longest_text(name), found.source]))
    return "\n".join(rows) + "\n"


def first_sentence(path: str) -> str:
    """The first sentence of the docstring of `package.module.name`."""
    module, _, name = path.rpartition(".")
    docstring = inspect.cleandoc(getattr(importlib.import_module(module), name).__doc__)
    return re.split(r"(?<=\.) (?=[A-Z`])", docstring.partition("\n\n")[0].replace("\n", " "), maxsplit=1)[0]


def _api_row(path: str) -> str:
    return _row([f"`{path}`", first_sentence(path).replace("|", "\\|")])


def _row(cells: typing.Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _table(name: str) -> str:
    """The table below `<!-- table: NAME -->`."""
    if name == "architectures":
        return architecture_table()
    if name == "built-in recipes":
        rows = [_row([f"`{recipe}`", _opening_comment(path)]) for recipe, path in builtin_recipes().items()]
        return "\n".join(["| recipe | what it is |", "|---|---|", *rows]) + "\n"
    return _fields(typing.get_type_hints(Recipe)[name])


def _site() -> str:
    """mkdocs.yml with a page for every architecture in its menu."""
    menu = "".join(f"      - {found.title}: architectures/{name}.md\n" for name, found in architectures().items())
    return re.sub(r"(?<=index.md\n)(      - .*: architectures/\w+\.md\n)+", menu, SITE.read_text(encoding="utf-8"))


def architecture_page(architecture: Architecture) -> str:
    """The page of one architecture."""
    what, state, use = _parts(architecture)
    return "\n".join(
        [
            f"# {architecture.title}\n",
            _prose(what),
            "## State\n",
            *([_prose(state)] if state else []),
            f"This table gives the size of the state for {SIZES}:\n",
            _states(architecture),
            "## Limits\n",
            f"- Longest text: {_longest_text(architecture.name)}.",
            "- Several texts in one row (`document_ids`): "
            + ("yes.\n" if architecture.packs else "no, the model refuses them.\n"),
            *([f"## When to use it\n\n{_prose(use)}"] if use else []),
            "## Options of a model\n",
            "Set `model.options` in a recipe, or give `options` to "
            f"`MultilinConfig.from_architecture({architecture.name!r}, ...)`.\n",
            _fields(architecture.preset_options),
            "## Options of a layer\n",
            "Set these options in `layers` of `config.json`. Layers of several architectures make a "
            "[hybrid](../hybrids.md).\n",
            _layer_fields(architecture),
            f"## Source\n\n{architecture.source}.\n",
        ]
    )


def _parts(architecture: Architecture) -> tuple[str, str, str]:
    """What the docstring says: what it is, then what follows "State:" and "When to use:", to the end or the next."""
    pieces = re.split(r"\n\n(State|When to use): ", architecture.description)
    labelled = dict(zip(pieces[1::2], pieces[2::2], strict=True))
    return pieces[0], _sentence(labelled.get("State", "")), _sentence(labelled.get("When to use", ""))


def _sentence(text: str) -> str:
    """With a capital at the start, but for a formula's symbol: `m after the last token`."""
    return text[:1].upper() + text[1:] if text[1:2].isalpha() else text


def _summary(architecture: Architecture) -> str:
    """The docstring's first line without the name in front."""
    line = architecture.description.partition("\n")[0]
    return line.partition(": ")[2].rstrip(".") or line


def _states(architecture: Architecture) -> str:
    rows = ["| variant | options | after 1 token | after 1000 tokens |", "|---|---|---|---|"]
    for variant, options in {"default": {}, **architecture.variants}.items():
        shown = ", ".join(f"`{name}: {_value(value)}`" for name, value in options.items())
        after = " | ".join(map(_size, _state_bytes(architecture.name, variant)))
        rows.append(f"| {variant} | {shown} | {after} |")
    return "\n".join(rows) + "\n"


def _tutorial() -> str:
    """The notebook as Markdown."""
    cells = json.loads((DOCS / "tutorial.ipynb").read_text(encoding="utf-8"))["cells"]
    forms = {"markdown": "{}", "code": "```python\n{}\n```"}
    texts = [forms[cell["cell_type"]].format("".join(cell["source"])) for cell in cells]
    return "\n\n".join([NOTE.strip().replace("the code", "tutorial.ipynb"), *texts]) + "\n"


def _opening_comment(path: Path) -> str:
    """The first sentence or two of a recipe: the comment at its top."""
    lines = itertools.takewhile(lambda line: line.startswith("# "), path.read_text(encoding="utf-8").splitlines())
    return " ".join(line[2:].strip() for line in lines if not line.startswith("#   "))


def _layer_fields(architecture: Architecture) -> str:
    """The options of a layer, as what they have in common with those of a model and a table of the others."""
    of_model, of_layer = _field_rows(architecture.preset_options), _field_rows(architecture.options)
    missing = ", ".join(f"`{name}`" for name in of_model if name not in of_layer)
    own = [row for name, row in of_layer.items() if row != of_model.get(name)]
    sentence = (
        f"A layer takes the options of a model{f' except {missing}' * bool(missing)}{', and also:' if own else '.'}\n"
    )
    return sentence + ("\n" + "\n".join([*FIELDS, *own]) + "\n" if own else "")


def _fields(cls: type) -> str:
    return "\n".join([*FIELDS, *_field_rows(cls).values()]) + "\n"


def _field_rows(cls: type) -> dict[str, str]:
    """The row of a table for each field."""
    rows = {}
    for field in dataclasses.fields(cls):
        hint = typing.get_type_hints(cls, include_extras=True)[field.name]
        kind = _type_name(hint).replace("|", "\\|")
        default = field.default if field.default is not dataclasses.MISSING else field.default_factory()  # type: ignore[misc]
        rows[field.name] = _row([f"`{field.name}`", kind, f"`{_value(default)}`", field_help(cls)[field.name]])
    return rows


def _value(value: Any) -> str:
    """A default or an option as YAML has it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _type_name(kind: Any) -> str:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return " | ".join(map(str, arguments))
    if origin in (typing.Union, types.UnionType):
        return " | ".join("null" if a is type(None) else _type_name(a) for a in arguments)
    if origin is typing.Annotated:
        return " ".join(filter(None, [_type_name(arguments[0]), _range(arguments[1:])]))
    if origin is tuple:
        return "list"
    return getattr(origin or kind, "__name__", str(kind))


def _range(metadata: typing.Sequence[Any]) -> str:
    """`1 to 65,536`, for a type with bounds."""
    words = {"ge": "", "gt": "above ", "le": "", "lt": "below "}
    bounds = {name: getattr(bound, name) for bound in metadata for name in words if hasattr(bound, name)}
    return " to ".join(f"{words[name]}{value:,.10g}" for name, value in bounds.items())


def _prose(text: str) -> str:
    """A docstring as Markdown: indented formulas are blocks of plain text."""
    blocks = []
    for block in text.strip("\n").split("\n\n"):
        lines = block.split("\n")
        if all(line.startswith("    ") for line in lines):
            block = "\n".join(["```text", *(line[4:] for line in lines), "```"])
        blocks.append(block)
    return "\n\n".join(blocks) + "\n"


def _longest_text(name: str) -> str:
    return "no limit" if _config(name).n_positions is None else "`n_positions` tokens"


def _config(name: str, variant: str = "default") -> MultilinConfig:
    options = {"default": {}, **get_architecture(name).variants}[variant]
    return MultilinConfig.from_architecture(name, **EXAMPLE, options=dict(options))


@functools.cache
def _state_bytes(name: str, variant: str = "default") -> tuple[int, int]:
    """After 1 and after 1000 tokens."""
    import torch

    model = MultilinForCausalLM(_config(name, variant)).eval()
    state, sizes = model.new_state(), []
    with torch.no_grad():
        for count in (1, 999):
            model(torch.zeros(1, count, dtype=torch.long), past_key_values=state, logits_to_keep=1)
            sizes.append(state.num_bytes)
    return sizes[0], sizes[1]


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1024:,.1f} KB" if num_bytes < 1024**2 else f"{num_bytes / 1024**2:,.1f} MB"


if __name__ == "__main__":
    for path, text in pages().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(path)
