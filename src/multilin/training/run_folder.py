"""The folder of a run: who may write into it, and what lies where.

recipe.yaml     everything that decided the run      metrics.jsonl   one line per measurement
data.json       the text: sizes and identity
config.json, model.safetensors, tokenizer.json ...   loss.png        the course of the loss
                the model, as Hugging Face has it    README.md       the model card
checkpoints/    where a stopped run goes on          tensorboard/    event files, if asked for
"""

import importlib.util
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from multilin.data.prepare import PreparedText
from multilin.data.task_text import TaskText
from multilin.errors import InputError
from multilin.training.checkpoints import checkpoints, remove_parts
from multilin.training.recipe import RECIPE_FILE, Recipe, first_difference, load_recipe, save_recipe

# What a run writes at the top of its folder, and so what --overwrite removes; other files are left alone.
_WRITTEN = (
    *(
        "data.json",
        "metrics.jsonl",
        "loss.png",
        "demo.png",
        "README.md",
        "config.json",
        "generation_config.json",
        "model*.safetensors",
    ),
    *("model.safetensors.index.json", "tokenizer*", "special_tokens_map.json", "checkpoints", "tensorboard"),
)


class RunFolder:
    """The files of one run."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.recipe = self.path / RECIPE_FILE
        self.data = self.path / "data.json"
        self.metrics = self.path / "metrics.jsonl"
        self.plot = self.path / "loss.png"
        self.card = self.path / "README.md"
        self.checkpoints = self.path / "checkpoints"
        self.tensorboard = self.path / "tensorboard"

    def check(self, recipe: Recipe, *, resume: bool, overwrite: bool) -> None:
        """Refuse, before any work, a folder that this run must not or cannot write to.

        Raises:
            InputError: it holds another run or other files, cannot be written, or has nothing (the same) to resume.
        """
        if resume and overwrite:
            raise InputError("resume and overwrite exclude each other: continue the run, or replace it")
        if recipe.training.tensorboard and importlib.util.find_spec("tensorboard") is None:
            raise InputError(
                "training.tensorboard: TensorBoard is not installed; `pip install 'multilin[tensorboard]'`"
            )
        _check_writable(self.path)
        if resume:
            self._check_resumable(recipe)
        elif self.recipe.exists() and not overwrite:
            raise InputError(
                f"output: {self.path} already holds a run; give another folder, or continue it with --resume, "
                "or replace it with --overwrite"
            )
        elif not self.recipe.exists() and self.path.exists() and any(self.path.glob("[!.]*")):
            raise InputError(f"output: {self.path} holds files that are not a run; give a new or an empty folder")

    def begin(self, recipe: Recipe, text: PreparedText | TaskText, *, resume: bool) -> None:
        """Make the folder ready: what an earlier run left is removed, unless this one continues it.

        Raises:
            InputError: the text is not the one the resumed run was trained on, or the folder cannot be written.
        """
        data = _describe(text)
        if resume and json.loads(self.data.read_text(encoding="utf-8")) != data:
            raise InputError(
                f"data.source: {recipe.data.source} (or the validation text) has changed since the run in {self.path} "
                "was started; resume it with the same text, or start a new run in another folder"
            )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"output: {self.path} cannot be written: {error.strerror}") from None
        if resume:
            remove_parts(self.checkpoints)
        else:
            self._clear()
        self.replace(self.data, lambda path: path.write_text(json.dumps(data, indent=1), encoding="utf-8"))
        self.replace_files(text.tokenizer.save_pretrained)
        # Last, because this file makes the folder a run that can be resumed.
        self.replace(self.recipe, lambda path: save_recipe(recipe, path))

    def last_checkpoint(self) -> Path | None:
        """The newest complete checkpoint."""
        return next(reversed(checkpoints(self.checkpoints)), None)

    def metrics_writers(self, *, tensorboard: bool) -> list[Callable[[dict[str, Any]], None]]:
        """What stores each line of metrics: metrics.jsonl, and TensorBoard's event files if asked for."""
        if not tensorboard:
            return [self.append_metrics]
        from torch.utils.tensorboard import SummaryWriter

        events = SummaryWriter(str(self.tensorboard))

        def append_events(line: dict[str, Any]) -> None:
            for name, value in line.items():
                if name != "step":
                    events.add_scalar(name, value, line["step"])
            events.flush()

        return [self.append_metrics, append_events]

    def append_metrics(self, line: dict[str, Any]) -> None:
        """Add one line to metrics.jsonl."""
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def read_metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl; one that a killed process left half written does not count."""
        lines = []
        for text in self.metrics.read_text(encoding="utf-8").splitlines() if self.metrics.exists() else []:
            try:
                lines.append(json.loads(text))
            except ValueError:
                break
        return lines

    def cut_metrics(self, step: int) -> None:
        """Drop the lines after a step, which a resumed run will write again."""
        kept = "".join(json.dumps(line) + "\n" for line in self.read_metrics() if line["step"] <= step)
        self.replace(self.metrics, lambda path: path.write_text(kept, encoding="utf-8"))

    def replace(self, path: Path, write: Callable[[Path], object]) -> None:
        """Write a file beside its place and rename it there."""
        part = path.with_name(f".part-{path.name}")
        try:
            write(part)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)

    def replace_files(self, write: Callable[[Path], object]) -> None:
        """Let `write` fill a folder, and when it is complete move its files to the top of this one."""
        part = self.path / ".part"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        try:
            write(part)
            for file in part.iterdir():
                file.replace(self.path / file.name)
        finally:
            shutil.rmtree(part, ignore_errors=True)

    def _check_resumable(self, recipe: Recipe) -> None:
        if not (self.recipe.exists() and self.data.exists()):
            raise InputError(f"output: there is no run to resume in {self.path}")
        difference = first_difference(load_recipe(self.recipe), recipe)
        if difference is not None:
            name, old, new = difference
            raise InputError(
                f"{name}: {new!r} given, but the run in {self.path} was started with {old!r}; resume it with the same "
                "recipe, or start a new run in another folder"
            )

    def _clear(self) -> None:
        for pattern in _WRITTEN:
            for path in self.path.glob(pattern):
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def _describe(text: PreparedText | TaskText) -> dict[str, Any]:
    return {"content": text.identity, "train": text.train.describe(), "validation": text.validation.describe()}


def _check_writable(path: Path) -> None:
    existing = path
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        raise InputError(f"output: {path} cannot be a folder, because {existing} is a file")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise InputError(f"output: {path} cannot be written; permission is missing for {existing}")
