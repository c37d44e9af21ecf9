"""Writes the pages of the documentation that follow from the code: `python docs/generate.py`.

One page per registered architecture, their table here and in the README and their place in the menu, the reference of
recipes, and the tutorial as a page.
They are committed, so that they can be read where no site is built; a test holds them against the code.
"""

import dataclasses
import functools
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
README, SITE = DOCS.parent / "README.md", DOCS.parent / "mkdocs.yml"
EXAMPLE = {"hidden_size": 256, "num_layers": 6, "vocab_size": 256, "n_positions": 1024}
SIZES = f"hidden size {EXAMPLE['hidden_size']}, {EXAMPLE['num_layers']} layers, one text, float32"
RECIPES = """\
# Recipes

A recipe is a YAML file with the fields below. Those that it leaves out have their defaults, where `null` stands for the
default of the architecture or of the machine:

```yaml
model: {architecture: elita, hidden_size: 192, num_layers: 4}
data: {source: my-books/}
training: {max_steps: 2000}
output: runs/books
```

- **Flags**: every field is also a flag, `multilin train demo --training.max_steps 50`, and so are options of an
  architecture, `--model.options.num_heads 8`. Lists and sections have the syntax of YAML,
  `--optimizer.betas '[0.9, 0.98]'`.
- **Another choice**: what a recipe gives for one architecture, optimizer, schedule or tokenizer is dropped where a flag
  names another: `multilin train tscale --model.architecture elita` has ELiTA's options and learning rate. A warning
  names the fields that are dropped. Fields of one file that contradict each other are refused.
- **Syntax**: of YAML the plain part is read, up to 1 MB: numbers, texts, true, false, null, lists and sections. `1e-3`
  is a number, `yes` and `12:30` are texts; aliases, tags and repeated names are refused.
- **Empty sections**, such as `optimizer:` with all its lines commented out, have their defaults; in a row of a sweep
  they change nothing.
- **Checks**: fields outside their bounds, and models that this machine has no memory for, are refused before any work.

## Built in

`multilin train NAME` trains one of these; give your own text with `--data.source`.

| recipe | what it is |
|---|---|
"""
NOTES = {
    "model": """
`options` are on the page of each [architecture](architectures/index.md), `layers` make a [hybrid](hybrids.md), and a
run with `start` [begins with a trained model](fine-tune.md).

`config` takes the fields of [MultilinConfig](api/model.md), and for the baselines `initializer_range`,
`tie_word_embeddings`, `output_bias` and, of llama, `unit_variance`. `output_bias: unigram` adds log((n + 1) / (N + V))
to the logit of each token, where n is how often it occurs among the N tokens of the training text and V is the size of
the vocabulary. It is fixed, and training begins where a model without it
[has to arrive first](compare.md#an-output-bias-of-the-token-counts).
""",
    "data": """
[Your own text](index.md#your-own-text) lists what can be a `source`, and [Prepare large text](prepare.md#train-on-it)
shows a `mix`.
""",
    "optimizer": """
[Optimizers](optimizers.md) has the updates, the defaults, and the courses of `schedule`.
""",
    "training": """
More on `minutes`: [Train within a given time](minutes.md#any-recipe-can-end-by-the-clock); `precision`, `quantization`,
`master` and `communication`: [Precision](precision.md); `global_batch_size` and `shard`: [Several devices](devices.md);
`lora`: [Adapters](fine-tune.md#adapters); `report_to`: [Follow a run](clusters.md#follow-a-run).
""",
}
"""What follows the table of a section of recipes."""
NOTE = "<!-- Written by docs/generate.py from the code: change it there. -->\n\n"
TABLE = "<!-- The table is written by docs/generate.py. -->\n\n", "\n<!-- End of the table. -->"


def pages() -> dict[Path, str]:
    """Every generated file: its path and text."""
    written = {}
    for name, architecture in architectures().items():
        written[DOCS / "architectures" / f"{name}.md"] = NOTE + architecture_page(architecture)
    written[DOCS / "architectures" / "index.md"] = NOTE + _overview()
    written[DOCS / "recipes.md"] = NOTE + _recipes()
    written[DOCS / "tutorial.md"] = _tutorial()
    written[README] = _readme()
    written[SITE] = _site()
    return written


def architecture_table(link: str = "{name}.md") -> str:
    """The registered architectures as a Markdown table; `link` says where the page of one is."""
    rows = ["| architecture | what it is | state | longest text | source |", "|---|---|---|---|---|"]
    for name, architecture in architectures().items():
        rows.append(
            f"| [{architecture.title}]({link.format(name=name)}) (`{name}`) | {_summary(architecture)} | "
            f"{_size(_state_bytes(name)[1])} | {_longest_text(name)} | {architecture.source} |"
        )
    return "\n".join(rows) + "\n"


def _overview() -> str:
    return (
        "# Architectures\n\n"
        + architecture_table()
        + f"\nThe state is measured after 1000 tokens ({SIZES}). Layers of several make a "
        "[hybrid](../hybrids.md), which trains, writes and is saved like any other model.\n"
    )


def _readme() -> str:
    before, first, rest = README.read_text(encoding="utf-8").partition(TABLE[0])
    _, last, after = rest.partition(TABLE[1])
    return before + first + architecture_table("docs/architectures/{name}.md") + last + after


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
            f"Measured: {SIZES}.\n",
            _states(architecture),
            "## Limits\n",
            f"- Longest text: {_longest_text(architecture.name)}.",
            "- Several texts in one row (`document_ids`): "
            + ("yes.\n" if architecture.packs else "no, the model refuses them.\n"),
            *([f"## When to use it\n\n{_prose(use)}"] if use else []),
            "## Options of a model\n",
            "For `model.options` in a recipe, or `options` of "
            f"`MultilinConfig.from_architecture({architecture.name!r}, ...)`.\n",
            _fields(architecture.preset_options),
            "## Options of a layer\n",
            "Each entry of `layers` in a `config.json`; layers of several architectures make a hybrid.\n",
            _fields(architecture.options),
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


def _recipes() -> str:
    text = RECIPES
    for name, path in builtin_recipes().items():
        text += f"| `{name}` | {_opening_comment(path)} |\n"
    for section in dataclasses.fields(Recipe):
        if dataclasses.is_dataclass(section.type):
            text += f"\n## {section.name}\n\n{field_help(Recipe)[section.name].capitalize()}.\n\n"
            text += _fields(typing.cast(type, section.type))
        text += NOTES.get(section.name, "")
    return text + f"\n## output\n\n{field_help(Recipe)['output'].capitalize()}.\n"


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


def _fields(cls: type) -> str:
    rows = ["| field | type | default | meaning |", "|---|---|---|---|"]
    for field in dataclasses.fields(cls):
        hint = typing.get_type_hints(cls, include_extras=True)[field.name]
        kind = _type_name(hint).replace("|", "\\|")
        default = field.default if field.default is not dataclasses.MISSING else field.default_factory()  # type: ignore[misc]
        rows.append(f"| `{field.name}` | {kind} | `{_value(default)}` | {field_help(cls)[field.name]} |")
    return "\n".join(rows) + "\n"


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
