import errno
import json
import math
import os
import pickle
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from multilin.cli.progress import format_figures
from multilin.data.tokenizers import VocabularyTooLarge
from multilin.errors import InputError
from multilin.model.factory import create_model, layers_of, model_names
from multilin.runs import checkpoints
from multilin.training import step as training_step
from multilin.training.loop import train
from multilin.training.nonfinite import find_nonfinite
from multilin.training.outcomes import RunResult, TrainingFailed, TrainingInterrupted
from multilin.training.report import draw_loss
from multilin.training.run_folder import RunFolder
from multilin.training.saving import Saver
from tests.training.conftest import AtStep, Stopped, Tiny, assert_same_run, assert_same_weights, metrics

DISK_IS_FULL = [
    OSError(errno.ENOSPC, "No space left on device"),
    SafetensorError("No space left on device (os error 28)"),
]


def make_loss_nan(model: torch.nn.Module) -> RemovableHandle:
    return model.get_input_embeddings().register_forward_hook(lambda module, inputs, output: output * torch.nan)


def make_gradient_infinite(model: torch.nn.Module) -> RemovableHandle:
    return next(model.parameters()).register_hook(lambda gradient: gradient * torch.inf)


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (make_loss_nan, "loss of step 6 is nan, first in the forward pass of model.embedding.embed_tokens"),
        (
            make_gradient_infinite,
            r"gradient norm of step 6 is \w+, first in the backward pass of model.embedding.embed_tokens",
        ),
    ],
)
def test_a_loss_that_is_not_finite_stops_the_run_and_spoils_nothing(
    tiny: Tiny, tmp_path: Path, at_step: AtStep, uninterrupted: RunResult, spoil: Callable[..., None], what: str
) -> None:
    recipe = tiny(tmp_path / "run")
    at_step(6, spoil)
    blocks = r"in the batch of blocks \d+, \d+, \d+, \d+ of the training text"
    sentence = rf"the {what}, {blocks}; the checkpoint of step 4 is kept"
    with pytest.raises(TrainingFailed, match=sentence):
        train(recipe)
    assert metrics(tmp_path / "run")[-1]["step"] == 5
    at_step(0, print)
    resumed = train(recipe, resume=True)
    assert_same_weights(resumed.output, uninterrupted.output)


class NanGradient(torch.autograd.Function):
    """The input, whose gradient is nan."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * torch.nan


def make_nan(values: Tensor) -> Tensor:
    return values * torch.nan


@pytest.mark.parametrize("name", model_names())
def test_the_first_module_that_is_not_finite_is_named(name: str) -> None:
    """What a hook adds to the last layer counts as computed by that layer, after all modules inside it."""
    torch.manual_seed(0)
    model = create_model(name, vocab_size=20, hidden_size=16, num_layers=2, n_positions=16).train()
    ids = torch.randint(20, (2, 16))

    def loss() -> Tensor:
        result: Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
        return result

    layer = layers_of(model)[-1]
    (place,) = (name for name, module in model.named_modules() if module is layer)
    assert find_nonfinite(model, loss) is None
    for spoil, direction in ((make_nan, "forward"), (NanGradient.apply, "backward")):
        with spoiled(layer, spoil):
            assert find_nonfinite(model, loss) == f"first in the {direction} pass of {place}"
    weight = next(layer.parameters())
    with torch.no_grad():
        weight.view(-1)[-1] = torch.inf
    (weight_name,) = (name for name, parameter in model.named_parameters() if parameter is weight)
    assert find_nonfinite(model, loss) == f"{weight_name} was not finite before the step"
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def spoiled(layer: nn.Module, spoil: Callable[[Tensor], Tensor]) -> RemovableHandle:
    """The layer's output is replaced."""

    def replace(module: nn.Module, inputs: object, output: Any) -> Any:
        return (spoil(output[0]), *output[1:]) if isinstance(output, tuple) else spoil(output)

    return layer.register_forward_hook(replace)


