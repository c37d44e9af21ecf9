"""What every report shows of a comparison: its tables as texts, its charts as numbers."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from multilin.analysis.compare.answers import AXES, mean_course
from multilin.analysis.compare.record import Comparison, RowRecord, RunRecord
from multilin.analysis.compare.statistics import LEVEL
from multilin.analysis.compare.words import (
    UNITS,
    amount,
    budget_text,
    bytes_text,
    difference_text,
    p_text,
    score_text,
    verdict,
)
from multilin.errors import plural

HEADINGS = ("Which is best at this budget?", "How fast does it learn?", "What does it cost to run?")

_Cell = Callable[[Comparison, RowRecord], str]

COLUMNS: list[tuple[str, _Cell]] = [
    ("row", lambda c, row: row.name),
    ("validation", lambda c, row: score_text(c, row) if row.score else "failed"),
    ("against the best", lambda c, row: verdict(c, row)),
    ("parameters", lambda c, row: amount(row.parameters)),
    ("without embeddings", lambda c, row: amount(row.other_parameters)),
    ("FLOPs per token", lambda c, row: amount(row.flops_per_token)),
    ("training tokens", lambda c, row: amount(row.max_steps * row.tokens_per_step)),
    ("training seconds", lambda c, row: f"{row.seconds:,.1f}" if row.seconds is not None else ""),
    ("training tokens/s", lambda c, row: f"{row.tokens_per_second:,.0f}" if row.tokens_per_second else ""),
    ("writing tokens/s", lambda c, row: f"{row.decoding[-1].tokens_per_second:,.0f}" if row.decoding else ""),
    ("state", lambda c, row: bytes_text(row.decoding[-1].state_bytes) if row.decoding else ""),
]
"""Of the table of rows: heading, and what stands below it."""


def cells(comparison: Comparison, row: RowRecord) -> list[str]:
    """A line of the table of rows."""
    return [cell(comparison, row) for _, cell in COLUMNS]


def differences(comparison: Comparison) -> Iterator[list[str]]:
    """A line for every two rows: the worse, the better, the difference, p, and what it means."""
    for found in comparison.differences:
        meaning = {None: "one seed: no statement", True: "within noise", False: "larger than noise"}
        p = "" if found.p is None else p_text(found.p)
        yield [
            found.one, found.other, difference_text(comparison, found.difference), p, meaning[found.within_noise],
        ]  # fmt: skip


def run_cells(run: RunRecord) -> list[str]:
    """A line of the table of runs."""
    if run.failure or not run.course:
        return [run.folder, str(run.seed), "failed", "", "", run.failure or ""]
    last = run.last
    result = f"{last.bits_per_byte:.4f}" if last.accuracy is None else f"{100 * last.accuracy:.2f} %"
    return [run.folder, str(run.seed), result, f"{last.tokens:,}", f"{last.seconds:,.1f}", ""]


def how_measured(comparison: Comparison) -> list[str]:
    """Budget, seeds, grid, what the numbers mean, caveats, machine."""
    seeds = ", ".join(map(str, comparison.seeds))
    machine = comparison.machine
    lines = [f"Budget of each run: {budget_text(comparison)}. Seeds: {seeds}."]
    lines += [f"Tried for every row: {name} {', '.join(map(str, tried))}." for name, tried in comparison.grid.items()]
    lines += [f"Taken for {row.name}: {_listed(row.choice)}." for row in comparison.rows if row.choice]
    lines += [
        _MEANINGS[comparison.measure],
        f"± is the standard deviation over seeds. Differences: Welch's t-test, two-sided; with p above {LEVEL:g} they "
        "are within noise. p is not corrected for comparing many rows.",
        "FLOPs are those of the products in forward and backward pass, as computed, a multiplication and an addition "
        "being two; running means, norms and activations are not counted. Seconds are of training alone: validations "
        "and checkpoints are left out.",
        "Writing: one text, one token after another by greedy choice, after a text of random tokens; median of five "
        "turns of 16 tokens in which the models take turns. State: bytes of everything the model keeps of that text.",
        *comparison.remarks,
        *(f"{row.name}: {remark}." for row in comparison.rows for remark in row.remarks),
    ]
    versions = ", ".join(f"{name} {version}" for name, version in machine.get("versions", {}).items() if version)
    lines.append(
        f"Machine: {machine.get('device')}, {plural(machine['cores'], 'core')}, "
        f"{plural(machine['threads'], 'thread')} of PyTorch, precision "
        f"{machine.get('precision')}; {machine.get('platform')}; Python {machine.get('python')}, {versions}."
    )
    return lines


def chart_data(comparison: Comparison) -> dict[str, Any]:
    """The numbers of the charts."""
    rows = [comparison.row(name) for name in comparison.order]
    return {
        "measure": comparison.measure,
        "unit": UNITS[comparison.measure],
        "axes": AXES,
        "axis": next(iter(comparison.budget)),
        "task": comparison.task,
        "rows": [
            {
                "name": row.name,
                "course": mean_course(row, comparison.measure),
                "score": row.score.mean if row.score else None,
                "memory": row.memory,
                "decoding": [
                    {"context": d.context, "speed": d.tokens_per_second, "state": d.state_bytes} for d in row.decoding
                ],
            }
            for row in rows
        ],
    }


def dots(comparison: Comparison) -> list[dict[str, Any]]:
    """Every row's seeds, mean and spread as places between 0 and 100 on one line, for the first chart."""
    rows = [comparison.row(name) for name in comparison.order]
    values = {row.name: [float(getattr(run.last, comparison.measure)) for run in row.finished] for row in rows}
    ends = [value for found in values.values() for value in found]
    ends += [row.score.mean + way * (row.score.deviation or 0) for row in rows if row.score for way in (-1, 1)]
    low, high = min(ends), max(ends)
    room = (high - low) * 0.04 or abs(high) * 0.01 or 1.0
    low, high = low - room, high + room

    def place(value: float) -> float:
        return round(100 * (value - low) / (high - low), 3)

    found = []
    for row in rows:
        assert row.score is not None
        deviation = row.score.deviation or 0.0
        found.append(
            {
                "name": row.name,
                "text": score_text(comparison, row),
                "verdict": verdict(comparison, row),
                "noise": _noise(comparison, row),
                "seeds": [place(value) for value in values[row.name]],
                "mean": place(row.score.mean),
                "from": place(row.score.mean - deviation),
                "width": place(row.score.mean + deviation) - place(row.score.mean - deviation),
            }
        )
    return found


def ends(comparison: Comparison) -> Sequence[str]:
    """What the left and right end of the first chart mean."""
    return ("better", "worse") if comparison.measure == "bits_per_byte" else ("worse", "better")


def _noise(comparison: Comparison, row: RowRecord) -> str:
    """best, noise, apart or silent: how the row stands to the best one."""
    if not comparison.is_ranked:
        return "silent"
    if row.name == comparison.order[0]:
        return "best"
    found = comparison.difference_to_best(row.name)
    within = None if found is None else found.within_noise
    return "silent" if within is None else "noise" if within else "apart"


def _listed(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


_MEANINGS = {
    "bits_per_byte": "Bits per byte: the bits a model needs on average for one byte of the validation text; less is "
    "better, and tokenizers do not matter.",
    "accuracy": "Accuracy: share of the asked positions in fresh sequences whose likeliest token is the right one.",
}
