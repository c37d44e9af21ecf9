"""Sweep files become rows, rows become recipes, budgets become steps; and what is wrong is one sentence."""

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from multilin.analysis.compare import rows as speeds
from multilin.analysis.compare.rows import SPEED_FILE, plan_choice, plan_rows, rows_of
from multilin.analysis.compare.sweep import Budget, Sweep, builtin_sweep, changed, choices_of, find_sweep, load_sweep
from multilin.analysis.costs import training_flops_per_token
from multilin.cli.main import main
from multilin.errors import InputError
from multilin.model.factory import create_model, model_names
from multilin.training.assemble import check_model
from multilin.training.outcomes import TrainingInterrupted
from multilin.training.progress import TrainingProgress
from multilin.training.recipe import Recipe
from tests.architectures.test_own_file import LAYERS

SMALL = {
    "model": {"hidden_size": 16, "num_layers": 1, "n_positions": 16},
    "tokenizer": {"kind": "byte", "vocab_size": None},
    "training": {"batch_size": 2},
    "schedule.warmup_steps": 2,
}
TASK = "copy?num_copied=4"  # needs no text to be prepared


@pytest.fixture
def sweep_file(tmp_path: Path) -> Callable[..., Path]:
    """sweep_file(rows=...): a sweep file with these fields over a good one."""

    def write(**fields: Any) -> Path:
        path = tmp_path / "sweep.yaml"
        good = {"base": SMALL, "task": TASK, "rows": {"elita": {}, "gpt2": {}}, "budget": {"tokens": 4000}}
        path.write_text(yaml.safe_dump(good | fields))
        return path

    return write


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"row": {}}, "row: unknown field; did you mean 'rows'?"),
        (
            {"rows": {"gpt2": {"model.hiden_size": 8}}},
            "rows.gpt2.model.hiden_size: unknown field; did you mean 'hidden_size'",
        ),
        (
            {"rows": {"gpt2": {"model.hidden_size": 0}}},
            "rows.gpt2.model.hidden_size: 0 given, but it should be at least 1",
        ),
        ({"rows": {"a": {"recipe": "demmo"}}}, "recipe: 'demmo' is neither"),
        ({"rows": {"a": {"recipe": 3}}}, "rows.a.recipe: 3 given, but it should be the name or path of a recipe"),
        ({"rows": {"a/b": {}}}, "rows: 'a/b' given, but a row's name has only"),
        ({"rows": {}}, "rows: none given"),
        (
            {"rows": {"elita": {"model.start": "x"}}},
            "rows.elita.model.start: 'x' given, but only a recipe file can set this field",
        ),
        ({"rows": {"lama": {}}}, "rows.lama: no model given; give `recipe`"),
        ({"rows": {"a": {"output": "x"}}}, "rows.a.output: 'x' given, but runs go into folders of the sweep's"),
        ({"base": {"training.max_steps": 5}}, "base.training.max_steps: 5 given, but the budget decides"),
        ({"base": {"training": {"seed": 5}}}, "base.training.seed: 5 given, but give `seeds`"),
        ({"budget": {"tokens": 0}}, "budget.tokens: 0 given, but it should be above 0"),
        ({"budget": {"token": 5}}, "budget.token: unknown field; did you mean 'tokens'?"),
        ({"budget": {"tokens": 5, "seconds": 5}}, "budget: tokens and seconds given, but it should be exactly one"),
        ({"budget": {}}, "budget: nothing given, but it should be exactly one"),
        ({"seeds": [1, 1]}, "seeds: [1, 1] given, but it should be a list of different numbers"),
        ({"seeds": []}, "seeds: [] given, but it should be a list"),
        (
            {"stages": [{"optimizer.learning_rate": []}]},
            "stages.0: [] given, but it should be of at least 1 entries",
        ),
        ({"stages": [{}]}, "stages.0: {} given, but it should be of at least 1 entries"),
        (
            {"stages": [{"data.source": ["a"]}]},
            "stages.0.data.source: given, but only optimizer, schedule, model, tokenizer and training can",
        ),
        ({"stages": [{"training.seed": [1]}]}, "stages.0.training.seed: [1] given, but give `seeds`"),
        ({"stages": [{"optimizer.rate": [1]}]}, "rows.elita: stages.optimizer.rate: unknown field"),
        (
            {"stages": [{"model.n_positions": [8]}, {"model.hidden_size": [0]}]},
            "rows.elita: stages.model.hidden_size: 0",
        ),
        ({"stages": [{"optimizer.name": ["x2"]}]}, "rows.elita: stages.optimizer.name: x2 given, but the row has"),
        ({"extend": 2}, "extend: 2 given, but it needs a single stage, with two or more different positive"),
        (
            {"extend": 1, "stages": [{"schedule.name": ["linear", "cosine"]}]},
            "extend: 1 given, but it needs a single stage",
        ),
        (
            {"extend": 1, "stages": [{"optimizer.weight_decay": [0.0, 0.1]}]},
            "extend: 1 given, but it needs a single stage",
        ),
        (
            {"extend": 1, "stages": [{"optimizer.betas": [[0.9, 0.9], [0.9, 0.99]]}]},
            "extend: 1 given, but it needs a single stage",
        ),
        ({"like": "nowhere"}, "like: "),
        (
            {"final_half": True, "task": "mqar"},
            "final_half: true given, but a task has no validation documents to divide",
        ),
        ({"seeds": list(range(101))}, "seeds: [0, 1, 2, 3, ...] given, but it should be of at most 100 entries"),
        ({"stages": [{f"optimizer.{n}": list(range(99)) for n in "ab"}]}, "stages.0: 9801 combinations given"),
        (
            {"budget": {"tokens": 1e30}},
            "budget.tokens: 1e+30 given, but that is 3.13e+28 steps for rows.elita, more than 100,000,000; give less",
        ),
        ({"tuned": ["elite"]}, "tuned: there is no row 'elite'; did you mean 'elita'?"),
        ({"extend": -1}, "extend: -1 given, but it should be at least 0"),
        (
            {"rows": {"elita": {"data.source": "python-docs"}}},
            "rows.elita.data.source: 'python-docs' given with the task",
        ),
        (
            {"task": None, "base": SMALL | {"data.source": "task:mqar"}},
            "rows.elita.data.source: task:mqar is a task; give",
        ),
        ({"task": "mqra"}, "task: 'mqra' is not known; did you mean 'mqar'?"),
        (
            {"budget": {"tokens": 50}},
            "budget.tokens: 50 given, but then a run of rows.elita has 1 step, and its warm-up",
        ),
    ],
)
def test_a_mistake_is_one_sentence_before_any_work(
    fields: dict[str, Any],
    sentence: str,
    sweep_file: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = tmp_path / "runs"
    status = main(["compare", str(sweep_file(**fields)), "--output", str(output)])
    captured = capsys.readouterr()
    assert status == 2
    assert captured.err.startswith(f"multilin: {sentence}"), captured.err
    assert captured.err.count("\n") == 1
    assert not output.exists()


@pytest.mark.parametrize("budget", ["--tokens", "--flops", "--seconds"])
def test_a_budget_of_zero_is_refused(budget: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", budget, "0"]) == 2
    assert f"{budget}: 0 given, but it should be above 0" in capsys.readouterr().err


def test_one_recipe_is_not_compared(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "demo"]) == 2
    assert "only demo given; give two or more, such as `multilin compare demo gpt2`" in capsys.readouterr().err
    assert main(["compare", "gpt2"]) == 2
    assert "such as `multilin compare gpt2 llama`" in capsys.readouterr().err
    assert main(["compare", "nosuch"]) == 2
    assert "recipe: 'nosuch' is neither" in capsys.readouterr().err
    assert main(["compare", "nowhere.yaml"]) == 2
    assert "ROWS: there is no file nowhere.yaml; give a sweep file, or two or more" in capsys.readouterr().err


@pytest.mark.parametrize("task", [None, "mqar"])
def test_the_built_in_sweeps_hold_every_model(task: str | None) -> None:
    sweep = builtin_sweep(task)
    assert list(sweep.rows) != []
    assert set(sweep.rows) == set(model_names())
    rows = rows_of(sweep)
    assert [row.recipe.model.architecture for row in rows] == [row.name for row in rows]
    shared = {(row.recipe.data.source, row.recipe.tokenizer, row.recipe.model.n_positions) for row in rows}
    assert len(shared) == 1


def test_a_row_changes_the_base_and_the_base_changes_the_recipe(sweep_file: Callable[..., Path]) -> None:
    sweep = load_sweep(
        sweep_file(
            base={"recipe": "demo", "model": {"hidden_size": 64}, "optimizer.learning_rate": 1e-3},
            rows={"a": None, "b": {"model.hidden_size": 32, "model": {"options": {"head_size": 16}}}},
        )
    )
    a, b = rows_of(sweep)
    assert a.recipe.model.options["head_size"] == 32  # the recipe's
    assert (a.recipe.model.hidden_size, a.recipe.optimizer.learning_rate) == (64, 1e-3)
    assert (b.recipe.model.hidden_size, b.recipe.optimizer.learning_rate) == (32, 1e-3)
    assert b.recipe.model.options == {"head_size": 16}
    assert b.recipe.model.config == {"output_bias": "unigram"}


def test_a_row_names_a_file_with_a_layer(
    sweep_file: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    (tmp_path / "layers.py").write_text(LAYERS)
    rows = {
        "mine": {"model": {"architecture": f"{tmp_path}/layers.py:Gru"}},
        "mixed": {"model": {"layers": [{"architecture": f"{tmp_path}/layers.py:Loop"}, {"architecture": "elita"}]}},
    }
    mine, mixed = rows_of(load_sweep(sweep_file(rows=rows)))
    assert re.fullmatch(r"layers\.py:Gru@\w{12}", mine.recipe.model.architecture)
    assert re.fullmatch(r"layers\.py:Loop@\w{12}", mixed.recipe.model.layers[0]["architecture"])
    with pytest.raises(InputError, match=r"^rows\.mine\.model\.architecture: .* has no class 'Gruu'"):
        rows_of(load_sweep(sweep_file(rows={"mine": {"model.architecture": f"{tmp_path}/layers.py:Gruu"}})))


def test_an_empty_section_of_a_row_changes_nothing(sweep_file: Callable[..., Path]) -> None:
    base = {**SMALL, "optimizer": {"learning_rate": 0.5}, "model": {**SMALL["model"], "options": {"num_heads": 2}}}
    empty = {"optimizer": None, "training": None, "model": {"options": None, "config": None}}
    plain = rows_of(load_sweep(sweep_file(base=base, rows={"gpt2": {"model.hidden_size": 8}})))
    found = rows_of(
        load_sweep(sweep_file(base={**base, "data": None}, rows={"gpt2": {"model.hidden_size": 8, **empty}}))
    )
    assert [row.recipe for row in found] == [row.recipe for row in plain]
    assert found[0].recipe.optimizer.learning_rate == 0.5
    assert found[0].recipe.model.options == {"num_heads": 2}
    for fields in ({"base": None}, {"stages": None, "seeds": None}, {"rows": {"gpt2": None}}):
        load_sweep(sweep_file(**fields))


def test_what_belongs_to_another_architecture_or_optimizer_is_left_out(sweep_file: Callable[..., Path]) -> None:
    rows = {"a": {"model.architecture": "gpt2", "optimizer.name": "normalized_sgd"}}
    (row,) = rows_of(load_sweep(sweep_file(base={"recipe": "demo"}, rows=rows)))
    assert row.recipe.model.options == {}
    assert row.recipe.model.config == {}
    assert row.recipe.optimizer.betas is None
    assert row.recipe.model.hidden_size == 192


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"base": {"model.hidden_size": 24}},
            r"rows\.tuned\.model\.hidden_size: 24 given, but .* has 16; leave it out",
        ),
        ({"stages": [{"model.hidden_size": [16, 24]}]}, r"rows\.tuned: model\.hidden_size: 24 given, but .* has 16"),
        ({"base": {"model.n_positions": 8}}, None),
    ],
)
def test_a_row_that_starts_from_a_model_has_its_sizes(
    fields: dict[str, Any], sentence: str | None, tmp_path: Path
) -> None:
    folder, recipe = tmp_path / "start", tmp_path / "tuned.yaml"
    create_model("elita", vocab_size=9, **SMALL["model"]).save_pretrained(folder)
    recipe.write_text(yaml.safe_dump({"model": {"start": str(folder)}}))
    rows = {"tuned": {"recipe": str(recipe)}}
    sweep = Sweep(**{"rows": rows, "budget": Budget(tokens=1000), "output": str(tmp_path), **fields})
    if sentence is None:
        assert rows_of(sweep)[0].recipe.model.n_positions == 8
    else:
        with pytest.raises(InputError, match=sentence):
            plan_rows(sweep, TrainingProgress())