KINDS = {
    "bf16": {"training.precision": "bf16"},
    "int8": {"training.precision": "int8"},
    "host": {"training.precision": "int8", "training.master": "host"},
    "checkpointing": {"training.gradient_checkpointing": True},
    "llama": {"model.architecture": "llama"},
}


@pytest.mark.filterwarnings("ignore:training.master", "ignore:llama reads across")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("spoil", "direction"), [(make_nan, "forward"), (NanGradient.apply, "backward")])
def test_a_run_names_the_layer_in_all_kinds_of_training(
    tiny: Tiny, tmp_path: Path, at_step: AtStep, kind: str, spoil: Callable[..., Tensor], direction: str
) -> None:
    at_step(2, lambda model: spoiled(layers_of(model)[0], spoil))
    with pytest.raises(TrainingFailed, match=rf"of step 2 is nan, first in the {direction} pass of model.layers.0, in"):
        train(tiny(tmp_path / "run", **KINDS[kind]))


def test_a_run_of_adapters_names_the_layer(
    uninterrupted: RunResult, tune: Tiny, tmp_path: Path, at_step: AtStep
) -> None:
    at_step(2, lambda model: spoiled(layers_of(model)[0], make_nan))
    with pytest.raises(TrainingFailed, match=r"of step 2 is nan, first in the forward pass of model.layers.0, in"):
        train(tune(uninterrupted.output, tmp_path / "run", **{"training.lora": {"rank": 2}}))


def test_the_loss_itself_is_named_where_all_modules_are_finite() -> None:
    class Model(nn.Linear):
        def forward(self, values: Tensor) -> Tensor:
            return (super().forward(values) * 0).log().sum()

    model = Model(2, 2)
    assert find_nonfinite(model, lambda: model(torch.ones(1, 2))) == "first in the forward pass of the loss"


@pytest.mark.parametrize("optimizer", ["adamw", "normalized_sgd", "matrix_moment"])
@pytest.mark.parametrize("spoil", [make_loss_nan, make_gradient_infinite])
def test_a_step_that_is_not_finite_can_be_left_out(
    tiny: Tiny, tmp_path: Path, at_step: AtStep, spoil: Callable[..., object], optimizer: str
) -> None:
    weights: list[dict[str, torch.Tensor]] = []

    def spoil_once(model: torch.nn.Module) -> None:
        weights.append({name: weight.clone() for name, weight in model.state_dict().items()})
        handle = spoil(model)
        next(model.parameters()).register_post_accumulate_grad_hook(lambda _: handle.remove())

    options = {"optimizer.name": optimizer, "optimizer.nonfinite": "skip", "training.global_batch_size": 2}
    recipe = tiny(tmp_path / "run", **options, **{"training.max_steps": 6, "training.log_every_steps": 1})
    at_step(6, spoil_once)
    with pytest.warns(UserWarning, match=r"of step 6 is not finite, in the batch of blocks .* such steps are skipped"):
        result = train(recipe)
    for name, weight in result.model.state_dict().items():
        assert torch.equal(weight, weights[0][name])
    lines = metrics(tmp_path / "run")
    assert [line["skipped_steps"] for line in lines] == [0] * 5 + [1]
    assert lines[-1]["loss"] == lines[-2]["loss"]
    assert lines[-1]["tokens"] == 6 * lines[0]["tokens"]


def make_infinite(monkeypatch: pytest.MonkeyPatch, last: float = math.inf) -> None:
    """Let the loss of every step up to the last one be infinite."""
    compute = training_step.pass_loss
    monkeypatch.setattr(
        training_step, "pass_loss", lambda *given: compute(*given) * (math.inf if given[4] <= last else 1.0)
    )


def refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def test_a_run_in_which_no_step_was_made_has_failed(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_infinite(monkeypatch)
    sentence = "the loss or the gradient of each of the 12 steps was not finite; no checkpoint was saved yet"
    with pytest.warns(UserWarning, match="is not finite"), pytest.raises(TrainingFailed, match=sentence):
        train(tiny(tmp_path / "run", **{"optimizer.nonfinite": "skip"}))
    lines = [
        json.loads(line, parse_constant=refuse) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    ]
    assert [line["skipped_steps"] for line in lines] == [3, 5, 6, 9, 10, 12]
    assert all("loss" not in line for line in lines)
    assert lines == RunFolder(tmp_path / "run").read_metrics()


@pytest.mark.filterwarnings("ignore:the loss or the gradient of step")
def test_all_files_of_a_run_that_begins_with_skipped_steps_are_json(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopped: Stopped
) -> None:
    """A checkpoint follows the first step that was made, before the line that has its loss."""
    make_infinite(monkeypatch, last=3)
    changes = {"optimizer.nonfinite": "skip", "training.log_every_steps": 3, "training.eval_every_steps": 3}
    whole = train(tiny(tmp_path / "whole", **changes))
    recipe = stopped(tiny(tmp_path / "run", **changes), 5)
    assert (
        json.loads((tmp_path / "run.checkpoints/checkpoint-5/progress.json").read_text())["meter"]["last_loss"] is None
    )
    assert_same_run(train(recipe, resume=True).output, whole.output)
    for file in [*tmp_path.rglob("*.json"), *tmp_path.rglob("*.jsonl")]:
        for text in file.read_text().splitlines() if file.suffix == ".jsonl" else [file.read_text()]:
            json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize("loss", ["NaN", "null", "Infinity"])
def test_a_line_without_a_finite_loss_is_read_without_it(tmp_path: Path, loss: str) -> None:
    figures = {"step": 1, "tokens": 2, "seconds": 3.0, "tokens_per_second": 4.0}
    (tmp_path / "metrics.jsonl").write_text(f'{json.dumps(figures)[:-1]}, "loss": {loss}}}\n')
    assert RunFolder(tmp_path).read_metrics() == [figures]
    assert "every step was skipped" in format_figures(figures)
    draw_loss([figures, figures | {"loss": 1.0}], tmp_path / "loss.png")


def test_a_validation_loss_that_is_not_finite_fails_the_run(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = {"validation_loss": math.nan, "validation_bits_per_byte": math.inf}
    monkeypatch.setattr("multilin.training.loop._validate", lambda run: figures)
    with pytest.raises(TrainingFailed, match=r"after the last step is not finite; the checkpoint of step 12 is kept"):
        train(tiny(tmp_path / "run"))
    assert not (tmp_path / "run/model.safetensors").exists()
    for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines():
        assert not figures.keys() & json.loads(line, parse_constant=refuse).keys()


def test_checkpoints_change_nothing_while_all_steps_are_left_out(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch makes a state for an optimizer without one by a step of its own, to save it."""
    make_infinite(monkeypatch, last=3)
    results = []
    for every in (0, 2):
        options = {"optimizer.nonfinite": "skip", "training.max_steps": 6, "training.save_every_steps": every}
        with pytest.warns(UserWarning, match="is not finite"):
            results.append(train(tiny(tmp_path / f"run{every}", **options)))
    assert_same_weights(*(result.output for result in results))


def test_a_run_that_is_stopped_before_any_update_says_that_there_is_no_checkpoint(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_step: AtStep
) -> None:
    make_infinite(monkeypatch)
    at_step(3, lambda model: signal.raise_signal(signal.SIGTERM))
    with (
        pytest.warns(UserWarning, match="is not finite"),
        pytest.raises(
            TrainingInterrupted, match=r"every step was skipped; `multilin train '.*my run' --resume` starts the run"
        ),
    ):
        train(tiny(tmp_path / "my run", **{"optimizer.nonfinite": "skip"}))


@pytest.mark.parametrize("error", DISK_IS_FULL)
def test_a_full_disk_keeps_the_checkpoint_before(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uninterrupted: RunResult, error: Exception
) -> None:
    def fill_up(tensors: dict[str, torch.Tensor], path: Path, **options: object) -> None:
        if "checkpoint-8" in str(path):
            path.write_bytes(b"half")
            raise error
        save_file(tensors, path, **options)

    recipe = tiny(tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "save_file", fill_up)
        sentence = r"checkpoint of step 8 could not be written to .*No space left.*; the checkpoint of step 4 is kept"
        with pytest.raises(TrainingFailed, match=sentence):
            train(recipe)
    assert [path.name for path in (tmp_path / "run.checkpoints").iterdir()] == ["checkpoint-4"]
    resumed = train(recipe, resume=True)
    assert_same_weights(resumed.output, uninterrupted.output)


def test_a_checkpoint_in_the_background_is_complete_when_a_run_fails(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_step: AtStep
) -> None:
    has_failed = threading.Event()
    write = Saver.write_checkpoint

    class Writer:
        def copy(self, *_: object) -> Callable[[], object]:
            return lambda: (has_failed.wait(60), time.sleep(0.5))  # longer than a run that does not wait needs to end

    def fail(model: torch.nn.Module) -> None:
        has_failed.set()
        raise TrainingFailed("a device was lost")

    def write_late(saver: Saver, progress: dict[str, Any]) -> None:
        saver._shards = Writer()
        write(saver, progress)

    at_step(5, fail)
    monkeypatch.setattr(Saver, "write_checkpoint", write_late)
    with pytest.raises(TrainingFailed, match="a device was lost; the checkpoint of step 4 is kept"):
        train(tiny(tmp_path / "run"))
    assert [path.name for path in (tmp_path / "run.checkpoints").iterdir()] == ["checkpoint-4"]


def test_a_full_disk_while_logging_is_one_sentence(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: object, line: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("multilin.training.run_folder.RunFolder.append_metrics", fail)
    with pytest.raises(TrainingFailed, match=r"the run in .* stopped: No space left on device"):
        train(tiny(tmp_path / "run"))


@pytest.mark.parametrize("error", [TrainingInterrupted("stopped", signal.SIGINT), VocabularyTooLarge("too large", 300)])
def test_an_exception_comes_from_another_process_as_it_was(error: Exception) -> None:
    copied = pickle.loads(pickle.dumps(error))
    assert (type(copied), str(copied), vars(copied)) == (type(error), str(error), vars(error))


def test_a_process_that_ends_before_the_first_step_is_one_sentence(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*_: object) -> None:
        raise RuntimeError("[third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer")

    monkeypatch.setattr("multilin.training.loop.read_data", lost)
    with pytest.raises(
        TrainingFailed, match=r"stopped because another process of the run has ended; no checkpoint was"
    ):
        train(tiny(tmp_path / "run"))


def test_a_folder_whose_files_are_read_as_text_is_refused(tiny: Tiny, text_file: Path, tmp_path: Path) -> None:
    books = tmp_path / "books"
    books.mkdir()
    shutil.copy(text_file, books)
    for field in ("data.source", "data.validation"):
        with pytest.raises(InputError, match=rf"output: .*default lies in {field}, .*books, whose files are all read"):
            train(tiny(books / "runs" / "default", **{field: str(books)}))
    for pattern in ("**/*.md", "*/*/*.jsonl"):
        with pytest.raises(InputError, match=rf"output: .*default lies in data.source, .*{re.escape(pattern)}, whose"):
            train(tiny(books / "runs" / "default", **{"data.source": f"{books}/{pattern}"}))
    (books / "linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").mkdir()
    with pytest.raises(InputError, match=r"output: .*default lies in data.source, .*books, whose files"):
        train(tiny(tmp_path / "elsewhere" / "default", **{"data.source": str(books)}))
    assert not (books / "runs").exists()
    (books / "loop").symlink_to("loop")
    with pytest.raises(InputError, match=r"data.source: .*loop.* does not exist"):
        train(tiny(tmp_path / "default", **{"data.source": f"{books}/loop"}))


def test_a_folder_with_another_run_is_refused_unless_told_otherwise(tiny: Tiny, tmp_path: Path) -> None:
    first = train(tiny(tmp_path / "run", **{"training.max_steps": 2}))
    kept = {path: path.read_bytes() for path in first.output.rglob("*") if path.is_file()}
    with pytest.raises(InputError, match=r"output: .*run already holds a run; .*--resume.*--overwrite"):
        train(tiny(tmp_path / "run"))
    assert {path: path.read_bytes() for path in first.output.rglob("*") if path.is_file()} == kept
    for name in ("notes.txt", "tokenizer.md"):
        (first.output / name).write_text("mine")
    second = train(tiny(tmp_path / "run", **{"training.max_steps": 1}), overwrite=True)
    assert [line["step"] for line in metrics(second.output)] == [1]
    assert [path.name for path in RunFolder(second.output).checkpoints.iterdir()] == ["checkpoint-1"]
    assert {(second.output / name).read_text() for name in ("notes.txt", "tokenizer.md")} == {"mine"}
    shutil.rmtree(second.output)
    with pytest.raises(InputError, match=r"output: .*checkpoint-1 is left from a run whose folder is gone; .*--resume"):
        train(tiny(tmp_path / "run", **{"training.max_steps": 1}))
    assert RunFolder(second.output).last_checkpoint() is not None


def test_a_folder_with_other_files_is_refused_even_to_overwrite(tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("mine")
    with pytest.raises(InputError, match="holds files that are not a run"):
        train(tiny(tmp_path), overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]


def test_there_must_be_a_run_to_resume(tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"output: there is no run to resume in .*nothing"):
        train(tiny(tmp_path / "nothing"), resume=True)
    assert not (tmp_path / "nothing").exists()


def test_a_model_without_its_checkpoints_is_not_trained_over(
    tiny: Tiny, tmp_path: Path, uninterrupted: RunResult
) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(uninterrupted.output, moved)
    weights = (moved / "model.safetensors").read_bytes()
    with pytest.raises(InputError, match=r"moved holds a model \(model\.safetensors\) and no checkpoint"):
        train(tiny(moved), resume=True)
    assert (moved / "model.safetensors").read_bytes() == weights


def test_resume_and_overwrite_exclude_each_other(tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="resume and overwrite given"):
        train(tiny(tmp_path / "run"), resume=True, overwrite=True)


def test_an_unwritable_folder_is_refused_before_any_work(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Whoever runs the tests as root may write everywhere, so the system's answer is replaced.
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    monkeypatch.setattr("multilin.training.loop.read_data", lambda *given: pytest.fail("work was done"))
    with pytest.raises(InputError, match=r"output: .*run cannot be written; permission is missing for"):
        train(tiny(tmp_path / "run"))


def test_checkpoints_that_could_not_be_written_are_refused_before_any_work(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They lie beside the output folder."""
    (tmp_path / "run.checkpoints").touch()
    monkeypatch.setattr("multilin.training.loop.read_data", lambda *given: pytest.fail("work was done"))
    with pytest.raises(InputError, match=r"output: .*run\.checkpoints cannot be a folder, because .* is a file"):
        train(tiny(tmp_path / "run"))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model.architecture": "nonsense"}, "nonsense"),
        ({"model.options.num_heads": 3}, "num_heads: 3 given"),
        ({"model.options.windoww": 3}, "windoww"),
        ({"model.architecture": "gpt2", "model.options.num_heads": 3}, "num_heads: 3 given"),
        (
            {"model.n_positions": 100_000},
            r"data\.source: .* tokens to train on, less than one block of model\.n_positions",
        ),
        ({"data.source": "missing.txt"}, r"missing\.txt"),
    ],
)
def test_bad_input_leaves_nothing_behind(tiny: Tiny, tmp_path: Path, changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        train(tiny(tmp_path / "run", **changes))
    assert not (tmp_path / "run").exists()


def test_missing_tensorboard_is_said_before_any_work(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"training\.report_to: .*pip install 'multilin\[tensorboard\]'"):
        train(tiny(tmp_path / "run", **{"training.report_to": ["tensorboard"]}))
    assert not (tmp_path / "run").exists()
