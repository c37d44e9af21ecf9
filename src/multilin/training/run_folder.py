"""The folder of a run: its files, and the checks before it is written.

recipe.yaml     everything that decided the run      metrics.jsonl   one line per measurement
data.json       the text: sizes and identity         loss.png        a plot of the losses
config.json, model.safetensors, tokenizer.json ...   README.md       the model card
                the model, as Hugging Face has it    tensorboard/    event files, if asked for

Checkpoints are beside the folder, in NAME.checkpoints, so the folder can be published as it is. A checkpoint holds the
whole model and all that training needs to continue. A resumed run starts from a checkpoint and writes all files anew.
"""

import contextlib
import dataclasses
import json
import os
import shutil
import warnings
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path
from types import NoneType
from typing import Any

from transformers import PreTrainedTokenizerFast

from multilin.architectures.own_file import write_files
from multilin.data.corpora import linked_folders
from multilin.data.prepared import PreparedText
from multilin.data.tasks import TaskText
from multilin.data.tokenizers import TOKENIZER_FILES, save_tokenizer
from multilin.errors import InputError
from multilin.files import atomic_files, beside, check_folder, check_writable, remove_partials, short_path, write_whole
from multilin.runs import checkpoints
from multilin.runs.files import RECIPE_FILE
from multilin.settings.inputs import to_json
from multilin.training.recipe import Recipe, first_difference, load_recipe, save_recipe
from multilin.training.settings import fill

RUN_FILE = "run.json"  # in a checkpoint: text and metrics when it was written
METRICS = ("step", "tokens", "seconds", "tokens_per_second")  # in every line of metrics.jsonl

_TEXTS = ("README.md", "metrics.jsonl")  # files of a run that would be read as text

# Files that a run writes at the top of its folder, and that --overwrite removes; others are left alone.
_WRITTEN = (
    "data.json", "metrics.jsonl", "loss.png", "demo.png", "README.md", "config.json",
    "generation_config.json", "model*.safetensors", "model.safetensors.index.json", "adapter_config.json",
    "adapter_model.safetensors", "tensorboard", *TOKENIZER_FILES,
)  # fmt: skip