def test_a_model_by_name_becomes_the_like_of_the_recipe_beside_it() -> None:
    sweep = find_sweep(["tscale-books", "gpt2"])
    ours, gpt2 = rows_of(sweep)
    assert gpt2.recipe.model.architecture == "gpt2"
    for name in ("hidden_size", "num_layers", "n_positions"):
        assert getattr(gpt2.recipe.model, name) == getattr(ours.recipe.model, name)
    assert gpt2.recipe.tokenizer == ours.recipe.tokenizer
    assert gpt2.recipe.training.batch_size == ours.recipe.training.batch_size


def test_on_a_task_a_model_beside_a_recipe_has_the_recipes_sizes_and_the_task() -> None:
    sweep = changed(
        find_sweep(["tscale-books", "gpt2"], "mqar"), budget=Budget(), num_seeds=None, task="mqar", changes={}
    )
    assert [row.recipe.data.source for row in rows_of(sweep)] == ["task:mqar", "task:mqar"]
    assert len({row.recipe.model.hidden_size for row in rows_of(sweep)}) == 1


@pytest.mark.parametrize("name", ["model.architecture", "model.layers"])
def test_a_flag_makes_no_row_another_model_than_it_is_called(name: str) -> None:
    with pytest.raises(InputError, match=rf"^--{name}: given, but rows have their own models"):
        changed(builtin_sweep(), budget=Budget(), num_seeds=None, task=None, changes={name: "elita"})


