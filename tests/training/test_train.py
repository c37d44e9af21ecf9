import importlib.util
import json
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from multilin.analysis.evaluate.run import break_down_run
from multilin.architectures.base import architectures
from multilin.errors import InputError
from multilin.model.factory import BASELINES, create_model, model_names
from multilin.runs.load import load_run
from multilin.training.assemble import read_text, report_validation
from multilin.training.loop import train
from multilin.training.optimizers import OPTIMIZERS
from multilin.training.outcomes import RunResult
from multilin.training.progress import TrainingProgress
from multilin.training.recipe import load_recipe
from multilin.training.report import write_card
from multilin.training.resolve import resolve_recipe
from multilin.training.run_folder import RunFolder
from multilin.training.step import baseline_loss
from tests.training.conftest import Stopped, Tiny, metrics


@pytest.fixture(scope="module")
def result(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    return train(tiny(tmp_path_factory.mktemp("runs") / "run", **{"training.max_steps": 40}))


@pytest.fixture(scope="module")
def short(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    return train(tiny(tmp_path_factory.mktemp("runs") / "run", **{"training.max_steps": 6}))


class Reported(TrainingProgress):
    def __init__(self) -> None:
        self.summaries: list[str] = []

    def validation(self, summary: str) -> None:
        self.summaries.append(summary)


def test_what_is_validated_on_is_reported_and_an_unlike_text_is_warned_of(tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text("".join(f"#define X_{number} ({number * 7919:x})\n" for number in range(300)))
    (tmp_path / "book.txt").write_text(
        "".join(f"The cat sat on mat {number} and the dog ran.\n" for number in range(900))
    )
    reported = Reported()
    changes = {"data.source": str(tmp_path / "book.txt"), "training.max_steps": 1}
    train(tiny(tmp_path / "run", **changes), progress=reported)
    assert reported.summaries == ["the last 10 % of book.txt, 3.6 kB of 35.9 kB"]
    assert json.loads((tmp_path / "run/data.json").read_text())["validation"]["summary"] == reported.summaries[0]
    recipe = tiny(tmp_path / "run", **changes, **{"data.validation": str(tmp_path / "other.txt")})
    with pytest.warns(
        UserWarning, match=r"data.validation: the validation text is unlike .* needs \d+\.\d times as many"
    ):
        report_validation(recipe, read_text(recipe), reported)
    assert reported.summaries[1].startswith("1 document of data.validation, ")


def test_a_run_learns(result: RunResult) -> None:
    lines = metrics(result.output)
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.5
    assert lines[-1]["validation_bits_per_byte"] < lines[1]["validation_bits_per_byte"]


def test_the_run_folder_is_a_hugging_face_model(result: RunResult) -> None:
    model = AutoModelForCausalLM.from_pretrained(result.output)
    tokenizer = AutoTokenizer.from_pretrained(result.output)
    inputs = tokenizer("the cat", return_tensors="pt")
    with torch.no_grad():
        trained = result.model.to("cpu")
        torch.testing.assert_close(model(**inputs).logits, trained(**inputs).logits)
    assert getattr(model.config, "use_cache", True)
    assert model.generate(**inputs, max_new_tokens=3).shape[1] == inputs["input_ids"].shape[1] + 3


@pytest.mark.parametrize("config", [{}, {"tie_word_embeddings": False, "output_bias": "unigram"}])
@pytest.mark.parametrize("name", BASELINES)
def test_few_targets_have_the_loss_and_gradients_of_transformers(name: str, config: dict[str, Any]) -> None:
    if config and name == "llama":
        config = {**config, "unit_variance": True}
    torch.manual_seed(0)
    model = create_model(name, hidden_size=16, num_layers=2, vocab_size=50, n_positions=24, **config)
    ids = torch.randint(50, (3, 24))
    inputs = {"input_ids": ids, "labels": ids.where(torch.rand(3, 24) < 0.2, -100), "use_cache": False}
    expected = model(**inputs).loss
    gradients = torch.autograd.grad(expected, list(model.parameters()))
    found = baseline_loss(model, inputs)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found, list(model.parameters())), gradients)
    torch.testing.assert_close(
        baseline_loss(model, inputs, num_items=7), expected * (inputs["labels"][:, 1:] >= 0).sum() / 7
    )


def test_metrics_say_what_happened_at_each_step(result: RunResult) -> None:
    lines = [json.loads(line) for line in (result.output / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == sorted({*range(3, 41, 3), *range(5, 41, 5)})
    tokens_per_step = 2 * 2 * 16
    for line in lines:
        assert line["tokens"] == line["step"] * tokens_per_step
        assert line["grad_norm"] > 0
        assert line["tokens_per_second"] > 0
        assert ("validation_loss" in line) == ("validation_bits_per_byte" in line) == (line["step"] % 5 == 0)
    seconds = [line["seconds"] for line in lines]
    assert seconds == sorted(seconds)
    assert (result.steps, result.tokens) == (40, 40 * tokens_per_step)


def test_the_learning_rate_warms_up_and_falls(result: RunResult) -> None:
    rates = {line["step"]: line["learning_rate"] for line in metrics(result.output)}
    assert rates[3] == pytest.approx(0.01)  # the first step after the warm-up of two
    assert rates[21] == pytest.approx(0.01 * (40 - 20) / (40 - 2))
    assert rates[40] == pytest.approx(0.01 / 38)


def test_the_recipe_in_the_folder_is_complete_and_repeats_the_run(result: RunResult, tmp_path: Path) -> None:
    recipe = load_recipe(result.output)
    assert recipe.optimizer.weight_decay is not None
    again = train(load_recipe(result.output, {"output": str(tmp_path / "again")}))
    assert metrics(again.output) == metrics(result.output)


def test_the_folder_holds_a_card_a_plot_and_nothing_pickled(result: RunResult) -> None:
    card = (result.output / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert f"{result.validation_bits_per_byte:.3f}" in card
    assert "AutoModelForCausalLM.from_pretrained" in card
    assert 'tokenizer(tokenizer.eos_token + "The"' in card  # as `multilin generate` begins
    assert (result.output / "loss.png").read_bytes().startswith(b"\x89PNG")
    suffixes = {path.suffix for path in result.output.rglob("*") if path.is_file()}
    assert suffixes <= {".json", ".jsonl", ".yaml", ".safetensors", ".png", ".md", ".txt", ".py"}
    assert not list(result.output.rglob(".*"))


def test_the_card_names_the_tokenizer(result: RunResult, tmp_path: Path) -> None:
    """A task, as prepared text, comes with its own, whatever the recipe trained for another text."""
    for changes, name in (({}, "byte"), ({"data.source": "task:mqar"}, "part of the data")):
        write_card(resolve_recipe(load_recipe(result.output, changes)), result, tmp_path / "card.md")
        assert f"| Tokenizer | {name}, 258 entries |" in (tmp_path / "card.md").read_text()


def test_checkpoints_are_kept_as_the_recipe_says(result: RunResult) -> None:
    folder = RunFolder(result.output).checkpoints
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoint-36", "checkpoint-40"]


def test_a_checkpoint_is_a_run_of_its_own_and_the_run_folder_holds_none(result: RunResult) -> None:
    """Model, tokenizer and recipe of a checkpoint; the folder to publish has nothing of the optimizer."""
    folder, checkpoint = result.output, RunFolder(result.output).checkpoints / "checkpoint-40"
    last, run = load_run(checkpoint), load_run(folder)
    assert break_down_run(last).evaluation == break_down_run(run).evaluation
    assert not [path for path in folder.rglob("*") if "optimizer" in path.name or "checkpoint" in path.name]
    with pytest.raises(InputError, match=r"checkpoint-40 is a checkpoint of a run; give the folder of the run"):
        train(load_recipe(checkpoint), resume=True)


@pytest.mark.parametrize("architecture", model_names())
@pytest.mark.filterwarnings("ignore:.*reads across document borders")
def test_every_architecture_and_baseline_trains_the_same_way(tiny: Tiny, tmp_path: Path, architecture: str) -> None:
    changes = {"model.architecture": architecture, "training.max_steps": 3, "training.label_smoothing": 0.1}
    result = train(tiny(tmp_path / "run", **changes, **{"model.options": {}}))
    assert metrics(result.output)[-1].keys() >= {"validation_bits_per_byte", "grad_norm"}
    AutoModelForCausalLM.from_pretrained(result.output)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("architecture", architectures())
@pytest.mark.filterwarnings("ignore:.*reads across document borders")
def test_every_optimizer_trains_every_architecture(
    tiny: Tiny, tmp_path: Path, architecture: str, optimizer: str
) -> None:
    changes: dict[str, Any] = {"model.architecture": architecture, "optimizer.name": optimizer}
    if optimizer != "adamw":
        changes["optimizer.learning_rate"] = None
    rest = {"schedule.name": "constant", "training.max_steps": 30, "training.eval_every_steps": 0}
    run = {"training.save_every_steps": 0, "training.global_batch_size": 2, "training.log_every_steps": 1}
    lines = metrics(train(tiny(tmp_path / "run", **changes, **rest, **run)).output)
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.1


def test_documents_a_model_cannot_keep_apart_are_announced(tiny: Tiny, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="gpt2 reads across document borders inside a block"):
        train(tiny(tmp_path / "run", **{"model.architecture": "gpt2", "training.max_steps": 1}))


def test_accumulated_batches_are_one_large_batch(tiny: Tiny, tmp_path: Path) -> None:
    plain = {"model.options.dropout": 0.0, "training.max_steps": 4}
    large = train(tiny(tmp_path / "large", **plain, **{"training.batch_size": 4}))
    small = train(tiny(tmp_path / "small", **plain, **{"training.batch_size": 1}))
    for one, other in zip(metrics(large.output), metrics(small.output), strict=True):
        assert other["loss"] == pytest.approx(one["loss"], abs=1e-4)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-2)


@pytest.mark.parametrize(
    "changes",
    [
        {"schedule.name": "cosine"},
        {"schedule.name": "constant"},
        {"optimizer.clip_norm": 0.001},
        {"optimizer.betas": [0.5, 0.6]},
        {"optimizer.weight_decay": 5.0},
        {"optimizer.name": "normalized_sgd"},
        {"optimizer.name": "matrix_moment"},
        {"schedule.name": "tail"},
        {"schedule.name": "inverse_sqrt", "schedule.constant_steps": 1},
        {"training.label_smoothing": 0.3},
        {"training.seed": 1},
        {"training.precision": "bf16"},
    ],
)
def test_each_setting_changes_the_training(
    tiny: Tiny, short: RunResult, tmp_path: Path, changes: dict[str, Any]
) -> None:
    other = train(tiny(tmp_path / "run", **{"training.max_steps": 6}, **changes))
    before, after = metrics(short.output)[-1], metrics(other.output)[-1]
    assert before["loss"] != after["loss"] or before["learning_rate"] != after["learning_rate"]
    assert after["loss"] == pytest.approx(before["loss"], rel=0.6)


@pytest.mark.parametrize(
    ("base", "change"),
    [
        ({"optimizer.name": "normalized_sgd"}, {"optimizer.row_average": 0.0}),
        ({"schedule.name": "tail"}, {"schedule.tail": 1.0}),
    ],
)
def test_each_setting_of_an_optimizer_changes_the_training(
    tiny: Tiny, tmp_path: Path, base: dict[str, Any], change: dict[str, Any]
) -> None:
    steps = {"training.max_steps": 6}
    before = metrics(train(tiny(tmp_path / "before", **steps, **base)).output)[-1]
    after = metrics(train(tiny(tmp_path / "after", **steps, **base, **change)).output)[-1]
    assert before["loss"] != after["loss"]
    assert after["loss"] == pytest.approx(before["loss"], rel=0.6)


def test_gradient_checkpointing_changes_nothing_but_memory(tiny: Tiny, tmp_path: Path) -> None:
    plain = train(tiny(tmp_path / "plain", **{"training.max_steps": 3}))
    saving = train(tiny(tmp_path / "saving", **{"training.max_steps": 3, "training.gradient_checkpointing": True}))
    assert saving.loss == pytest.approx(plain.loss, abs=1e-5)


def test_weight_decay_spares_biases_norms_and_embeddings(tiny: Tiny, tmp_path: Path) -> None:
    train(tiny(tmp_path / "run", **{"training.max_steps": 1}))
    groups = json.loads((tmp_path / "run.checkpoints/checkpoint-1/optimizer.json").read_text())
    decayed = [name for group in groups if group["weight_decay"] for name in group["params"]]
    spared = [name for group in groups if not group["weight_decay"] for name in group["params"]]
    assert all("norm" not in name and "bias" not in name and "embedding" not in name for name in decayed)
    assert any("projections" in name for name in decayed)
    assert any("embedding" in name for name in spared)


def test_tensorboard_shows_every_step_once_also_after_a_kill(tiny: Tiny, tmp_path: Path, stopped: Stopped) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    recipe = stopped(tiny(tmp_path / "run", **{"training.report_to": ["tensorboard"]}), 7, None)
    result = train(recipe, resume=True)
    # A thread writes the events while their file is open.
    assert "_AsyncWriterThread" not in [type(thread).__name__ for thread in threading.enumerate()]
    events = accumulator.EventAccumulator(str(result.output / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("loss")] == [line["step"] for line in metrics(result.output)]


def test_progress_is_told_to_who_asks_and_printed_by_nobody(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Recorder(TrainingProgress):
        def __init__(self) -> None:
            self.calls: list[tuple[str, Any]] = []

        def start(self, step: int, max_steps: int | None) -> None:
            self.calls.append(("start", (step, max_steps)))

        def step(self, step: int, share: float) -> None:
            assert share == step / 12
            self.calls.append(("step", step))

        def line(self, line: dict[str, Any]) -> None:
            self.calls.append(("line", line))

        def stop(self) -> None:
            self.calls.append(("stop", None))

    recorder = Recorder()
    result = train(tiny(tmp_path / "run"), progress=recorder)
    assert (recorder.calls[0], recorder.calls[-1]) == (("start", (0, 12)), ("stop", None))
    assert [value for name, value in recorder.calls if name == "step"] == list(range(1, 13))
    assert [value for name, value in recorder.calls if name == "line"] == [
        json.loads(line) for line in (result.output / "metrics.jsonl").read_text().splitlines()
    ]
    assert capsys.readouterr().out == ""


def test_a_hybrid_trains_through_a_recipe_and_says_what_it_is(tiny: Tiny, tmp_path: Path) -> None:
    layers = [{"architecture": "tscale", "width": 4, "initializer_range": 0.5}, {"architecture": "additive"}]
    changes = {"model.layers": layers, "model.num_layers": None, "training.max_steps": 6}
    result = train(tiny(tmp_path / "run", **changes))
    assert [entry["architecture"] for entry in result.model.config.layers] == ["tscale", "additive"]
    assert "tscale + additive" in (tmp_path / "run" / "README.md").read_text()
    assert load_recipe(tmp_path / "run").model.num_layers == 2


def test_a_fixed_unigram_bias_is_the_log_of_the_token_counts(tiny: Tiny, tmp_path: Path) -> None:
    recipe = tiny(tmp_path / "run", **{"model.config.output_bias": "unigram", "training.max_steps": 2})
    text = read_text(recipe)
    bias = train(recipe).model.lm_head.bias
    counts = torch.bincount(torch.from_numpy(text.train.tokens.astype("int64")), minlength=len(bias)) + 1.0
    torch.testing.assert_close(bias.cpu(), (counts / counts.sum()).log())


def test_every_line_of_metrics_is_reported(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules stand in for the trackers, whose packages are not here."""
    reported: dict[str, list[dict[str, Any]]] = {"wandb": [], "mlflow": [], "trackio": []}
    ended: list[str] = []

    def note(name: str) -> Callable[..., None]:
        return lambda line, step=None: reported[name].append(dict(line))

    def end(name: str) -> Callable[[], None]:
        return lambda: ended.append(name)

    for name in reported:
        run = SimpleNamespace(log=note(name), finish=end(name))
        functions = {"init": lambda run=run, **about: run if about["name"] == "run" else None}
        functions |= {"start_run": lambda run_name: None, "log_metrics": note(name), "end_run": end(name)}
        module = types.ModuleType(name)
        module.__dict__.update(functions, __spec__=importlib.util.find_spec("json"))
        monkeypatch.setitem(sys.modules, name, module)
    train(tiny(tmp_path / "run", **{"training.report_to": [*reported]}))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert reported == dict.fromkeys(reported, lines)
    assert ended == [*reported]
