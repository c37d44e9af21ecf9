import re
from collections.abc import Callable
from pathlib import Path

import pytest

from multilin.cli.demo import PROMPT

SMALL = [
    *("--tokenizer.kind", "byte", "--tokenizer.vocab_size", "null", "--model.hidden_size", "32"),
    *("--model.num_layers", "1", "--training.max_steps", "5", "--training.eval_max_tokens", "2000"),
    *("--training.batch_size", "2"),
]


def test_the_demo_trains_compares_and_writes(
    cli: Callable[..., str], text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    arguments = ["demo", "--output", tmp_path / "demo", "--data.source", text_file, *SMALL]
    shown = cli(*arguments)
    bits = [float(number) for number in re.findall(r"\d\.\d{3}$", re.sub(r" +$", "", shown, flags=re.M), flags=re.M)]
    unigram, bigram, trigram, model = bits[-4:]
    assert unigram > bigram > trigram
    assert 0 < model < 9
    assert shown.index("bits per byte") < shown.rindex(PROMPT)
    cli(*arguments)  # again, without a question


def test_a_task_is_refused_before_anything_is_trained(refusal: Callable[..., str], tmp_path: Path) -> None:
    said = refusal("demo", "--output", tmp_path / "demo", "--data.source", "task:copy", *SMALL)
    assert said == "data.source: task:copy is a task, which has no text; name a text"
    assert not (tmp_path / "demo").exists()