def test_flags_go_to_every_row() -> None:
    sweep = changed(
        builtin_sweep(), budget=Budget(seconds=3), num_seeds=2, task=None,
        changes={"model.hidden_size": 32, "output": "x"},
    )  # fmt: skip
    assert {row.recipe.model.hidden_size for row in rows_of(sweep)} == {32}
    assert (sweep.seeds, sweep.budget.given, sweep.output) == ([0, 1], {"seconds": 3}, "x")
    with pytest.raises(InputError, match=r"--training\.max_steps: 5 given, but the budget decides"):
        changed(sweep, budget=Budget(), num_seeds=None, task=None, changes={"training.max_steps": 5})


def small_sweep(output: Path, **budget: float) -> Sweep:
    return Sweep(rows={"gpt2": {}, "elita": {}}, base=SMALL, task=TASK, budget=Budget(**budget), output=str(output))


def test_tokens_become_steps(tmp_path: Path) -> None:
    plans = plan_rows(small_sweep(tmp_path, tokens=1000), TrainingProgress())
    assert [one.recipe.training.max_steps for one in plans] == [31, 31]  # of 2 * 16 tokens
    assert [one.recipe.training.eval_every_steps for one in plans] == [3, 3]


def test_flops_become_steps(tmp_path: Path) -> None:
    plans = plan_rows(small_sweep(tmp_path, flops=1e8), TrainingProgress())
    for one in plans:
        step = one.flops_per_token * one.tokens_per_step
        assert one.recipe.training.max_steps * step <= 1e8 < (one.recipe.training.max_steps + 1) * step


