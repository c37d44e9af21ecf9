"""A run whose files were damaged: the checkpoint before, or one sentence."""

import hashlib
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from multilin.analysis.compare.record import is_finished
from multilin.analysis.compare.rows import SPEED_FILE, read_speeds
from multilin.errors import InputError
from multilin.runs.checkpoints import CHECKSUMS, read_json, write_json
from multilin.training.loop import train
from multilin.training.outcomes import RunResult
from multilin.training.recipe import RECIPE_FILE, Recipe, load_recipe
from multilin.training.run_folder import RunFolder
from tests.training.conftest import Tiny, assert_same_run


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    place = random.Random(path.name).randrange(8 * len(content))
    content[place // 8] ^= 1 << place % 8
    path.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "bit flipped": flip,
    "empty": lambda path: path.write_bytes(b""),
    "missing": Path.unlink,
    "binary": lambda path: path.write_bytes(bytes(range(256)) * 4),
    **{f"the JSON {text}": lambda path, text=text: path.write_text(text) for text in ("[]", "{}", "null", "3", '"x"')},
    "deep JSON": lambda path: path.write_text("[" * 100_000),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.fixture
def run(uninterrupted: RunResult, tmp_path: Path) -> tuple[RunFolder, Recipe]:
    """A copy of a finished run with the checkpoints of steps 8 and 12."""
    run = RunFolder(tmp_path / "run")
    shutil.copytree(uninterrupted.output, run.path)
    shutil.copytree(RunFolder(uninterrupted.output).checkpoints, run.checkpoints)
    return run, load_recipe(uninterrupted.output, {"output": str(tmp_path / "run")})


def in_turn(checkpoint: Path) -> Iterator[Path]:
    """Every file of a checkpoint; after each one all are whole again."""
    whole = checkpoint.with_name("whole")
    shutil.copytree(checkpoint, whole)
    for path in sorted(whole.iterdir()):
        yield checkpoint / path.name
        shutil.rmtree(checkpoint)
        shutil.copytree(whole, checkpoint)


@pytest.mark.parametrize("kind", DAMAGES)
def test_any_damaged_file_leads_to_the_checkpoint_before(run: tuple[RunFolder, Recipe], kind: str) -> None:
    folder, recipe = run
    names = []
    for path in in_turn(folder.checkpoints / "checkpoint-12"):
        DAMAGES[kind](path)
        # A bit in the list of checksums may change the name of any file.
        named = r"\S+" if path.name == CHECKSUMS else re.escape(path.name)
        with pytest.warns(UserWarning, match=rf"checkpoint-12: {named} is .*; the run resumes from checkpoint-8"):
            assert folder.check(recipe, resume=True, overwrite=False) == folder.checkpoints / "checkpoint-8"
        names.append(path.name)
    assert {"model.safetensors", "optimizer.safetensors", "progress.json", "run.json", "checksums.json"} <= set(names)


@pytest.mark.parametrize("kind", DAMAGES)
def test_without_a_whole_checkpoint_one_sentence_says_so(run: tuple[RunFolder, Recipe], kind: str) -> None:
    folder, recipe = run
    DAMAGES[kind](folder.checkpoints / "checkpoint-8" / "model.safetensors")
    DAMAGES[kind](folder.checkpoints / "checkpoint-12" / "progress.json")
    before = sorted(folder.path.rglob("*"))
    sentence = r"no undamaged checkpoint .*checkpoint-12: progress.json .*checkpoint-8: model.safetensors .*--overwrite"
    with pytest.raises(InputError, match=sentence) as refusal:
        train(recipe, resume=True)
    assert "\n" not in str(refusal.value)
    assert sorted(folder.path.rglob("*")) == before


WRONG: dict[str, Callable[[dict], object]] = {
    "progress.json": lambda values: values.update(step="x"),
    "run.json": lambda values: values["metrics"].append(3),
    "optimizer.json": lambda groups: groups[0].update(lr="x"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_checkpoint_of_another_make_is_one_sentence_whatever_its_checksums(
    run: tuple[RunFolder, Recipe], name: str
) -> None:
    folder, recipe = run
    checkpoint = folder.checkpoints / "checkpoint-12"
    values = read_json(checkpoint / name)
    WRONG[name](values)
    write_json(checkpoint / name, values)
    sums = read_json(checkpoint / CHECKSUMS)
    write_json(checkpoint / CHECKSUMS, sums | {name: hashlib.sha256((checkpoint / name).read_bytes()).hexdigest()})
    with pytest.raises(InputError, match=rf"{re.escape(name)}") as refusal:
        train(recipe, resume=True)
    assert "\n" not in str(refusal.value)


def test_a_link_that_leads_nowhere_is_found_before_any_work(run: tuple[RunFolder, Recipe]) -> None:
    folder, recipe = run
    (folder.path / "config.json").unlink()
    (folder.path / "config.json").symlink_to("config.json")
    with pytest.raises(InputError, match=r"config\.json is a link that leads nowhere"):
        folder.check(recipe, resume=True, overwrite=False)


def test_the_run_goes_on_from_the_checkpoint_before(run: tuple[RunFolder, Recipe], uninterrupted: RunResult) -> None:
    folder, recipe = run
    DAMAGES["cut"](folder.checkpoints / "checkpoint-12" / "optimizer.safetensors")
    with pytest.warns(UserWarning, match=r"optimizer\.safetensors is damaged"):
        result = train(recipe, resume=True)
    assert_same_run(result.output, uninterrupted.output)
    assert sorted(path.name for path in folder.checkpoints.iterdir()) == ["checkpoint-12", "checkpoint-8"]


def test_a_checkpoint_of_later_steps_does_not_outlive_the_one_it_was_replaced_by(
    run: tuple[RunFolder, Recipe], tiny: Tiny
) -> None:
    folder, _ = run
    DAMAGES["cut"](folder.checkpoints / "checkpoint-12" / "run.json")
    recipe = tiny(folder.path, **{"training.save_every_steps": 1, "training.keep_checkpoints": 3})
    with pytest.warns(UserWarning, match="resumes from checkpoint-8"):
        train(recipe, resume=True)
    assert sorted(path.name for path in folder.checkpoints.iterdir()) == [
        "checkpoint-10",
        "checkpoint-11",
        "checkpoint-12",
    ]


@pytest.mark.parametrize("kind", ["cut", "missing", "binary", "the JSON []"])
def test_what_lies_beside_the_checkpoints_is_written_anew(
    run: tuple[RunFolder, Recipe], uninterrupted: RunResult, kind: str
) -> None:
    folder, recipe = run
    files = [path for path in folder.path.iterdir() if path.is_file() and path.suffix not in (".png", ".md")]
    assert {
        "config.json",
        "generation_config.json",
        "data.json",
        "metrics.jsonl",
        "model.safetensors",
        RECIPE_FILE,
    } <= {path.name for path in files}
    for path in files:
        DAMAGES[kind](path)
    train(recipe, resume=True)
    for path in files:
        if path.name != RECIPE_FILE:  # which names the folder
            assert path.read_bytes() == (uninterrupted.output / path.name).read_bytes()
    assert load_recipe(folder.path) == recipe


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", "data.json", "model.safetensors"])
def test_what_could_not_be_written_anew_is_refused_before_any_work(run: tuple[RunFolder, Recipe], name: str) -> None:
    folder, recipe = run
    DAMAGES["a folder"](folder.path / name)
    with pytest.raises(InputError, match=f"{name} is a folder; give a file"):
        folder.check(recipe, resume=True, overwrite=False)


@pytest.mark.parametrize("kind", [kind for kind in DAMAGES if kind != "deep JSON"])
def test_a_damaged_recipe_is_one_sentence(run: tuple[RunFolder, Recipe], kind: str) -> None:
    folder, _ = run
    DAMAGES[kind](folder.recipe)
    with pytest.raises(InputError) as refusal:
        train(load_recipe(folder.path), resume=True)
    assert "\n" not in str(refusal.value)


def test_a_changed_number_in_a_recipe_is_found(run: tuple[RunFolder, Recipe]) -> None:
    folder, _ = run
    folder.recipe.write_text(folder.recipe.read_text().replace("seed: 0", "seed: 8"))
    with pytest.raises(InputError, match=r"training\.seed: 8 given, but the run in .* was started with 0"):
        train(load_recipe(folder.path), resume=True)


@pytest.mark.parametrize("size", range(0, 1000, 97))
def test_a_recipe_that_was_cut_anywhere_is_refused(run: tuple[RunFolder, Recipe], size: int) -> None:
    folder, _ = run
    folder.recipe.write_text(folder.recipe.read_text()[:size])
    with pytest.raises(InputError, match="recipe: "):
        load_recipe(folder.path)


@pytest.mark.parametrize("kind", [kind for kind in DAMAGES if kind not in ("missing", "empty", "bit flipped", "cut")])
def test_damaged_metrics_are_no_finished_run(run: tuple[RunFolder, Recipe], kind: str) -> None:
    folder, _ = run
    assert is_finished(folder.path, 12)
    DAMAGES[kind](folder.metrics)
    if folder.metrics.is_file():
        folder.metrics.write_bytes(folder.metrics.read_bytes() + b"\n")
    with pytest.raises(InputError, match=r"metrics\.jsonl"):
        folder.read_metrics()
    assert not is_finished(folder.path, 12)


def test_a_run_that_was_killed_before_its_weights_were_in_place_is_not_finished(run: tuple[RunFolder, Recipe]) -> None:
    folder, _ = run
    (folder.path / "model.safetensors").unlink()
    assert (folder.path / "config.json").is_file()
    assert not is_finished(folder.path, 12)


@pytest.mark.parametrize("kind", [kind for kind in DAMAGES if kind not in ("missing", "a folder", "the JSON {}")])
def test_damaged_speeds_of_a_comparison_are_one_sentence(tmp_path: Path, kind: str) -> None:
    path = tmp_path / SPEED_FILE
    path.write_text('{"row": 0.25}')
    assert read_speeds(path) == {"row": 0.25}
    path.write_text('{"row": true}') if kind == "bit flipped" else DAMAGES[kind](path)
    with pytest.raises(InputError, match=r"speed\.json is damaged; delete it"):
        read_speeds(path)
