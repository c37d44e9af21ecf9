"""`train --minutes`: what is picked from the table, and what is kept."""

import dataclasses
import itertools
import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from multilin.analysis import minutes as picking
from multilin.analysis.minutes import (
    MOST_PARAMETERS,
    MOST_PASSES,
    TABLE,
    Candidate,
    Pick,
    Size,
    choose,
    count_bytes,
    pick,
    recipe_values,
)
from multilin.data.settings import DataRecipe
from multilin.errors import InputError
from multilin.training.progress import TrainingProgress
from multilin.training.recipe import load_recipe
from tests.processes import PYTHON, run

FLOPS = 5e10  # of a made-up machine


def candidates(flops: float = FLOPS) -> list[Candidate]:
    """TScale's, counted by hand."""
    found = []
    for size in TABLE:
        parameters = 10 * size.num_layers * size.hidden_size**2
        found.append(Candidate(size, parameters, flops / 6 / (parameters + size.vocab_size * size.hidden_size)))
    return found


def test_more_time_or_text_is_never_a_smaller_model() -> None:
    minutes, texts = (0.2, 1, 5, 20, 60, 300, 1000), (10, 10**5, 10**6, 10**7, 10**9)
    for text in texts:
        found = [choose(candidates(), 60 * m, text).parameters for m in minutes]
        assert found == sorted(found)
        assert found[-1] <= max(MOST_PARAMETERS * text, candidates()[0].parameters)
    for m in minutes:
        found = [choose(candidates(), 60 * m, text).parameters for text in texts]
        assert found == sorted(found)
    assert choose(candidates(), 12, 10**9).size == TABLE[0]
    assert choose(candidates(1e14), 10**5, 10**12).size == TABLE[-1]


def test_the_table_goes_up() -> None:
    for smaller, larger in itertools.pairwise(TABLE):
        assert smaller.fewest_tokens < larger.fewest_tokens
        assert smaller.num_layers * smaller.hidden_size**2 < larger.num_layers * larger.hidden_size**2


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghij", k=draw.randint(1, 6))) for _ in range(3000)]
    path = tmp_path / "text.txt"
    path.write_text("\n".join(" ".join(draw.choices(words, k=12)) for _ in range(2000)))
    return path


@pytest.fixture
def picked(text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Pick]:
    """picked(20, "tscale", **{"model.hidden_size": 64}), on a machine of a known speed."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(picking, "step_seconds", lambda *words: 0.1)

    def make(minutes: float, name: str | None = None, **changes: object) -> Pick:
        given = {"data.source": str(text_file), "output": str(tmp_path / "run"), **changes}
        return pick(name, given, minutes, time.monotonic(), TrainingProgress())

    return make


def test_a_recipe_is_picked_and_what_is_given_is_kept(picked: Callable[..., Pick]) -> None:
    free = picked(1)
    assert free.recipe.model.architecture == "tscale"
    assert free.recipe.training.minutes == 1
    assert free.recipe.tokenizer.vocab_size == free.candidate.size.vocab_size == 512
    kept = picked(1, **{"model.architecture": "elita", "model.hidden_size": 40, "optimizer.learning_rate": 0.001})
    assert kept.recipe.model.architecture == "elita"
    assert kept.recipe.model.hidden_size == kept.candidate.size.hidden_size == 40
    assert kept.recipe.optimizer.learning_rate == 0.001
    byte = picked(1, **{"tokenizer.kind": "byte"}).recipe.tokenizer
    assert (byte.kind, byte.vocab_size) == ("byte", None)


def test_a_vocabulary_is_picked_that_the_text_supports(picked: Callable[..., Pick], tmp_path: Path) -> None:
    draw, path = random.Random(0), tmp_path / "digits.txt"
    path.write_text("\n".join(" ".join(str(draw.randrange(10)) for _ in range(40)) for _ in range(1500)))
    free = picked(1, **{"data.source": str(path)}).recipe.tokenizer
    assert (free.kind, free.vocab_size) == ("byte", None)
    merged = picked(1, **{"data.source": str(path), "tokenizer.kind": "bpe"}).recipe.tokenizer
    assert merged.kind == "bpe"
    assert 258 < (merged.vocab_size or 0) < 512
    with pytest.raises(InputError, match=r"tokenizer\.vocab_size: 1024 given, but the corpus supports"):
        picked(1, **{"data.source": str(path), "tokenizer.vocab_size": 1024})


def test_too_little_time_is_refused_and_memory_bounds_the_size(
    picked: Callable[..., Pick], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError, match=r"--minutes: 0\.1 given, but reading and measuring took 2 s; give more time"):
        picking._training_seconds(0.1, time.monotonic() - 2)
    monkeypatch.setattr(picking, "available_memory", lambda: 1)
    assert picked(20).candidate.size.hidden_size == TABLE[0].hidden_size


def test_a_named_recipe_is_kept_whole(picked: Callable[..., Pick]) -> None:
    found = picked(1, "threelin", **{"training.batch_size": 2}).recipe
    assert (found.model.hidden_size, found.model.num_layers, found.tokenizer.vocab_size) == (128, 6, 2048)
    named = load_recipe("threelin").optimizer
    assert (found.optimizer.name, found.optimizer.learning_rate) == (named.name, named.learning_rate)
    assert found.training.batch_size == 2
    assert found.training.minutes == 1


def test_a_long_run_has_larger_steps(picked: Callable[..., Pick], monkeypatch: pytest.MonkeyPatch) -> None:
    steps = []
    for least in (10**12, 1):
        monkeypatch.setattr(picking, "LONG_TOKENS", least)
        recipe = picked(1, **{"model.architecture": "elita"}).recipe
        steps.append((recipe.training.batch_size, recipe.model.n_positions, recipe.optimizer.learning_rate))
    assert steps == [(4, 256, 0.004), (8, 512, 0.008)]
    kept = picked(1, **{"training.batch_size": 3, "optimizer.learning_rate": 0.01}).recipe
    assert (kept.training.batch_size, kept.model.n_positions, kept.optimizer.learning_rate) == (3, 512, 0.01)


def test_a_text_that_is_learned_by_heart_gets_a_stronger_weight_decay(
    picked: Callable[..., Pick], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of TScale, unless one is given; in larger steps so much more of it that the weights decay alike over a text."""
    small = {"model.hidden_size": 64, "model.num_layers": 4}  # 160 thousand parameters, for 100 kB of text
    assert picked(20, **small).recipe.optimizer.weight_decay == 0.05
    assert picked(20, **small, **{"optimizer.weight_decay": 0.2}).recipe.optimizer.weight_decay == 0.2
    assert picked(20, **small, **{"model.architecture": "elita"}).recipe.optimizer.weight_decay == 0.01
    monkeypatch.setattr(picking, "step_seconds", lambda *words: 2.0)
    assert picked(1, **small).recipe.optimizer.weight_decay == 0.01  # a part of the text
    size = Size(0, 64, 4, 512)
    rates = [recipe_values("tscale", size, 100, step, is_known_by_heart=True) for step in ((4, 256), (8, 512))]
    short, long = (values["optimizer.learning_rate"] * values["optimizer.weight_decay"] for values in rates)
    assert long / (8 * 512) == pytest.approx(short / (4 * 256))


