"""The plots and the model card of a finished run."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from multilin.errors import plural
from multilin.files import atomic_file, write_whole
from multilin.settings.inputs import to_yaml
from multilin.training.outcomes import RunResult
from multilin.training.recipe import Recipe

_TRAINING, _VALIDATION, _INK, _GRID = "#4c78a8", "#d1495b", "#333333", "#e6e6e6"


@contextlib.contextmanager
def _plot(path: Path, height: float, ylabel: str) -> Iterator[Any]:
    """Context that yields a plot's axes (x is the number of tokens read) and writes the plot to a PNG at the end."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    figure = Figure(figsize=(7.2, height), dpi=150, layout="constrained")
    axes = figure.add_subplot(xlabel="training tokens", ylabel=ylabel)
    yield axes
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=_INK)
    with atomic_file(path) as partial:
        figure.savefig(partial, format="png")


def draw_loss(lines: Sequence[dict[str, Any]], path: Path) -> None:
    """Plot the losses in lines of metrics.jsonl over the tokens read: a line for training, points for validation."""
    with _plot(path, 4.2, "loss (nats per token)") as axes:
        axes.plot(*_course([line for line in lines if "loss" in line], "loss"), color=_TRAINING, label="training")
        if validated := [line for line in lines if "validation_loss" in line]:
            tokens, losses = _course(validated, "validation_loss")
            axes.plot(tokens, losses, color=_VALIDATION, marker="o", markersize=4, label="validation")
            axes.annotate(
                _last_figure(validated[-1]), (tokens[-1], losses[-1]), xytext=(-4, 14), textcoords="offset points",
                ha="right", color=_VALIDATION,
            )  # fmt: skip
        axes.grid(color=_GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.legend(frameon=False)


def _course(lines: Sequence[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """From lines of metrics.jsonl, the numbers of tokens and the values of the field `name`."""
    return [line["tokens"] for line in lines], [line[name] for line in lines]


def _last_figure(line: Mapping[str, Any]) -> str:
    if "validation_accuracy" in line:
        return f"{100 * line['validation_accuracy']:.1f} % right"
    return f"{line['validation_bits_per_byte']:.3f} bits per byte"


def draw_bits_per_byte(lines: Sequence[dict[str, Any]], references: Mapping[str, float], path: Path) -> None:
    """Plot the validation bits per byte in lines of metrics.jsonl over the tokens read.

    `references` maps models' names to their bits per byte on the same text; each becomes a horizontal line.
    """
    name = "validation_bits_per_byte"
    tokens, bits = _course([line for line in lines if name in line], name)
    with _plot(path, 3.8, "bits per byte of validation text") as axes:
        for reference, level in references.items():
            axes.axhline(level, color=_INK, linewidth=0.8, linestyle=(0, (4, 4)))
            axes.annotate(
                f"{reference} {level:.2f}", (1, level), xycoords=("axes fraction", "data"), xytext=(-2, 3),
                textcoords="offset points", ha="right", color=_INK, fontsize=9,
            )  # fmt: skip
        axes.plot(tokens, bits, color=_VALIDATION, marker="o", markersize=4, linewidth=2)
        axes.annotate(
            f"this model {bits[-1]:.2f}, after {lines[-1]['seconds']:,.0f} s", (tokens[-1], bits[-1]), xytext=(0, -14),
            textcoords="offset points", ha="right", color=_VALIDATION, fontweight="bold",
        )  # fmt: skip
        axes.set_ylim(min(*bits, *references.values()) - 0.25)


def write_card(recipe: Recipe, result: RunResult, path: Path) -> None:
    """Write the model card: architecture, training text, results, and how to load the model."""
    tags = ["multilin", *recipe.model.kind.split(" + ")]
    front = {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": tags}
    model, tokenizer = recipe.model, recipe.tokenizer.path or recipe.tokenizer.kind or "part of the data"
    score = ("bits per byte", f"{result.validation_bits_per_byte:.3f}")
    if result.validation_accuracy is not None:
        score = ("accuracy", f"{100 * result.validation_accuracy:.1f} %")
    figures = {
        "Architecture": f"`{model.kind}`, {plural(model.num_layers or 0, 'layer')}, width {model.hidden_size}",
        "Parameters": f"{result.model.num_parameters():,}",
        "Context in training": f"{model.n_positions} tokens",
        "Tokenizer": f"{tokenizer}, {len(result.tokenizer):,} entries",
        "Text": f"`{recipe.data.name}`",
        "Training": f"{plural(result.steps, 'step')}, {plural(result.tokens, 'token')}, {result.seconds:,.0f} s, "
        f"{recipe.training.precision}",
        "Training loss": f"{result.loss:.3f} nats per token",
        "Validation loss": f"{result.validation_loss:.3f} nats per token",
        f"Validation {score[0]}": score[1],
    }
    card = _CARD.format(
        front=to_yaml(front).strip(),
        origin="from scratch" if model.start is None else f"from `{model.start}`",
        title=f"{model.kind} on {recipe.data.name}",
        table="\n".join(f"| {name} | {value} |" for name, value in figures.items()),
        recipe=to_yaml(dataclasses.asdict(recipe)).strip(),
    )
    write_whole(path, card)


_CARD = """\
---
{front}
---

# {title}

A causal language model, trained {origin} with `multilin`.

| | |
|---|---|
{table}

The validation data was not used for training.

![Loss over training tokens](loss.png)

## Use

The model needs the package [multilin](https://pypi.org/project/multilin): `pip install multilin`.

```python
import multilin  # teaches transformers this model
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "."  # the folder of this card
model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
inputs = tokenizer(tokenizer.eos_token + "The", add_special_tokens=False, return_tensors="pt")  # eos begins every text
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=50, do_sample=True)[0]))
```

## Recipe

```yaml
{recipe}
```
"""
