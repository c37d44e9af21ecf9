import io
from typing import Any

import pytest
from rich.console import Console

from multilin.cli import display
from multilin.cli.display import Display

LINE = {"step": 3, "loss": 2.5, "tokens_per_second": 12345.6}
VALIDATED = LINE | {"step": 5, "validation_loss": 2.0, "validation_bits_per_byte": 1.75}


def shown(lines: list[dict[str, Any]], *, terminal: bool, silent: bool = False) -> str:
    out = io.StringIO()
    shows = Display(10, silent=silent)
    shows.console = Console(file=out, force_terminal=terminal, width=120, highlight=False, quiet=silent)
    shows.start(0)
    for line in lines:
        shows.step(line["step"])
        shows.line(line)
    shows.message("bye [not markup]")
    shows.stop()
    return out.getvalue()


def test_a_terminal_gets_one_bar_with_the_latest_figures() -> None:
    text = shown([VALIDATED, LINE | {"step": 6, "loss": 2.4}], terminal=True)
    assert "6/10" in text
    assert "loss 2.400  validation 1.750 bits per byte  12,346 tokens/s" in text


def test_elsewhere_there_is_a_line_for_validations_and_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(display.time, "monotonic", lambda: now[0])
    out = shown([LINE, LINE | {"step": 4}, VALIDATED], terminal=False)
    assert out.splitlines() == [
        "step 3/10  loss 2.500  12,346 tokens/s",
        "step 5/10  loss 2.500  validation 1.750 bits per byte  12,346 tokens/s",
        "bye [not markup]",
    ]


def test_other_processes_of_a_run_show_nothing() -> None:
    assert shown([VALIDATED], terminal=True, silent=True) == ""