class RunFolder:
    """The files of one run."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.recipe = self.path / RECIPE_FILE
        self.data = self.path / "data.json"
        self.metrics = self.path / "metrics.jsonl"
        self.plot = self.path / "loss.png"
        self.card = self.path / "README.md"
        self.checkpoints = beside(self.path, ".checkpoints")
        self.tensorboard = self.path / "tensorboard"
        self._begun: tuple[str, PreTrainedTokenizerFast]
        self._record: dict[str, Any]
        self._model: dict[str, Any]

    def check(self, recipe: Recipe, *, resume: bool, overwrite: bool) -> Path | None:
        """Raise, before any work, if this run must not, or cannot, write to the folder.

        Returns:
            The newest undamaged checkpoint, to resume from; None to begin at the first step.

        Raises:
            InputError: the folder holds another run or other files, or cannot be written; or a run is to be resumed,
                but the folder has no run of this recipe, or no undamaged checkpoint.
        """
        if resume and overwrite:
            raise InputError("resume and overwrite given; give only one, to continue the run or to replace it")
        check_folder("output", self.path)
        check_folder("output", self.checkpoints)
        if (self.path / RUN_FILE).exists():
            raise InputError(f"output: {self.path} is a checkpoint of a run; give the folder of the run, or a new one")
        self.check_outside(recipe)
        if resume:
            return self._check_resumable(recipe)
        start = None if recipe.model.start is None else Path(os.path.realpath(recipe.model.start))
        if start is not None and (start == self.path.resolve() or start.is_relative_to(self.checkpoints.resolve())):
            raise InputError(f"output: {self.path} holds the model to start from (model.start); give another folder")
        if self.recipe.exists() and not overwrite:
            raise InputError(
                f"output: {self.path} already holds a run; give another folder, or continue it with --resume, "
                "or replace it with --overwrite"
            )
        if not overwrite and (checkpoint := self.last_checkpoint()) is not None:
            raise InputError(
                f"output: {checkpoint} is left from a run whose folder is gone; give another folder, or continue it "
                "with --resume, or replace it with --overwrite"
            )
        if not self.recipe.exists() and self.path.exists() and any(self.path.glob("[!.]*")):
            raise InputError(f"output: {self.path} holds files that are not a run; give a new or an empty folder")
        return None

    def check_outside(self, recipe: Recipe) -> None:
        """Raise if a later run would read files of the output as text.

        Raises:
            InputError: the output lies in the text to train or validate on.
        """
        output = self.path.resolve()
        sources = [] if recipe.data.is_prepared else [("source", recipe.data.source)]
        for name, source in [*sources, ("validation", recipe.data.validation)]:
            if source is None:
                continue
            place = Path(os.path.realpath(source))  # Path.resolve raises for a link to itself
            is_matched = any(
                (output / file).match(str(place)) or ("**" in source and fnmatch(str(output / file), str(place)))
                for file in _TEXTS
            )
            folders = [place, *linked_folders(place)] if place.is_dir() else []
            if is_matched or any(output.is_relative_to(folder) for folder in folders):
                raise InputError(
                    f"output: {self.path} lies in data.{name}, {short_path(source)}, whose files are all read as text; "
                    "give a folder elsewhere"
                )

    def with_its_batch(self, recipe: Recipe) -> Recipe:
        """The recipe, with the run's blocks per step if not given, so that any number of devices can resume the run."""
        for folder in (self.last_checkpoint(), self.path):
            if folder is not None and (folder / RECIPE_FILE).exists():
                with contextlib.suppress(InputError):  # a damaged recipe is refused or rewritten later
                    blocks = load_recipe(folder).training.global_batch_size
                    return dataclasses.replace(recipe, training=fill(recipe.training, global_batch_size=blocks))
        return recipe

    def begin(self, recipe: Recipe, text: PreparedText | TaskText, checkpoint: Path | None) -> None:
        """Make the folder ready; remove the files of an earlier run, unless this run resumes from a checkpoint.

        Raises:
            InputError: the text differs from the text that the resumed run was trained on.
            OSError: the folder cannot be written.
        """
        data = {"content": text.identity, "train": text.train.describe(), "validation": text.validation.describe()}
        before = None if checkpoint is None else _read_record(checkpoint)
        if before is not None and before["data"] != data:
            raise InputError(
                f"data.source: {recipe.data.source} (or the validation text) has changed since the run in {self.path} "
                "was started; resume it with the same text, or start a new run in another folder"
            )
        remove_partials(self.path)
        if before is None:
            self._remove(self._written())
        # First, because this file makes the folder a run, which can be resumed or replaced.
        save_recipe(recipe, self.recipe)
        write_files(vars(recipe.model), self.path)
        write_whole(self.data, to_json(data, indent=1))
        lines = before["metrics"] if before else []
        write_whole(self.metrics, "".join(to_json(line) + "\n" for line in lines))
        with atomic_files(self.path) as partial:
            save_tokenizer(text.tokenizer, partial)
        self._begun = self.recipe.read_text(encoding="utf-8"), text.tokenizer
        self._record, self._model = {"data": data, "metrics": lines}, vars(recipe.model)

    def clear(self) -> None:
        """Remove the files of a run from the folder, and keep other files."""
        self._remove(self._written())
        self.recipe.unlink()

    def write_record(self, checkpoint: Path) -> None:
        """Write the files of a checkpoint that describe the run: recipe, tokenizer, text, metrics."""
        recipe_text, tokenizer = self._begun
        write_whole(checkpoint / RECIPE_FILE, recipe_text)
        write_files(self._model, checkpoint)
        save_tokenizer(tokenizer, checkpoint)
        checkpoints.write_json(checkpoint / RUN_FILE, self._record)

    def last_checkpoint(self) -> Path | None:
        """The newest checkpoint, or None."""
        return next(reversed(checkpoints.checkpoints(self.checkpoints)), None)

    def append_metrics(self, line: dict[str, Any]) -> None:
        """Add one line to metrics.jsonl."""
        self._record["metrics"].append(line)
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(to_json(line) + "\n")

    def read_metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl, without an incomplete last line, which a killed process may leave.

        Raises:
            InputError: a line is damaged, or the file cannot be read.
        """
        try:
            content = self.metrics.read_bytes()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise InputError(f"run: {self.metrics} cannot be read ({error.strerror})") from None
        complete = content[: content.rfind(b"\n") + 1]
        return [_parse_line(text, f"{self.metrics}:{number}") for number, text in enumerate(complete.splitlines(), 1)]

    def _check_resumable(self, recipe: Recipe) -> Path | None:
        for path in filter(lambda path: path.suffix, self._written()):
            check_writable("output", path)
        checkpoint = self._whole_checkpoint()
        if checkpoint is None and not self.recipe.exists():
            raise InputError(f"output: there is no run to resume in {self.path}")
        if checkpoint is None:
            # An earlier run's model was removed when this run began.
            model = next((path for path in self._written() if path.suffix == ".safetensors"), None)
            if model is not None:
                raise InputError(
                    f"output: {self.path} holds a model ({model.name}) and no checkpoint to resume from; name the "
                    "folder as model.start in another run, or replace the model with --overwrite"
                )
            before = load_recipe(self.path)
        else:
            checkpoints.read_progress(checkpoint)
            _read_record(checkpoint)
            before = load_recipe(checkpoint)
        if difference := first_difference(before, recipe):
            name, old, new = difference
            raise InputError(
                f"{name}: {new!r} given, but the run in {self.path} was started with {old!r}; resume it with the same "
                "recipe, or start a new run in another folder"
            )
        return checkpoint

    def _whole_checkpoint(self) -> Path | None:
        """The newest checkpoint whose files match their checksums; None if there is no checkpoint."""
        damaged: list[str] = []
        for checkpoint in reversed(checkpoints.checkpoints(self.checkpoints)):
            if (damage := checkpoints.find_damage(checkpoint)) is None:
                if damaged:
                    warnings.warn(f"{'; '.join(damaged)}; the run resumes from {checkpoint.name} instead", stacklevel=4)
                return checkpoint
            damaged.append(f"{checkpoint}: {damage}")
        if damaged:
            raise InputError(
                f"output: there is no undamaged checkpoint to resume from ({'; '.join(damaged)}); restore the "
                "file, or start the run again with --overwrite"
            )
        return None

    def _remove(self, written: Iterable[Path]) -> None:
        for path in [*written, *self.checkpoints.glob("checkpoint-*")]:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()

    def _written(self) -> list[Path]:
        # Not with glob, which skips broken links.
        entries = sorted(self.path.iterdir()) if self.path.is_dir() else []
        return [path for path in entries if any(path.match(pattern) for pattern in _WRITTEN)]


def _parse_line(text: str | bytes, where: str) -> dict[str, Any]:
    try:
        line = json.loads(text, parse_constant=lambda name: None)  # earlier versions wrote nan
    except (ValueError, RecursionError):
        line = None
    if not isinstance(line, dict) or not all(type(value) in (int, float, NoneType) for value in line.values()):
        raise InputError(f"run: {where} is damaged: it is not a JSON object of numbers")
    line = {name: value for name, value in line.items() if value is not None}
    if missing := next((name for name in METRICS if name not in line), None):
        raise InputError(f"run: {where} is damaged: it has no {missing}")
    return line


def _read_record(checkpoint: Path) -> dict[str, Any]:
    """The record that `RunFolder.write_record` wrote to run.json.

    Raises:
        InputError: the record is damaged.
    """
    path = checkpoint / RUN_FILE
    with checkpoints.loading(path):
        record = checkpoints.read_json(path)
        lines = [
            _parse_line(to_json(line), f"{path}: line {number} of metrics")
            for number, line in enumerate(record["metrics"], 1)
        ]
        return {"data": record["data"], "metrics": lines}
