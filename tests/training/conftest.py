import dataclasses
import json
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from multilin.training import loop
from multilin.training.loop import train
from multilin.training.outcomes import RunResult, TrainingInterrupted
from multilin.training.recipe import Recipe, load_recipe

WORDS = ("the", "a", "cat", "dog", "sat", "ran", "on", "under", "mat", "tree", "and", "saw", "big", "green", "house")
TIMES = ("seconds", "tokens_per_second")

Tiny = Callable[..., Recipe]
AtStep = Callable[[int, Callable[[torch.nn.Module], object]], None]
Stopped = Callable[..., Recipe]


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixty short documents of made-up sentences."""
    draw = random.Random(0)
    folder = tmp_path_factory.mktemp("text")
    documents = [{"text": " ".join(draw.choices(WORDS, k=60))} for _ in range(60)]
    path = folder / "text.jsonl"
    path.write_text("".join(json.dumps(document) + "\n" for document in documents))
    return path


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Prepared texts go where the tests' other files go."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small only wait for each other's threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plot of the loss would take a third of a tiny run; the runs of wider fixtures, made before, are drawn."""
    monkeypatch.setattr("multilin.training.loop.draw_loss", lambda lines, path: path.touch())


@pytest.fixture(scope="session")
def tiny(text_file: Path) -> Tiny:
    """A recipe small enough for a test: tiny(output, **{"section.field": value})."""

    def make(output: Path, **changes: Any) -> Recipe:
        defaults = {
            "model.architecture": "additive",
            "model.hidden_size": 16,
            "model.num_layers": 1,
            "model.n_positions": 16,
            "data.source": str(text_file),
            "data.validation_fraction": 0.1,
            "tokenizer.kind": "byte",
            "optimizer.learning_rate": 0.01,
            "schedule.warmup_steps": 2,
            "training.max_steps": 12,
            "training.batch_size": 2,
            "training.global_batch_size": 4,
            "training.precision": "float32",
            "training.eval_every_steps": 5,
            "training.eval_max_tokens": 200,
            "training.save_every_steps": 4,
            "training.log_every_steps": 3,
            "output": str(output),
        }
        return load_recipe(None, changes, defaults)

    return make


@pytest.fixture(scope="session")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text of another kind than that of the runs to start from."""
    draw = random.Random(1)
    path = tmp_path_factory.mktemp("letters") / "letters.jsonl"
    lines = [{"text": " ".join(draw.choices(("dear", "yours", "truly", "friend", "letter"), k=60))} for _ in range(40)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def tune(tiny: Tiny, letters: Path) -> Tiny:
    """A recipe that begins with a model: tune(start, output, **changes)."""

    def make(start: Path | str, output: Path, **changes: Any) -> Recipe:
        recipe = dataclasses.asdict(tiny(output))
        kept = {f"{section}.{name}": value for section in ("optimizer", "schedule", "training")
                for name, value in recipe[section].items()}  # fmt: skip
        given = {"data.source": str(letters), "output": str(output), "model.start": str(start)}
        return load_recipe(None, kept | given | changes)

    return make


@pytest.fixture(scope="package")
def uninterrupted(one_thread: None, tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    """Twelve steps with dropout and accumulated gradients, for others to be compared with."""
    return train(tiny(tmp_path_factory.mktemp("runs") / "whole"))


@pytest.fixture
def at_step(monkeypatch: pytest.MonkeyPatch) -> AtStep:
    """at_step(5, action) calls action(model) when the fifth step of a run begins."""
    set_rates = loop._set_rates

    def install(step: int, action: Callable[[torch.nn.Module], object]) -> None:
        def begin(run: Any) -> float:
            if run.step + 1 == step:
                action(run.model)
            return set_rates(run)

        monkeypatch.setattr(loop, "_set_rates", begin)

    return install


@pytest.fixture
def stopped(at_step: AtStep) -> Stopped:
    """stopped(recipe, step) ends a run in this step, by a signal or, without one, at once; returns the recipe."""

    def make(recipe: Recipe, step: int, number: signal.Signals | None = signal.SIGINT) -> Recipe:
        def stop(model: torch.nn.Module) -> None:
            if number is None:
                raise SystemExit
            signal.raise_signal(number)

        at_step(step, stop)
        with pytest.raises(SystemExit if number is None else TrainingInterrupted):
            train(recipe)
        at_step(0, print)
        return recipe

    return make


@pytest.fixture
def alone() -> Iterator[None]:
    """This process as the only device of a group."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without the measured times."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in TIMES} for line in lines]


def assert_same_weights(one: Path, other: Path) -> None:
    """Every bit of every weight of two runs agrees."""
    left, right = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


def assert_same_run(one: Path, other: Path) -> None:
    """Two runs have the same weights and metrics."""
    assert_same_weights(one, other)
    assert metrics(one) == metrics(other)