def test_seconds_become_steps_by_a_speed_that_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speeds, "MEASURED_STEPS", 8)
    monkeypatch.setattr(speeds, "MEASURED_TURNS", 1)
    (tmp_path / SPEED_FILE).write_text(json.dumps({"gpt2": 0.5, "elita": 0.25}))
    plans = plan_rows(small_sweep(tmp_path, seconds=10), TrainingProgress())
    assert [one.recipe.training.max_steps for one in plans] == [20, 40]
    (tmp_path / SPEED_FILE).write_text(json.dumps({"gpt2": 0.5}))
    plan_rows(small_sweep(tmp_path, seconds=10), TrainingProgress())
    measured = json.loads((tmp_path / SPEED_FILE).read_text())
    assert measured["gpt2"] == 0.5
    assert 1e-4 < measured["elita"] < 1


def test_a_row_that_diverges_has_a_speed_like_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setattr(speeds, "MEASURED_STEPS", 8)
    monkeypatch.setattr(speeds, "MEASURED_TURNS", 1)
    failing = {"optimizer.learning_rate": 1e3, "optimizer.weight_decay": 1e6, "optimizer.clip_norm": 0.0}
    sweep = dataclasses.replace(small_sweep(tmp_path, seconds=10), rows={"gpt2": failing, "elita": {}})
    plans = plan_rows(sweep, TrainingProgress())
    assert plans[0].recipe.optimizer.nonfinite == "stop"
    assert json.loads((tmp_path / SPEED_FILE).read_text()).keys() == {"gpt2", "elita"}
    assert not [warning for warning in recwarn if "not finite" in str(warning.message)]


