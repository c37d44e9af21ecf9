"""The sweep file: the models of a comparison, its text, budget and seeds; docs/compare.md shows one."""

import dataclasses
import itertools
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import field
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

from annotated_types import MaxLen, MinLen

from multilin.data.files import file_format
from multilin.errors import InputError, listed, nearest, shorten, shown
from multilin.settings import load_settings, settings, without_empty
from multilin.settings.bounds import Amount, Name, PathText, RepeatCount, Section, Seed, Share, Tried
from multilin.settings.inputs import read_yaml
from multilin.training.fields import Values, get, merge, nest
from multilin.training.recipe import Recipe, load_recipe

TEXT_SWEEP, TASK_SWEEP = "architectures", "tasks"
MOST_CHOICES = 1000

_ROW_NAME = re.compile(r"\w[\w.+-]*")
_TUNED = ("optimizer", "schedule", "model", "tokenizer", "training")
_MULTIPLE = re.compile(r"x(\d+(?:\.\d+)?)")  # of the best value so far
_DECIDED = {
    "training.max_steps": "the budget decides the number of steps",
    "training.minutes": "the budget decides how long a run is",
    "training.seed": "give `seeds`",
    "output": "runs go into folders of the sweep's `output`",
}
Stage = Annotated[dict[Name, Tried], MinLen(1), MaxLen(4)]


@settings
class Budget:
    """The budget of each run: exactly one of tokens, flops and seconds."""

    tokens: Amount | None = None  # training tokens of a run
    flops: Amount | None = None  # floating-point operations of a run, as `training_flops_per_token` counts them
    seconds: Amount | None = None  # seconds of training, validation not included, by the speed measured before

    @property
    def given(self) -> dict[str, float]:
        """The amounts that are given, by kind: tokens, flops or seconds."""
        return {kind: amount for kind, amount in dataclasses.asdict(self).items() if amount is not None}


@settings
class Sweep:
    """A comparison as plain data: models, seeds and budget."""

    rows: Annotated[dict[Name, Section | None], MaxLen(100)]  # name to fields of the row's recipe, and `recipe`
    title: str = ""  # heading of the report
    base: Section = field(default_factory=dict)  # fields that all rows share, and `recipe`
    seeds: Annotated[list[Seed], MaxLen(100)] = field(default_factory=lambda: [0, 1, 2])  # a run of every row for each
    budget: Budget = field(default_factory=Budget)  # of each run
    task: str | None = None  # a recall task instead of a text, such as mqar
    stages: Annotated[list[Stage], MaxLen(20)] = field(default_factory=list)  # of tuning: fields to the values tried
    trial_share: Share = 1.0  # of the budget that a trial of tuning has
    extend: RepeatCount = 0  # at most this many further values where the best is the lowest or highest
    final_half: bool = False  # tune on one half of the validation documents, and report the score on the other
    like: PathText | None = None  # a sweep file beside this one, whose base and rows this one changes
    output: PathText = ""  # folder for the runs and the report
    colours: Annotated[list[Name], MaxLen(100)] = field(default_factory=list)  # rows in the order of their colours

    def colour(self, row: str) -> int:
        """The number of a row's colour in reports."""
        return list(dict.fromkeys([*self.colours, *self.rows])).index(row)


def builtin_sweep(task: str | None = None) -> Sweep:
    """All architectures, GPT-2 and Llama: on the text inside every Python installation, or smaller on a task."""
    name = TEXT_SWEEP if task is None else TASK_SWEEP
    return load_sweep(Path(str(resources.files("multilin") / "sweeps" / f"{name}.yaml")))


def find_sweep(names: Sequence[str], task: str | None = None) -> Sweep:
    """Return the sweep of a file, or a sweep of recipes and models by name; without a name, the built-in sweep.

    A model by name takes text, tokenizer, sizes and batches of the first recipe, so that they can be compared.

    Args:
        names: a sweep file, or recipes and models.
        task: a task to train the models on, unless a sweep file gives one.

    Raises:
        InputError: neither a sweep, a recipe nor a model, or too few rows to compare.
    """
    if not names:
        return builtin_sweep(task)
    if len(names) == 1:
        path = Path(names[0])
        values = read_yaml(path, "sweep") if path.is_file() and file_format(path) is None else None
        if isinstance(values, dict) and "rows" in values:
            return load_sweep(path)
        if path.suffix in (".yaml", ".yml") and not path.exists():
            raise InputError(f"ROWS: there is no file {shorten(names[0])}; give a sweep file, or two or more recipes")
    # Imported here, because it imports PyTorch and all else in this file is quick.
    from multilin.model.factory import model_names

    known = model_names()
    recipes = [name for name in names if name not in known]
    frame = _frame(load_recipe(recipes[0]), with_text=task is None) if recipes else {}
    if len(names) == 1:
        command = shlex.join(["multilin", "compare", names[0], "llama" if names[0] == "gpt2" else "gpt2"])
        raise InputError(f"ROWS: only {names[0]} given; give two or more, such as `{command}`")
    rows: dict[str, dict[str, Any] | None] = {}
    for name in names:
        row = name if name in known else _row_name(name)
        if row in rows:
            raise InputError(f"ROWS: two rows are called {row}; give each another name in a sweep file")
        rows[row] = frame if name in known else {"recipe": name}
    return dataclasses.replace(
        builtin_sweep(task), title=listed(list(rows)), base={}, rows=rows, output="runs/compare-" + "-".join(rows)
    )


