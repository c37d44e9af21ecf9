import dataclasses
import os
import re
from pathlib import Path

import pytest

from multilin.errors import InputError
from multilin.model.factory import model_names
from multilin.settings import field_help
from multilin.training.assemble import check_model
from multilin.training.optimizers import OPTIMIZERS
from multilin.training.recipe import (
    Recipe,
    builtin_recipes,
    first_difference,
    left_out_fields,
    load_recipe,
    save_recipe,
)
from multilin.training.resolve import resolve_recipe


def test_a_saved_recipe_loads_as_an_equal_one(tmp_path: Path) -> None:
    overrides = {
        "model.options": {"window": 4, "nested": {"x": [1, 2.5, None]}},
        "optimizer.betas": (0.9, 0.95),
        "optimizer.learning_rate": 1e-5 / 3,
        "data.validation": "naïve – ファイル.txt",
        "training.eval_max_tokens": None,
    }
    recipe = load_recipe(None, overrides)
    save_recipe(recipe, tmp_path / "recipe.yaml")
    assert load_recipe(tmp_path / "recipe.yaml") == recipe


@pytest.mark.parametrize("name", builtin_recipes())
def test_built_in_recipes_describe_a_model_that_can_be_built(name: str) -> None:
    check_model(resolve_recipe(load_recipe(name)))


def test_overrides_change_single_values_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("model: {hidden_size: 32, options: {window: 4}}\ntraining: {max_steps: 7}\n")
    recipe = load_recipe(file, {"training.batch_size": 3, "model.options.heads": 2, "optimizer.learning_rate": "5e-4"})
    assert recipe.model.hidden_size == 32
    assert recipe.model.options == {"window": 4, "heads": 2}
    assert (recipe.training.max_steps, recipe.training.batch_size) == (7, 3)
    assert recipe.optimizer.learning_rate == 5e-4


def test_a_run_folder_is_a_recipe_that_writes_where_the_folder_now_is(tmp_path: Path) -> None:
    save_recipe(load_recipe(None, {"training.seed": 5, "output": "elsewhere"}), tmp_path / "recipe.yaml")
    recipe = load_recipe(tmp_path)
    assert recipe.training.seed == 5
    assert recipe.output == str(tmp_path)
    assert load_recipe(tmp_path, {"output": "new"}).output == "new"


@pytest.mark.parametrize("name", builtin_recipes())
@pytest.mark.parametrize("architecture", model_names())
def test_what_a_recipe_chose_for_its_architecture_gives_way_to_another(name: str, architecture: str) -> None:
    own, other = load_recipe(name), load_recipe(name, {"model.architecture": architecture})
    if own.model.architecture == architecture and own.model.layers is None:
        assert other == own
        return
    assert (other.model.options, other.model.layers, other.model.config) == ({}, None, {})
    assert other.optimizer.learning_rate is None
    assert (other.data, other.tokenizer, other.training) == (own.data, own.tokenizer, own.training)