def test_a_small_text_ends_early_and_says_so(picked: Callable[..., Pick], monkeypatch: pytest.MonkeyPatch) -> None:
    """By its passes: a run that turns out faster than measured reads no more than helps."""
    whole = picked(600)
    plan, positions = whole.recipe.training, whole.recipe.model.n_positions
    assert plan.minutes == 600
    assert whole.tokens == MOST_PASSES * whole.train_tokens
    assert plan.num_steps * plan.batch_size * positions == pytest.approx(whole.tokens, rel=0.02)
    assert "passes over this text would overfit, so the run ends after 5 passes, in about" in whole.remarks[0]
    monkeypatch.setattr(picking, "step_seconds", lambda *words: 2.0)
    part = picked(1)
    assert part.tokens < 0.2 * whole.tokens
    assert part.recipe.training.max_steps == whole.recipe.training.max_steps
    assert part.remarks == []
    steps = dataclasses.replace(part.recipe.training, minutes=None, max_steps=round(part.tokens / 1024))
    assert part.with_steps.training == steps


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"data.source": "task:mqar"}, "data.source: task:mqar is a task, but --minutes needs a text"),
        ({"model.hidden_size": 30, "model.options.head_size": 32}, "head_size: 32 given, but it must divide"),
        ({"data.source": "nowhere.txt"}, "nowhere.txt"),
        ({"model.architecture": "nothing"}, "model.architecture: 'nothing' is not known"),
        ({"training.lora.rank": 4}, "training.lora: given without model.start"),
    ],
)
def test_what_cannot_be_completed_is_refused(
    picked: Callable[..., Pick], changes: dict[str, object], sentence: str
) -> None:
    with pytest.raises(InputError, match=sentence):
        picked(20, **changes)


def test_bytes_are_counted_as_far_as_they_matter(text_file: Path) -> None:
    assert count_bytes(DataRecipe(source=str(text_file))) == text_file.stat().st_size


@pytest.mark.slow
def test_the_whole_command_ends_on_time(text_file: Path, tmp_path: Path) -> None:
    command = [*PYTHON, "-m", "multilin", "train", "--minutes", "1", "--data.source", str(text_file)]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    begin = time.monotonic()
    printed = run([*command, "--output", str(tmp_path / "run")], environment=environment)
    assert time.monotonic() - begin < 60 * 1.05 + 10  # Python starts and ends slowly on a busy machine
    assert "forecast for the end: " in printed