def test_a_stop_while_speeds_are_measured_names_no_folder_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(recipe: Recipe, **_: Any) -> None:
        raise TrainingInterrupted(f"stopped; `multilin train {recipe.output} --resume` continues there", 2)

    monkeypatch.setattr(speeds, "train", interrupted)
    with pytest.raises(TrainingInterrupted) as stop:
        plan_rows(small_sweep(tmp_path, seconds=10), TrainingProgress())
    assert str(stop.value) == "stopped while the speed of gpt2 was measured; the same command measures it again"
    assert stop.value.exit_code == 130


def test_a_step_of_another_optimizer_has_a_speed_of_its_own(tmp_path: Path) -> None:
    (tmp_path / SPEED_FILE).write_text(json.dumps({"gpt2": 0.1, "elita": 0.1, "elita-namemuon": 0.2}))
    sweep = small_sweep(tmp_path, seconds=2)
    own = plan_rows(sweep, TrainingProgress())[1]
    steps = {}
    for name in ("adamw", "muon"):
        (tmp_path / SPEED_FILE).write_text(json.dumps({"elita-nameadamw": 0.1, "elita-namemuon": 0.2}))
        chosen = plan_choice(sweep, own, {"optimizer.name": name}, TrainingProgress())
        steps[name] = chosen.recipe.training.max_steps
    assert steps == {"adamw": 20, "muon": 10}


def test_flops_of_gpt2_are_those_of_its_formula() -> None:
    layers, width, vocabulary, length = 2, 32, 50, 24
    model = create_model("gpt2", hidden_size=width, num_layers=layers, vocab_size=vocabulary, n_positions=length)
    weights = 12 * layers * width**2 + vocabulary * width
    attention = 2 * 2 * layers * length * width  # queries with keys, weights with values, for every pair
    assert training_flops_per_token(model, length) == 3 * (2 * weights + attention)


def test_flops_of_integer_products_are_counted() -> None:
    model = create_model("additive", hidden_size=32, num_layers=2, vocab_size=50, n_positions=24)
    of_floats = training_flops_per_token(model, 24)
    model.set_arithmetic(dataclasses.replace(model.arithmetic, products="int8"))
    assert training_flops_per_token(model, 24) == of_floats