def test_what_a_recipe_chose_for_a_name_gives_way_to_another_and_stays_with_the_same(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "model: {architecture: additive, options: {num_heads: 2}}\ntokenizer: {vocab_size: 512}\n"
        "optimizer: {name: adamw, betas: [0.9, 0.95], learning_rate: 0.5}\nschedule: {tail: 3}\ntraining: {minutes: 1}"
    )
    same = {"model.architecture": "additive", "tokenizer.kind": "bpe", "optimizer.name": "adamw",
            "schedule.name": "tail", "training.minutes": 1.0}  # fmt: skip
    kept = load_recipe(path, same)
    assert (kept.model.options, kept.tokenizer.vocab_size, kept.schedule.tail) == ({"num_heads": 2}, 512, 3)
    assert kept.optimizer == dataclasses.replace(kept.optimizer, betas=(0.9, 0.95), learning_rate=0.5)
    decayed = {"optimizer.weight_decay": 0.3, "optimizer.clip_norm": 2.0}
    assert load_recipe(path, decayed).optimizer.weight_decay == 0.3
    save_recipe(resolve_recipe(load_recipe(path, same | decayed)), tmp_path / "resolved.yaml")
    other = load_recipe(tmp_path / "resolved.yaml", {"optimizer.name": "normalized_sgd"}).optimizer
    assert (other.weight_decay, other.clip_norm) == (None, None)
    changed = load_recipe(path, {"tokenizer.kind": "byte", "optimizer.name": "muon", "training.max_steps": 3})
    assert (changed.tokenizer.vocab_size, changed.training.minutes) == (None, None)
    assert (changed.optimizer.betas, changed.optimizer.learning_rate) == (None, None)
    beside = load_recipe(path, {"optimizer.name": "muon", "optimizer.learning_rate": 0.25})
    assert beside.optimizer.learning_rate == 0.25


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ({"training.max_step": 3}, r"training\.max_step: unknown field; did you mean 'max_steps'\?"),
        ({"trainin.max_steps": 3}, r"trainin: unknown field; did you mean 'training'\?"),
        ({"training.max_steps": "many"}, r"training\.max_steps: 'many' given, but it should be a valid integer"),
        ({"training.max_steps": 0}, r"training\.max_steps: 0 given, but it should be at least 1"),
        (
            {"training.precision": "fp8"},
            r"training\.precision: 'fp8' given, but it should be 'auto', 'float32', 'bf16' or 'int8'",
        ),
        ({"model.hidden_size": 1.5}, r"model\.hidden_size: 1\.5 given"),
        ({"optimizer.learning_rate": -1}, r"optimizer\.learning_rate: -1 given, but it should be above 0"),
        ({"data.validation_fraction": 1}, r"data\.validation_fraction: 1 given, but it should be below 1"),
    ],
)
def test_bad_values_are_named(overrides: dict[str, object], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        load_recipe(None, overrides)


SECTIONS = [field.name for field in dataclasses.fields(Recipe) if dataclasses.is_dataclass(field.type)]
EMPTY = [*SECTIONS, "model.options", "model.config", "model.layers", "training.report_to", "training.lora", "data.mix"]


@pytest.mark.parametrize("name", EMPTY)
def test_an_empty_section_is_as_one_that_is_left_out(name: str, tmp_path: Path) -> None:
    section, _, field = name.partition(".")
    file = tmp_path / "recipe.yaml"
    file.write_text(f"{section}:\n" + (f"  {field}:\n" if field else "#  learning_rate: 1e-3\n"))
    assert load_recipe(file) == Recipe()
    assert load_recipe(file, {"optimizer.name": "muon", "training.max_steps": 5}).training.max_steps == 5
    row = load_recipe(file, {"model.architecture": "llama", "tokenizer.kind": "byte"})
    assert (row.model.architecture, row.tokenizer.kind) == ("llama", "byte")


@pytest.mark.parametrize("value", ["null", "3", "[null]", "{a: null}", "[[]]", "maybe", "[3, maybe]"])
def test_no_message_names_a_class(value: str, tmp_path: Path) -> None:
    """Whatever a section, or a field of one, is given."""
    fields = [(section, *dataclasses.fields(getattr(Recipe(), section))) for section in SECTIONS]
    texts = [f"{name}: {value}" for name in ("output", *SECTIONS)]
    texts += [
        f"{section}: {{{field.name}: {value}}}"
        for section, *names in fields
        for field in names
        if field.name != "start"
    ]
    said = []
    for text in texts:
        (tmp_path / "recipe.yaml").write_text(text)
        try:
            load_recipe(tmp_path / "recipe.yaml")
        except InputError as error:
            said.append(str(error))
    assert said
    for sentence in said:
        assert not re.search(r"NoneType|instance|Recipe|tuple|[a-z][A-Z]", sentence), sentence


def test_a_folder_called_like_a_built_in_recipe_is_that_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("elita").mkdir()
    Path("elita/recipe.yaml").write_text("model: {architecture: tscale}\noutput: elita\n")
    assert load_recipe(Path("elita")).model.architecture == "tscale"
    assert load_recipe("elita").model.architecture == "elita"


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("my books", "'my books' is a folder without recipe.yaml; text is given as --data.source 'my books'"),
        ("books/", "'books/' is a folder without recipe.yaml; text is given as --data.source books/"),
        ("a.txt", "'a.txt' is a text, not a recipe; text is given as --data.source a.txt"),
        ("rows.jsonl.gz", "'rows.jsonl.gz' is a text, not a recipe; text is given as --data.source rows.jsonl.gz"),
        ("model", "'model' is a folder without recipe.yaml; a model to start from is given as --model.start model"),
        ("mingru-book/", "text is given as --data.source mingru-book/"),
        ("books/*.txt", "text is given as --data.source 'books/*.txt'"),
        ("s3://bucket/text", "text is given as --data.source s3://bucket/text"),
        ("python-docs", "text is given as --data.source python-docs"),
        ("mingru-book", "did you mean 'mingru-books'?"),
        ("missing.yaml", "built-in recipe (additive-books, "),
    ],
)
def test_a_text_in_the_place_of_a_recipe_is_said_to_go_elsewhere(
    name: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("my books", "books", "model"):
        Path(folder).mkdir()
    for file in ("a.txt", "rows.jsonl.gz", "model/config.json"):
        Path(file).write_text("model: {}")
    for given in (name, name if "/" in name else Path(name)):
        with pytest.raises(InputError) as refused:
            load_recipe(given)
        assert sentence in str(refused.value)
        assert ("data.source" in str(refused.value)) == ("data.source" in sentence)


def test_a_missing_recipe_names_the_built_in_ones() -> None:
    with pytest.raises(InputError, match=r"'demoo' is neither .* \(.*demo.*\); did you mean 'demo'\?"):
        load_recipe("demoo")


def test_a_recipe_is_not_read_from_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(path := tmp_path / "recipe.yaml")
    with pytest.raises(InputError, match=r"recipe: .* is a pipe; give a regular file"):
        load_recipe(path)


@pytest.mark.parametrize("content", [b"model: [unclosed", b"just words", b"\xff\xfe\x00"])
def test_a_file_that_is_no_recipe_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bad.yaml").write_bytes(content)
    with pytest.raises(InputError, match=r"bad\.yaml"):
        load_recipe(tmp_path / "bad.yaml")


def test_resolving_fills_what_was_not_given_and_keeps_what_was() -> None:
    recipe = resolve_recipe(load_recipe(None, {"optimizer.weight_decay": 0.25}))
    assert recipe.optimizer.weight_decay == 0.25
    assert recipe.optimizer.learning_rate is not None
    assert recipe.schedule.name is not None
    assert recipe.training.precision in ("float32", "bf16")
    assert resolve_recipe(recipe) == recipe


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (
            "data: {source: PREPARED}\ntokenizer: {kind: byte}",
            r"tokenizer\.kind: 'byte' given, but the prepared text .* decides this field",
        ),
        ("data: {source: PREPARED, text_field: body}", r"data\.text_field: 'body' given, but the prepared text"),
        ("tokenizer: {kind: bpe, path: there}", r"tokenizer\.kind: 'bpe' given, but the loaded tokenizer 'there'"),
        (
            "data: {source: python-docs, mix: {a: 1}}",
            r"data\.source: 'python-docs' given, but data\.mix",
        ),
    ],
)
def test_fields_of_one_file_that_contradict_each_other_are_refused(content: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "prepared").mkdir()
    (tmp_path / "prepared" / "manifest.json").touch()
    path = tmp_path / "recipe.yaml"
    path.write_text(content.replace("PREPARED", str(tmp_path / "prepared")))
    with pytest.raises(InputError, match=sentence):
        load_recipe(path)


