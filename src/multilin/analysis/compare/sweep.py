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
from multilin.files.trust import is_own
from multilin.settings import load_settings, settings, without_empty
from multilin.settings.bounds import Amount, Name, PathText, RepeatCount, Section, Seed, Share, Tried
from multilin.settings.inputs import read_yaml
from multilin.training.fields import Values, get, merge, nest
from multilin.training.recipe import Recipe, load_recipe

TEXT_SWEEP, TASK_SWEEP = "architectures", "tasks"
MOST_CHOICES = 1000

# How `compare NAME NAME` tunes a row that the built-in sweep does not have: 2e-3, 4e-3 and 8e-3, which are multiples of
# the sweep's own rate, and up to two rates beyond the best end. The rows of that sweep had as many trials.
UNTUNED: dict[str, Any] = {
    "stages": [{"optimizer.learning_rate": ["x0.5", "x1", "x2"]}], "trial_share": 0.25, "extend": 2,
}  # fmt: skip

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
    seconds: Amount | None = None  # seconds of training without validation; measured speed gives the steps

    @property
    def given(self) -> dict[str, float]:
        """The amounts that are given, by kind: tokens, flops or seconds."""
        return {kind: amount for kind, amount in dataclasses.asdict(self).items() if amount is not None}


@settings
class Sweep:
    """A comparison as plain data: models, seeds and budget."""

    rows: Annotated[dict[Name, Section | None], MaxLen(100)]  # name to the row's `recipe` and other fields
    title: str = ""  # heading of the report
    base: Section = field(default_factory=dict)  # `recipe` and other fields that all rows share
    seeds: Annotated[list[Seed], MaxLen(100)] = field(default_factory=lambda: [0, 1, 2])  # every row has a run for each
    budget: Budget = field(default_factory=Budget)  # of each run
    task: str | None = None  # a recall task instead of a text, such as mqar
    stages: Annotated[list[Stage], MaxLen(20)] = field(default_factory=list)  # of tuning: fields to values to try
    trial_share: Share = 1.0  # share of the budget that each trial of tuning gets
    tuned: Annotated[list[Name], MaxLen(100)] = field(default_factory=list)  # rows that `stages` leaves as they are
    extend: RepeatCount = 0  # most further values to try where the best is the lowest or highest
    final_half: bool = False  # tune on half of the validation documents, and score on the other half
    like: PathText | None = None  # a sweep file beside this one, whose base and rows this one changes
    output: PathText = ""  # folder for the runs and the report
    colours: Annotated[list[Name], MaxLen(100)] = field(default_factory=list)  # rows in the order of their colours

    def stages_of(self, row: str) -> list[Stage]:
        """The stages of tuning for a row: none if it was tuned before."""
        return [] if row in self.tuned else self.stages

    def colour(self, row: str) -> int:
        """The number of a row's colour in reports."""
        return list(dict.fromkeys([*self.colours, *self.rows])).index(row)


def builtin_sweep(task: str | None = None) -> Sweep:
    """The sweep of all architectures, GPT-2 and Llama: on the text inside Python, or with smaller models on a task."""
    name = TEXT_SWEEP if task is None else TASK_SWEEP
    return load_sweep(Path(str(resources.files("multilin") / "sweeps" / f"{name}.yaml")))


