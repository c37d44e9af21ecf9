"""The report of a comparison as Markdown."""

from collections.abc import Iterator, Sequence

from multilin.analysis.compare.answers import best_sentence, cost_sentence, speed_sentence
from multilin.analysis.compare.record import Comparison, RowRecord
from multilin.analysis.compare.view import COLUMNS, HEADINGS, cells, differences, how_measured, run_cells
from multilin.settings.inputs import to_yaml


def as_markdown(comparison: Comparison) -> str:
    """The whole report: answers, figures, samples, recipes, and how it was measured."""
    parts = [f"# {comparison.title}"]
    answers = (best_sentence, speed_sentence, cost_sentence)
    parts += [f"**{heading}** {_text(answer(comparison))}" for heading, answer in zip(HEADINGS, answers, strict=True)]
    ordered = [comparison.row(name) for name in comparison.order]
    ordered += [row for row in comparison.rows if row.score is None]
    parts.append(_table([name for name, _ in COLUMNS], [cells(comparison, row) for row in ordered]))
    if comparison.differences:
        parts += ["## Differences", _table(("row", "against", "difference", "p", ""), differences(comparison))]
    if any(row.sample for row in ordered):
        parts.append("## Samples")
        parts += [part for row in ordered if row.sample for part in _sample(comparison.prompt, row)]
    parts += ["## Runs", _table(("run", "seed", "result", "training tokens", "seconds", "failure"), _runs(ordered))]
    parts += ["## How it was measured", "\n".join(f"- {_text(line)}" for line in how_measured(comparison))]
    parts.append("## Recipes")
    for row in ordered:
        parts += [f"### {row.name}", _block(to_yaml(row.recipe), "yaml")]
    return "\n\n".join(parts) + "\n"


def _runs(rows: Sequence[RowRecord]) -> Iterator[Sequence[str]]:
    for row in rows:
        yield from (run_cells(run) for run in row.all_runs)


def _sample(prompt: str, row: RowRecord) -> list[str]:
    return [f"### {row.name}", _block(prompt + (row.sample or ""), "text")]


def _block(text: str, language: str) -> str:
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


def _table(head: Sequence[str], body: Iterator[Sequence[str]] | Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *body]
    return "\n".join(f"| {' | '.join(_text(cell).replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def _text(text: str) -> str:
    """A text whose characters mean nothing to Markdown."""
    return "".join(f"\\{character}" if character in "\\`*_<>[]" else character for character in text)