def _row_name(recipe: str) -> str:
    """The name of a recipe's row: of its file or run, with _ for characters that a row's name cannot have."""
    path = Path(recipe)
    return re.sub(r"[^\w.+-]", "_", path.stem if path.suffix in (".yaml", ".yml") else path.resolve().name)


def load_sweep(path: Path) -> Sweep:
    """Read a sweep file, and the file that its `like` names.

    Raises:
        InputError: no such file, not YAML, an unknown field, or a value that is not accepted.
    """
    sweep = _read_sweep(path, "sweep")
    if sweep.like is not None:
        sweep = _over(_read_sweep(path.parent / sweep.like, "like"), sweep)
    output = sweep.output or f"runs/compare-{path.stem}"
    sweep = dataclasses.replace(sweep, title=sweep.title or path.stem, output=output)
    check_sweep(sweep)
    return sweep


def _read_sweep(path: Path, name: str) -> Sweep:
    """The fields of one file alone; messages begin with the name."""
    values = read_yaml(path, name)
    if not isinstance(values, dict):
        raise InputError(f"{name}: {shorten(str(path))} should hold `rows:` and `budget:`, not {shown(values)}")
    return load_settings(Sweep, values)


def _over(other: Sweep, sweep: Sweep) -> Sweep:
    """The sweep with its base and rows merged over the base and rows of another sweep."""
    if other.like is not None:
        raise InputError(f"like: {sweep.like} given, but this sweep has a field `like` too; name another")
    for name in sweep.rows:
        if name not in other.rows:
            raise InputError(f"like: {sweep.like} has no row {shown(name)}{nearest(name, other.rows)}")
    rows: dict[str, Values | None] = {
        name: merge(nested(other.rows[name] or {}, f"rows.{name}"), nested(row or {}, f"rows.{name}"))
        for name, row in sweep.rows.items()
    }
    base = merge(nested(other.base, "base"), nested(sweep.base, "base"))
    return dataclasses.replace(sweep, base=base, rows=rows, colours=sweep.colours or list(other.rows))


def nested(values: Mapping[str, Any], where: str) -> Values:
    """Turn dotted names into nested dictionaries; `where` is their place in the sweep file, or `--` for flags.

    Raises:
        InputError: a field that the sweep decides.
    """
    result = without_empty(Recipe, nest(values))
    for dotted, reason in _DECIDED.items():
        if (given := get(result, dotted)) is not None:
            name = f"--{dotted}" if where == "--" else f"{where}.{dotted}"
            raise InputError(f"{name}: {given!r} given, but {reason}")
    return result


def check_sweep(sweep: Sweep) -> None:
    """Check what the types of the fields cannot check.

    Raises:
        InputError: no rows or a name that cannot be a folder's, seeds twice, not one budget, a field that is not tuned.
    """
    if not sweep.rows:
        raise InputError("rows: none given; a sweep compares at least one row")
    for name in sweep.rows:
        if not _ROW_NAME.fullmatch(name):
            raise InputError(f"rows: {shown(name)} given, but names of rows have only letters, digits and . _ + -")
    if not sweep.seeds or len(set(sweep.seeds)) < len(sweep.seeds):
        raise InputError(f"seeds: {sweep.seeds} given, but it should be a list of different numbers, such as [0, 1, 2]")
    if len(sweep.budget.given) != 1:
        given = " and ".join(sweep.budget.given) or "nothing"
        raise InputError(f"budget: {given} given, but it should be exactly one of tokens, flops and seconds")
    for number, stage in enumerate(sweep.stages):
        nested(stage, f"stages.{number}")  # refuses what the sweep decides
        for name in stage:
            if name.split(".")[0] not in _TUNED:
                raise InputError(
                    f"stages.{number}.{name}: given, but {listed(_TUNED)} can be tuned; make rows for other fields"
                )
        if (num_choices := math.prod(map(len, stage.values()))) > MOST_CHOICES:
            raise InputError(f"stages.{number}: {num_choices} combinations given, but at most {MOST_CHOICES} are tried")
    if sweep.extend and not _is_extendable(sweep.stages):
        raise InputError(
            f"extend: {sweep.extend} given, but it needs a single stage, with two or more different positive "
            "numbers or multiples for one field"
        )
    if sweep.final_half and sweep.task is not None:
        raise InputError("final_half: true given, but a task has no validation documents to divide; leave it out")