def find_sweep(names: Sequence[str], task: str | None = None) -> Sweep:
    """Return the sweep of a file, or a sweep of recipes and models by name; without a name, the built-in sweep.

    A model given by name gets the text, tokenizer, sizes and batches of the first recipe.

    Args:
        names: a sweep file, or recipes and models.
        task: a task to train the models on, unless a sweep file gives one.

    Raises:
        InputError: a name of no sweep, recipe or model, or too few rows to compare.
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
    # Imported here, because it imports PyTorch, which takes seconds.
    from multilin.architectures.own_file import resolve, short_name
    from multilin.model.factory import model_names

    known = [*model_names(), *filter(is_own, names)]
    recipes = [name for name in names if name not in known]
    frame = _frame(load_recipe(recipes[0]), with_text=task is None) if recipes else {}
    if len(names) == 1:
        command = shlex.join(["multilin", "compare", names[0], "llama" if names[0] == "gpt2" else "gpt2"])
        raise InputError(f"ROWS: only {names[0]} given; give two or more, such as `{command}`")
    sweep = builtin_sweep(task)
    rows: dict[str, dict[str, Any] | None] = {}
    for name in names:
        row = re.sub(r"[^\w.+-]", "-", short_name(resolve(name, is_typed=True))) if is_own(name) else name
        row = row if name in known else _row_name(name)
        if row in rows:
            raise InputError(f"ROWS: two rows are called {row}; give each another name in a sweep file")
        rows[row] = frame if name in known else {"recipe": name}
        if is_own(name):
            own = {"model": {"architecture": resolve(name, is_typed=True)}}
            rows[row] = merge(merge(nested(sweep.base, "base"), frame), own)
    tuned = [name for name, row in rows.items() if name in sweep.rows or "recipe" in (row or {})]
    output, tuning = "runs/compare-" + "-".join(rows), {"tuned": tuned, **UNTUNED} if len(tuned) < len(rows) else {}
    return dataclasses.replace(sweep, title=listed(list(rows)), base={}, rows=rows, output=output, **tuning)


def _row_name(recipe: str) -> str:
    """A row's name, made from the name of a recipe's file or run, with _ for characters that are not allowed."""
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
    for name in sweep.tuned:
        if name not in sweep.rows:
            raise InputError(f"tuned: there is no row {shown(name)}{nearest(name, sweep.rows)}")
    check_sweep(sweep)
    return sweep


def _read_sweep(path: Path, name: str) -> Sweep:
    """Read one file without its `like`; messages begin with `name`."""
    values = read_yaml(path, name)
    if not isinstance(values, dict):
        raise InputError(f"{name}: {shorten(str(path))} should hold `rows:` and `budget:`, not {shown(values)}")
    return load_settings(Sweep, values)


def _over(other: Sweep, sweep: Sweep) -> Sweep:
    """The sweep with its base and rows merged over the base and rows of another sweep."""
    if other.like is not None:
        raise InputError(f"like: {sweep.like} given, but that sweep has a `like` itself; name a sweep without one")
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
    """Turn dotted names into nested dictionaries. `where` is the names' section of the sweep file, or `--` for flags.

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
    """Check the conditions that the types of the fields cannot express.

    Raises:
        InputError: no rows, a name unfit for a folder, equal seeds, not one budget, a field that is not tunable.
    """
    if not sweep.rows:
        raise InputError("rows: none given; a sweep compares at least one row")
    for name in sweep.rows:
        if not _ROW_NAME.fullmatch(name):
            raise InputError(f"rows: {shown(name)} given, but a row's name has only letters, digits and . _ + -")
    if not sweep.seeds or len(set(sweep.seeds)) < len(sweep.seeds):
        raise InputError(f"seeds: {sweep.seeds} given, but it should be a list of different numbers, such as [0, 1, 2]")
    if len(sweep.budget.given) != 1:
        given = " and ".join(sweep.budget.given) or "nothing"
        raise InputError(f"budget: {given} given, but it should be exactly one of tokens, flops and seconds")
    for number, stage in enumerate(sweep.stages):
        nested(stage, f"stages.{number}")  # refuses fields that the sweep decides
        for name in stage:
            if name.split(".")[0] not in _TUNED:
                raise InputError(
                    f"stages.{number}.{name}: given, but only {listed(_TUNED)} can be tuned; write several rows instead"
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
    """Return the sweep with the changes of the command line.

    Args:
        sweep: the sweep of a file, or the built-in one.
        budget: replaces the sweep's budget, unless it is empty.
        num_seeds: train each row with this number of seeds: 0, 1, ...; None keeps the sweep's seeds.
        task: replaces the sweep's task; None keeps it.
        changes: dotted fields of every row's recipe, with their values; `output` changes the folder of the sweep.
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
    if sweep.stages == UNTUNED["stages"] and get(over, "optimizer.learning_rate") is not None:
        sweep = dataclasses.replace(sweep, stages=[], trial_share=1.0, extend=0)  # the rate of every row is given
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
        colours=sweep.colours or list(sweep.rows),  # a row keeps its colour if --only leaves out others
    )
    check_sweep(sweep)
    return sweep


def _frame(recipe: Recipe, *, with_text: bool) -> Values:
    """The fields that other models take from a recipe to be comparable: sizes, batches, and the text if `with_text`."""
    values, model = dataclasses.asdict(recipe), recipe.model
    num_layers = len(model.layers) if model.layers else model.num_layers
    sizes = {"hidden_size": model.hidden_size, "n_positions": model.n_positions}
    return {
        "model": sizes | ({"num_layers": num_layers} if num_layers else {}),
        "training": {name: values["training"][name] for name in ("batch_size", "global_batch_size", "precision")},
        **({name: values[name] for name in ("data", "tokenizer")} if with_text else {}),
    }


def _is_extendable(stages: Sequence[Mapping[str, list[Any]]]) -> bool:
    """True if there is one stage, of one field, with two or more different values: positive numbers or multiples."""
    if len(stages) != 1 or len(stages[0]) != 1:
        return False
    (tried,) = stages[0].values()
    return all(_is_positive(value) for value in tried) and len({str(value) for value in tried}) > 1


def choices_of(stage: Mapping[str, list[Any]], best: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return every combination of a stage's values; all other fields get their best values so far.

    Args:
        stage: for each field, the values to try; `x0.5` is half of the best value so far.
        best: the best value so far of every field of all stages.

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
    """The value that an entry of a stage gives; a multiple such as `x0.5` multiplies the best value so far.

    YAML reads 0 and 1 as integers. If the best value is a float, both become floats: multiples of integers are rounded.
    """
    factor = _MULTIPLE.fullmatch(value) if isinstance(value, str) else None
    if factor is None:
        return float(value) if isinstance(best, float) and type(value) is int else value
    if not isinstance(best, int | float):
        raise InputError(f"stages.{name}: {value} given, but the row has {shown(best)}, which is not a number")
    product = best * float(factor[1])
    return max(1, round(product)) if isinstance(best, int) else float(f"{product:.6g}")
