import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from multilin.cli import progress
from multilin.cli.progress import StageBar, TrainingDisplay
from multilin.training.run_folder import METRICS
from multilin.training.time_limit import forecast_end

LINE = {"step": 3, "loss": 2.5, "tokens_per_second": 12345.6}
VALIDATED = LINE | {"step": 5, "validation_loss": 2.0, "validation_bits_per_byte": 1.75}


def shown(lines: list[dict[str, Any]], *, terminal: bool) -> str:
    out = io.StringIO()
    with TrainingDisplay(Console(file=out, force_terminal=terminal, width=120, highlight=False)) as display:
        display.start(0, 10)
        for line in lines:
            display.step(line["step"], line["step"] / 10)
            display.line(line)
        display.message("bye [not markup]")
    return out.getvalue()


def test_a_terminal_gets_one_bar_with_the_latest_figures() -> None:
    text = shown([VALIDATED, LINE | {"step": 6, "loss": 2.4}], terminal=True)
    assert "6/10" in text
    assert "loss 2.400  validation 1.750 bits per byte  12,346 tokens/s" in text


def test_elsewhere_there_is_a_line_for_validations_and_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress.time, "monotonic", lambda: 0.0)
    out = shown([LINE, LINE | {"step": 4}, VALIDATED], terminal=False)
    assert out.splitlines() == [
        "step 3/10  loss 2.500  12,346 tokens/s",
        "step 5/10  loss 2.500  validation 1.750 bits per byte  12,346 tokens/s",
        "bye [not markup]",
    ]


@pytest.mark.parametrize("terminal", [True, False])
def test_the_time_that_is_left_for_all_runs_is_shown(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    """From the second line on: kernels may have been compiled before the first."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0)
    out = io.StringIO()
    with TrainingDisplay(Console(file=out, force_terminal=terminal, width=200, highlight=False)) as display:
        display.ahead(lambda seconds: 3 * seconds)
        display.start(2, 10)
        for step in (3, 5):
            display.step(step, step / 10)
            now[0] += 60
            display.line(LINE | {"step": step})
    assert "all runs: about " in out.getvalue()
    assert out.getvalue().index("all runs") > out.getvalue().index("12,346 tokens/s")
    if not terminal:  # a fifth in 60 s: half of a run of 300 s is left, and three more
        first, second = out.getvalue().splitlines()
        assert first == "step 3/10  loss 2.500  12,346 tokens/s"
        assert second == "step 5/10  loss 2.500  12,346 tokens/s  all runs: about 18 min left"


def test_the_first_line_of_every_run_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress.time, "monotonic", lambda: 0.0)
    out = io.StringIO()
    with TrainingDisplay(Console(file=out, width=120, highlight=False)) as display:
        for _ in range(2):
            display.start(0, 10)
            display.line(LINE)
    assert out.getvalue().splitlines() == 2 * ["step 3/10  loss 2.500  12,346 tokens/s"]


def test_a_stage_is_shown_from_its_first_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Text that lies ready in the cache needs no line such as `reading 0.0 MB`."""
    out = io.StringIO()
    terminal = Console(file=out, force_terminal=True, width=100)
    monkeypatch.setattr(progress, "Console", lambda **_: terminal)
    bar = StageBar()
    bar.close()
    assert out.getvalue() == ""
    bar("packing the text", 2_500_000)
    bar("evaluating", 3, 4)
    bar.close()
    assert "packing the text" in out.getvalue()
    assert "2.5 MB" in out.getvalue()
    assert "75%" in out.getvalue()


def test_a_stage_that_takes_long_has_plain_lines_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    out, times = io.StringIO(), iter([0.0, 0.0, 5.0, 20.0, 30.0, 40.0])
    monkeypatch.setattr(progress, "Console", lambda **_: Console(file=out, width=100))
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(times))
    bar = StageBar()
    for done in (1, 2, 3, 4):
        bar("evaluating", done, 4)
    bar("[packing]", 2_500_000)
    bar.close()
    assert out.getvalue().splitlines() == ["evaluating 75%", "[packing] 2.5 MB"]


def forecasting(folder: Path, validations: list[tuple[int, float]]) -> list[str]:
    """What a run of ten steps by the clock prints, or a resumed one, which finds earlier validations in its folder."""
    out = io.StringIO()
    with TrainingDisplay(Console(file=out, width=120, highlight=False)) as display:
        display.forecast_of = folder
        display.start(validations[0][0] - 1 if (folder / "metrics.jsonl").exists() else 0, None)
        for step, bits_per_byte in validations:
            display.step(step, step / 10)
            line = dict.fromkeys(METRICS, 0) | VALIDATED | {"step": step, "validation_bits_per_byte": bits_per_byte}
            display.line(line)
            with (folder / "metrics.jsonl").open("a") as metrics:
                metrics.write(json.dumps(line) + "\n")
    return out.getvalue().splitlines()


def test_a_run_by_the_clock_says_where_its_validations_lead(tmp_path: Path) -> None:
    validations = [(2, 2.0), (4, 1.8), (6, 1.7), (10, 1.65)]
    first, second, third, last = forecasting(tmp_path, validations)
    assert "forecast" not in first
    forecasts = [float(line.split("forecast for the end: ")[1].split()[0]) for line in (second, third)]
    assert all(1.4 < forecast < 1.7 for forecast in forecasts)
    assert "forecast" not in last
    (tmp_path / "resumed").mkdir()
    forecasting(tmp_path / "resumed", validations[:2])
    assert forecasting(tmp_path / "resumed", validations[2:])[0] == third


def test_validations_that_are_early_or_close_together_forecast_nothing() -> None:
    assert forecast_end([(0.5, 2.0)]) is None
    assert forecast_end([(0.05, 2.3), (0.1, 2.0)]) is None
    assert forecast_end([(0.5, 2.0), (0.55, 1.9)]) is None
    assert forecast_end([(0.35, 2.2), (0.5, 2.0), (0.55, 1.9)]) == forecast_end([(0.35, 2.2), (0.55, 1.9)])
    assert forecast_end([(0.5, 2.0), (1.0, 1.8)]) == (1.8, 0.0)
