"""What a finished run shows: the plot of its loss and its model card."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from multilin.errors import plural
from multilin.files import atomic_file, write_whole
from multilin.settings.inputs import to_yaml
from multilin.training.outcomes import RunResult
from multilin.training.recipe import Recipe

_TRAINING, _VALIDATION, _INK, _GRID = "#4c78a8", "#d1495b", "#333333", "#e6e6e6"


def draw_loss(lines: Sequence[dict[str, Any]], path: Path) -> None:
    """Plot the loss in nats per token over the tokens read: training as a line, validation as points.

    Args:
        lines: of metrics.jsonl.
        path: the PNG to write.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    figure = Figure(figsize=(7.2, 4.2), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    axes.plot([line["tokens"] for line in lines], [line["loss"] for line in lines], color=_TRAINING, label="training")
    validated = [line for line in lines if "validation_loss" in line]
    if validated:
        tokens, losses = [line["tokens"] for line in validated], [line["validation_loss"] for line in validated]
        axes.plot(tokens, losses, color=_VALIDATION, marker="o", markersize=4, label="validation")
        axes.annotate(
            _last_figure(validated[-1]),
            (tokens[-1], losses[-1]),
            xytext=(-4, 14),
            textcoords="offset points",
            ha="right",
            color=_VALIDATION,
        )
    axes.set(xlabel="training tokens", ylabel="loss (nats per token)")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=_INK)
    axes.legend(frameon=False)
    with atomic_file(path) as partial:
        figure.savefig(partial, format="png")


def _last_figure(line: Mapping[str, Any]) -> str:
    if "validation_accuracy" in line:
        return f"{100 * line['validation_accuracy']:.1f} % right"
    return f"{line['validation_bits_per_byte']:.3f} bits per byte"


def draw_bits_per_byte(lines: Sequence[dict[str, Any]], references: Mapping[str, float], path: Path) -> None:
    """Plot validation bits per byte over the tokens read, between horizontal lines for models without training.

    Args:
        lines: of metrics.jsonl.
        references: name to bits per byte on the same text.
        path: the PNG to write.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    validated = [line for line in lines if "validation_bits_per_byte" in line]
    tokens = [line["tokens"] for line in validated]
    bits = [line["validation_bits_per_byte"] for line in validated]
    figure = Figure(figsize=(7.2, 3.8), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    for name, level in references.items():
        axes.axhline(level, color=_INK, linewidth=0.8, linestyle=(0, (4, 4)))
        axes.annotate(
            f"{name} {level:.2f}", (1, level), xycoords=("axes fraction", "data"), xytext=(-2, 3),
            textcoords="offset points", ha="right", color=_INK, fontsize=9,
        )  # fmt: skip
    axes.plot(tokens, bits, color=_VALIDATION, marker="o", markersize=4, linewidth=2)
    axes.annotate(
        f"this model {bits[-1]:.2f}, after {lines[-1]['seconds']:,.0f} s", (tokens[-1], bits[-1]), xytext=(0, -14),
        textcoords="offset points", ha="right", color=_VALIDATION, fontweight="bold",
    )  # fmt: skip
    axes.set(xlabel="training tokens", ylabel="bits per byte of validation text")
    axes.set_ylim(min(*bits, *references.values()) - 0.25)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=_INK)
    with atomic_file(path) as partial:
        figure.savefig(partial, format="png")


def write_card(recipe: Recipe, result: RunResult, path: Path) -> None:
    """Write the model card: what the model is, what it was trained on, how well it does, how to load it."""
    front = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["multilin", *recipe.model.kind.split(" + ")],
    }
    parameters = sum(parameter.numel() for parameter in result.model.parameters())
    model, plan = recipe.model, recipe.training
    figures = {
        "Architecture": f"`{model.kind}`, {plural(model.num_layers or 0, 'layer')}, width {model.hidden_size}",
        "Parameters": f"{parameters:,}",
        "Context in training": f"{model.n_positions} tokens",
        "Tokenizer": f"{recipe.tokenizer.path or recipe.tokenizer.kind}, {len(result.tokenizer):,} entries",
        "Text": f"`{recipe.data.source}`",
        "Training": f"{plural(result.steps, 'step')}, {plural(result.tokens, 'token')}, {result.seconds:,.0f} s, "
        f"{plan.precision}",
        "Training loss": f"{result.loss:.3f} nats per token",
        "Validation loss": f"{result.validation_loss:.3f} nats per token",
        **_score(result),
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in figures.items())
    text = _CARD.format(
        front=to_yaml(front).strip(),
        title=f"{model.kind} on {recipe.data.source}",
        table=table,
        recipe=to_yaml(dataclasses.asdict(recipe)).strip(),
    )
    write_whole(path, text)


def _score(result: RunResult) -> dict[str, str]:
    if result.validation_accuracy is not None:
        return {"Validation accuracy": f"{100 * result.validation_accuracy:.1f} %"}
    return {"Validation bits per byte": f"{result.validation_bits_per_byte:.3f}"}


_CARD = """\
---
{front}
---

# {title}

A causal language model, trained from scratch with `multilin`.

| | |
|---|---|
{table}

Validation is on text the model was not trained on.

![Loss over training tokens](loss.png)

## Use

It needs the package [multilin](https://pypi.org/project/multilin): `pip install multilin`.

```python
import multilin  # teaches transformers this model
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "."  # the folder of this card
model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
inputs = tokenizer("The", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=50, do_sample=True)[0]))
```

## Recipe

```yaml
{recipe}
```
"""