def changed(
    sweep: Sweep,
    *,
    budget: Budget,
    num_seeds: int | None,
    task: str | None,
    changes: Mapping[str, Any],
    only: Sequence[str] | None = None,
) -> Sweep:
    """The sweep with the changes of the command line.

    Args:
        sweep: of a file, or built in.
        budget: replaces the sweep's if one is given.
        num_seeds: number of seeds, which are 0, 1, ...; None keeps the sweep's.
        task: replaces the sweep's.
        changes: dotted fields of the recipe to their values, for every row; `output` is the sweep's.
        only: names of the rows to keep; None keeps all.

    Raises:
        InputError: a field that the sweep decides, or a row that does not exist.
    """
    for name in only or ():
        if name not in sweep.rows:
            raise InputError(
                f"--only: there is no row {shown(name)}{nearest(name, sweep.rows)}; rows are {listed(list(sweep.rows))}"
            )
    changes = dict(changes)
    output = changes.pop("output", sweep.output)
    over = nested(changes, "--")
    for name in ("model.architecture", "model.layers"):
        if get(over, name) is not None:
            raise InputError(f"--{name}: given, but rows have their own models; name the models, or write a sweep file")
    sweep = dataclasses.replace(
        sweep,
        rows={
            name: merge(nested(row or {}, f"rows.{name}"), over)
            for name, row in sweep.rows.items()
            if only is None or name in only
        },
        budget=budget if budget.given else sweep.budget,
        seeds=list(range(num_seeds)) if num_seeds else sweep.seeds,
        task=sweep.task if task is None else task,
        output=output,
        colours=sweep.colours or list(sweep.rows),  # a row keeps its colour where others are left out
    )
    check_sweep(sweep)
    return sweep


def _frame(recipe: Recipe, *, with_text: bool) -> Values:
    """The fields of a recipe that models compared with it share: sizes, batches, and text if `with_text`."""
    values, model = dataclasses.asdict(recipe), recipe.model
    num_layers = len(model.layers) if model.layers else model.num_layers
    sizes = {"hidden_size": model.hidden_size, "n_positions": model.n_positions}
    return {
        "model": sizes | ({"num_layers": num_layers} if num_layers else {}),
        "training": {name: values["training"][name] for name in ("batch_size", "global_batch_size", "precision")},
        **({name: values[name] for name in ("data", "tokenizer")} if with_text else {}),
    }


def _is_extendable(stages: Sequence[Mapping[str, list[Any]]]) -> bool:
    """True for one stage of one field with two or more distinct positive numbers or multiples."""
    if len(stages) != 1 or len(stages[0]) != 1:
        return False
    (tried,) = stages[0].values()
    return all(_is_positive(value) for value in tried) and len({str(value) for value in tried}) > 1


def choices_of(stage: Mapping[str, list[Any]], best: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every combination of a stage's values, over the best choice so far.

    Args:
        stage: field to the values tried, numbers or multiples of the best so far such as `x0.5`.
        best: field to value, of all fields of all stages.

    Raises:
        InputError: a multiple of a value that is not a number.
    """
    tried = [[_value(name, value, best[name]) for value in values] for name, values in stage.items()]
    return [{**best, **dict(zip(stage, chosen, strict=True))} for chosen in itertools.product(*tried)]


def _is_positive(value: Any) -> bool:
    """True for a number above 0, or a multiple such as `x0.5`."""
    if isinstance(value, str):
        factor = _MULTIPLE.fullmatch(value)
        return factor is not None and float(factor[1]) > 0
    return isinstance(value, int | float) and value > 0


def _value(name: str, value: Any, best: Any) -> Any:
    """A value of a stage; a multiple such as `x0.5` multiplies the best value so far.

    YAML reads 0 and 1 as integers. Beside a float they become floats, as multiples of integers are rounded.
    """
    factor = _MULTIPLE.fullmatch(value) if isinstance(value, str) else None
    if factor is None:
        return float(value) if isinstance(best, float) and type(value) is int else value
    if not isinstance(best, int | float):
        raise InputError(f"stages.{name}: {value} given, but it multiplies a number, and the row has {shown(best)}")
    product = best * float(factor[1])
    return max(1, round(product)) if isinstance(best, int) else float(f"{product:.6g}")
