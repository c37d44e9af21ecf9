"""Writes the pages of the documentation that follow from the code: `python docs/generate.py`.

One page per registered architecture, their table, and the reference of recipes. They are committed, so that they can
be read where no site is built; a test holds them against the code.
"""

import dataclasses
import itertools
import types
import typing
from pathlib import Path
from typing import Any

from multilin.architectures.base import Architecture, architectures
from multilin.model.config import MultilinConfig
from multilin.model.language_model import MultilinForCausalLM
from multilin.settings import field_help
from multilin.training.recipe import Recipe, builtin_recipes

DOCS = Path(__file__).parent
EXAMPLE = {"hidden_size": 256, "num_layers": 6, "vocab_size": 8192, "n_positions": 1024}
NOTE = "<!-- Written by docs/generate.py from the code: change it there. -->\n\n"


def pages() -> dict[Path, str]:
    """Every generated page: its path and text."""
    written = {DOCS / "architectures" / f"{name}.md": _architecture(a) for name, a in architectures().items()}
    written[DOCS / "architectures" / "index.md"] = _overview()
    written[DOCS / "recipes.md"] = _recipes()
    return {path: NOTE + text for path, text in written.items()}


def architecture_table(link: str = "{name}.md") -> str:
    """The registered architectures as a Markdown table; `link` says where the page of one is."""
    rows = ["| architecture | state after any length | longest text | source |", "|---|---|---|---|"]
    for name, architecture in architectures().items():
        longest = "`n_positions`" if _model(name, {}).config.positions == "learned" else "no limit"
        rows.append(
            f"| [{architecture.title}]({link.format(name=name)}) (`{name}`) | {_state_size(name, {})} | {longest} | "
            f"{architecture.source} |"
        )
    return "\n".join(rows) + "\n"


def _overview() -> str:
    sizes = f"hidden size {EXAMPLE['hidden_size']}, {EXAMPLE['num_layers']} layers"
    return (
        "# Architectures\n\n"
        + architecture_table()
        + f"\nState sizes are measured on a model of {sizes}, per text, in float32.\n"
    )


def _architecture(architecture: Architecture) -> str:
    title, _, body = architecture.description.partition("\n")
    variants = {"default": {}, **architecture.variants}
    return "\n".join(
        [
            f"# {architecture.title}\n",
            f"{title.strip()}\n",
            _prose(body),
            f"Source: {architecture.source}.\n",
            "## Options of a model\n",
            "For `model.options` in a recipe, or `options` of "
            f"`MultilinConfig.from_architecture({architecture.name!r}, ...)`.\n",
            _fields(architecture.preset_options),
            "## Options of a layer\n",
            "Each entry of `layers` in a `config.json`; layers of several architectures make a hybrid.\n",
            _fields(architecture.options),
            "## State\n",
            f"Measured: hidden size {EXAMPLE['hidden_size']}, {EXAMPLE['num_layers']} layers, one text, float32.\n",
            "| variant | options | state |\n|---|---|---|",
            *(f"| {name} | `{dict(options)}` | {_state_size(architecture.name, options)} |"
              for name, options in variants.items()),
            "",
        ]
    )  # fmt: skip


def _recipes() -> str:
    text = (
        "# Recipes\n\nA recipe is a YAML file with these fields; every one is also a flag, "
        "`multilin train demo --training.max_steps 50`. `null` stands for the default of the architecture or of the "
        "machine.\n\n## Built in\n\n`multilin train NAME` trains one of these; give your own text with `--data.source`.\n\n"
        "| recipe | what it is |\n|---|---|\n"
    )
    for name, path in builtin_recipes().items():
        text += f"| `{name}` | {_opening_comment(path)} |\n"
    for section in dataclasses.fields(Recipe):
        if dataclasses.is_dataclass(section.type):
            text += f"\n## {section.name}\n\n{field_help(Recipe)[section.name].capitalize()}.\n\n"
            text += _fields(typing.cast(type, section.type))
    return text + f"\n## output\n\n{field_help(Recipe)['output'].capitalize()}.\n"


def _opening_comment(path: Path) -> str:
    """The first sentence or two of a recipe: the comment at its top."""
    lines = itertools.takewhile(lambda line: line.startswith("# "), path.read_text(encoding="utf-8").splitlines())
    return " ".join(line[2:].strip() for line in lines if not line.startswith("#   "))


def _fields(cls: type) -> str:
    rows = ["| field | type | default | meaning |", "|---|---|---|---|"]
    for field in dataclasses.fields(cls):
        kind = _type_name(typing.get_type_hints(cls)[field.name]).replace("|", "\\|")
        default = field.default if field.default is not dataclasses.MISSING else field.default_factory()  # type: ignore[misc]
        shown = "null" if default is None else default
        rows.append(f"| `{field.name}` | {kind} | `{shown}` | {field_help(cls)[field.name]} |")
    return "\n".join(rows) + "\n"


def _type_name(kind: Any) -> str:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return " | ".join(map(str, arguments))
    if origin in (typing.Union, types.UnionType):
        return " | ".join("null" if a is type(None) else _type_name(a) for a in arguments)
    if origin is typing.Annotated:
        return _type_name(arguments[0])
    if origin is tuple:
        return "list"
    return getattr(origin or kind, "__name__", str(kind))


def _prose(text: str) -> str:
    """Indented formulas of a docstring as code blocks."""
    blocks = []
    for block in text.strip("\n").split("\n\n"):
        lines = block.split("\n")
        if all(line.startswith("    ") for line in lines):
            blocks.append("```text\n" + "\n".join(line[4:] for line in lines) + "\n```")
        else:
            blocks.append(block)
    return "\n\n".join(blocks) + "\n"


def _model(name: str, options: Any) -> MultilinForCausalLM:
    config = MultilinConfig.from_architecture(name, **EXAMPLE, options=dict(options))
    return MultilinForCausalLM(config).eval()


def _state_size(name: str, options: Any) -> str:
    import torch

    with torch.no_grad():
        state = _model(name, options)(torch.zeros(1, 1, dtype=torch.long)).past_key_values
    return f"{state.num_bytes / 1024:,.1f} KB"


if __name__ == "__main__":
    for path, text in pages().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(path)