def test_what_another_choice_replaces_in_a_recipe_is_named(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").touch()  # as in the folder of prepared text

    def left_out(**changes: object) -> list[str]:
        return left_out_fields("demo", changes, load_recipe("demo", changes))

    assert left_out(**{"training.max_steps": 3}) == []
    assert left_out(**{"model.architecture": "elita"}) == [
        "model.options.head_size", "model.config.output_bias", "optimizer.learning_rate"
    ]  # fmt: skip
    assert left_out(**{"training.minutes": 3.0}) == ["training.max_steps"]
    assert left_out(**{"data.source": str(tmp_path)}) == ["tokenizer.kind", "tokenizer.vocab_size"]


@pytest.mark.parametrize("given", [{"data.source": "."}, {"data.source": "task:parity"}, {"tokenizer.path": "run"}])
def test_no_kind_of_tokenizer_is_recorded_where_something_else_decides_it(
    given: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("manifest.json").touch()  # as in the folder of prepared text
    recipe = resolve_recipe(load_recipe(None, given))
    assert (recipe.tokenizer.kind, recipe.tokenizer.vocab_size) == (None, None)
    assert resolve_recipe(recipe) == recipe
    save_recipe(recipe, "recipe.yaml")
    other = resolve_recipe(load_recipe("recipe.yaml", {"data.source": "python-docs", "tokenizer.path": None}))
    assert (other.tokenizer.kind, other.tokenizer.vocab_size) == ("bpe", None)


def test_the_optimizer_is_the_one_of_the_source() -> None:
    names = {name: resolve_recipe(load_recipe(None, {"model.architecture": name})) for name in model_names()}
    assert {recipe.optimizer.name for recipe in names.values()} == {"adamw", "normalized_sgd", "matrix_moment"}
    for recipe in names.values():
        assert resolve_recipe(recipe) == recipe
        assert (recipe.optimizer.betas is None) == (recipe.optimizer.name != "adamw")


def test_another_optimizer_brings_its_own_defaults() -> None:
    plain = resolve_recipe(load_recipe(None, {"model.architecture": "elita"})).optimizer
    other = resolve_recipe(load_recipe(None, {"model.architecture": "elita", "optimizer.name": "matrix_moment"}))
    assert plain.betas == (0.9, 0.99)
    assert other.optimizer.betas is None
    assert other.optimizer.learning_rate == OPTIMIZERS["matrix_moment"].learning_rate
    assert other.optimizer.clip_norm == 0


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            {"optimizer.name": "normalized_sgd", "optimizer.betas": [0.9, 0.99]},
            r"optimizer\.betas: \(0\.9, 0\.99\) given, but normalized_sgd does not use it; .* uses .*row_average",
        ),
        (
            {"optimizer.name": "adamw", "optimizer.row_average": 0.5},
            r"optimizer\.row_average: 0\.5 given, but adamw does not use it",
        ),
        (
            {"schedule.name": "linear", "schedule.tail": 3},
            r"schedule\.tail: 3\.0 given, but only the schedule tail uses it, and schedule\.name is linear",
        ),
        (
            {"schedule.constant_steps": 3, "schedule.name": "tail"},
            r"schedule\.constant_steps: 3 given, but only the schedule inverse_sqrt uses it",
        ),
    ],
)
def test_settings_that_would_be_ignored_are_refused(overrides: dict[str, object], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        resolve_recipe(load_recipe(None, overrides))


def test_reporting_may_change_on_resume_and_the_rest_may_not() -> None:
    old = load_recipe(None, {"training.log_every_steps": 1, "output": "a"})
    assert first_difference(old, load_recipe(None, {"training.keep_checkpoints": 9, "output": "b"})) is None
    changed = load_recipe(None, {"model.options.window": 3})
    assert first_difference(old, changed) == ("model.options.window", None, 3)


def test_every_field_has_a_comment_that_explains_it() -> None:
    sections = [Recipe, *(type(section) for section in vars(Recipe()).values() if not isinstance(section, str))]
    assert [(s.__name__, name) for s in sections for name, text in field_help(s).items() if not text] == []