def test_flops_of_running_means_are_those_of_the_weights() -> None:
    model = create_model("additive", hidden_size=32, num_layers=2, vocab_size=50, n_positions=24)
    weights = sum(module.weight.numel() for module in model.modules() if isinstance(module, torch.nn.Linear))
    assert training_flops_per_token(model, 24) == 6 * weights


@pytest.mark.parametrize("values", [["1e-3", "4e-3"], ["x0.5", "x1", "x2"]])
def test_a_stage_of_numbers_without_a_point_and_of_multiples_can_go_on(
    sweep_file: Callable[..., Path], values: list[str]
) -> None:
    path = sweep_file(extend=1)
    path.write_text(path.read_text() + f"stages: [{{optimizer.learning_rate: [{', '.join(values)}]}}]\n")
    expected = [float(value) if value[0] != "x" else value for value in values]
    assert load_sweep(path).stages == [{"optimizer.learning_rate": expected}]


@pytest.mark.parametrize(("best", "tried"), [(0.0, [0.0, 0.0, 1.0]), (3, [6, 2, 1])])
def test_a_multiple_of_an_integer_is_one_and_yaml_writes_floats_as_integers(best: float, tried: list[float]) -> None:
    (whole,) = choices_of({"rate": [int(best)]}, {"rate": best})
    found = [choice["rate"] for choice in choices_of({"rate": ["x2", "x0.5", 1]}, whole)]
    assert (found, list(map(type, found))) == (tried, list(map(type, tried)))


RECIPES = Path(__file__).parents[2] / "results"
SWEEPS = sorted(RECIPES.glob("*/*.yaml"))


@pytest.mark.slow
@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_every_row_of_a_sweep_can_be_trained_with_all_that_is_tried(path: Path) -> None:
    sweep = load_sweep(path)
    for row in rows_of(sweep):
        first = largest = row.first_choice(sweep)
        choices = [choice for stage in sweep.stages for choice in choices_of(stage, first)]
        for stage in sweep.stages:
            largest = choices_of(stage, largest)[-1]
        for choice in [first, *choices, largest]:
            check_model(row.with_choice(choice))


def test_a_sweep_like_another_one_changes_its_rows_and_takes_muon() -> None:
    five = load_sweep(RECIPES / "two_core_hour" / "five.yaml")
    muon = load_sweep(RECIPES / "two_core_hour" / "muon.yaml")
    for row, before in zip(rows_of(muon), rows_of(five), strict=True):
        recipe = row.with_choice({"training.batch_size": 3})
        assert (recipe.optimizer.name, recipe.optimizer.betas) == ("muon", None)
        assert recipe.optimizer.learning_rate == muon.rows[row.name]["optimizer"]["learning_rate"]
        assert (recipe.model, recipe.tokenizer) == (before.recipe.model, before.recipe.tokenizer)
        assert recipe.data.validation_part == "tuning"
        assert recipe.training.global_batch_size == 3


def test_a_sweep_may_be_like_one_that_has_its_rows_and_is_like_no_other(sweep_file: Callable[..., Path]) -> None:
    other = sweep_file()
    first = other.with_name("first.yaml")
    first.write_text(f"like: {other.name}\nrows: {{elita: }}\nbudget: {{tokens: 900}}")
    assert load_sweep(first).rows.keys() == {"elita"}
    for content, sentence in (
        (f"like: {other.name}\nrows: {{elite: }}", "has no row 'elite'; did you mean 'elita'"),
        ("like: first.yaml\nrows: {elita: }", "first.yaml given, but that sweep has a `like` itself"),
    ):
        second = other.with_name("second.yaml")
        second.write_text(content)
        with pytest.raises(InputError, match=f"^like: .*{sentence}"):
            load_sweep(second)


def test_some_rows_are_kept() -> None:
    def kept(only: list[str]) -> list[str]:
        return list(changed(builtin_sweep(), budget=Budget(), num_seeds=None, task=None, changes={}, only=only).rows)

    assert kept(["gpt2", "elita"]) == ["elita", "gpt2"]
    with pytest.raises(InputError, match="--only: there is no row 'elit'; did you mean 'elita'"):
        kept(["elit"])
