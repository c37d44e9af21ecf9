"""multilin check: what it prints, and its exit status."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from multilin.cli.main import main
from multilin.testing import ROWS

Call = Callable[..., str]
README = Path(__file__).parents[2] / "README.md"
LEAK = """
class Leak(nn.Linear):
    def __init__(self, hidden_size: int):
        super().__init__(hidden_size, hidden_size)

    def forward(self, x):
        return super().forward(x - x.mean(1, keepdim=True))
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    ema = README.read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    (tmp_path / "own.py").write_text(ema + LEAK)
    return tmp_path / "own.py"


def test_a_right_layer_has_a_row_for_every_check_and_ends_with_what_to_type_next(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    assert main(["check", f"{file}:Ema", "--hidden-size", "16", "--options.decay", "0.5"]) == 0
    shown = capsys.readouterr()
    lines = {line.split("  ")[0]: line for line in shown.out.splitlines()}
    assert list(lines)[1:] == [*ROWS]
    assert "is bounded, 64 bytes" in lines["state"]
    assert "The work is linear in" in lines["cost"]
    assert "`multilin export` will work" in lines["exports"]
    assert f"train --model.architecture {file}:Ema --model.options.decay 0.5 --data.source my-books/" in shown.err
    assert f"compare {file}:Ema llama" in shown.err


def test_a_faulty_layer_is_exit_status_1_with_a_sentence(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", f"{file}:Leak", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["layer"] == "own.py:Leak"
    found = {finding["name"]: finding for finding in report["findings"]}
    assert found["causal"]["result"] == "failure"
    assert "a mean, norm, softmax or sum without a mask" in found["causal"]["sentence"]
    assert found["state"]["numbers"]["growth"] == 128


def test_mistakes_are_one_sentence(file: Path, refusal: Call) -> None:
    assert refusal("check").startswith("LAYER: missing")
    assert "there is no file 'none.py'" in refusal("check", "none.py:Ema")
    assert "has no class 'Emma'" in refusal("check", f"{file}:Emma")
    assert "'mingruu' is not known; did you mean 'mingru'" in refusal("check", "mingruu")
    assert "decya: unknown field; did you mean 'decay'" in refusal("check", f"{file}:Ema", "--options.decya", "1")
