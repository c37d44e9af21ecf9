"""A recipe is the plain data that decides a training run: dataclasses of settings, and YAML in files.

`load_recipe("demo", {"training.max_steps": 50})` starts from a built-in recipe, a YAML file, or the folder of an
earlier run, and changes single values. The value None means the default of the architecture or of the machine.
`multilin.training.resolve` fills in these defaults, and the run saves the filled-in recipe.
"""

import dataclasses
import shlex
from collections.abc import Mapping
from dataclasses import field
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

from multilin.data.files import file_format
from multilin.data.settings import DEFAULT_KIND, DataRecipe, TokenizerRecipe
from multilin.errors import InputError, nearest, shorten, shown
from multilin.files import write_whole
from multilin.files.trust import own_names
from multilin.runs.files import RECIPE_FILE
from multilin.settings import bounds, load_settings, settings, without_empty
from multilin.settings.inputs import read_yaml, to_yaml
from multilin.training.fields import Values, flatten, get, nest, overlay, put, without, without_replaced
from multilin.training.settings import ModelRecipe, OptimizerRecipe, ScheduleRecipe, TrainingRecipe
from multilin.training.start import complete_start


@settings
class Recipe:
    """All settings of a training run."""

    model: ModelRecipe = field(default_factory=ModelRecipe)  # the network
    data: DataRecipe = field(default_factory=DataRecipe)  # the text
    tokenizer: TokenizerRecipe = field(default_factory=TokenizerRecipe)  # the tokenizer
    optimizer: OptimizerRecipe = field(default_factory=OptimizerRecipe)  # the optimizer
    schedule: ScheduleRecipe = field(default_factory=ScheduleRecipe)  # the learning rate over time
    training: TrainingRecipe = field(default_factory=TrainingRecipe)  # the run
    output: bounds.PathText = "runs/default"  # folder the run is written to, unless the recipe or sweep names one


# Fields that only report on a run, or say where it is, may change when it is resumed.
CHANGEABLE_ON_RESUME = (
    "output", "training.eval_every_steps", "training.eval_max_tokens", "training.save_every_steps",
    "training.keep_checkpoints", "training.log_every_steps", "training.shard", "training.report_to",
)  # fmt: skip
_OF_START = (  # fields that do not stay if a run's recipe gets another model to start from
    *(f"model.{name}" for name in ("architecture", "hidden_size", "num_layers", "options", "layers", "config")),
    *(f"tokenizer.{name}" for name in ("kind", "vocab_size", "path")),
)
DECIDED_BY_PREPARING = (
    "data.validation_fraction", "data.text_field", "data.encoding_errors", "tokenizer.kind", "tokenizer.vocab_size"
)  # fmt: skip


def builtin_recipes() -> dict[str, Path]:
    """Return the built-in recipes as a dictionary of names and files."""
    folder = Path(str(resources.files("multilin") / "recipes"))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


Changes = Annotated[dict[str, Any], Recipe]
"""A dictionary of dotted fields of a recipe and their new values, as the command line takes it."""


def load_recipe(
    name_or_path: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> Recipe:
    """Read a recipe and replace single values.

    Args:
        name_or_path: a built-in recipe, a YAML file, or the folder of a run; None starts from the defaults. If given
            as a Path, this is never a built-in recipe.
        overrides: maps dotted fields ("training.max_steps", "model.options.window") to their new values.
        defaults: maps dotted fields to values, which apply if neither the recipe nor `overrides` gives the field.

    Raises:
        InputError: there is no such recipe, or it is not YAML; a field is unknown or has a value of a wrong type; the
            model to start from does not exist, or a field contradicts this model.
    """
    overrides = overrides or {}
    path = None if name_or_path is None else _find(name_or_path)
    values = {} if path is None else _read(path)
    is_run = path is not None and path == Path(str(name_or_path), RECIPE_FILE)
    if path is not None and is_run:
        if "output" not in values:
            raise InputError(f"recipe: {path} is incomplete: the last field, output, is missing")
        values["output"] = str(name_or_path)  # the folder may have been moved since then
        _open_layers(values.get("model"), path.parent)
        if overrides.get("model.start") not in (None, get(values, "model.start")):
            values = without(values, _OF_START)
    if "model.start" in overrides:
        values = without(values, ["model.start_hash"])  # the hash of the recipe's own `model.start`
    overrides = {**overrides, **_named_layers(overrides, "model.", is_typed=True)}
    own = _changed(values, overrides)
    values = overlay(nest(defaults or {}), own)
    if own_names(values.get("model")):
        values["model"] = {**values["model"], **_named_layers(values["model"], "", is_typed=False)}
    recipe = load_settings(Recipe, values)
    is_other_text = any(dotted == "data.source" or dotted.startswith("data.mix") for dotted in overrides)
    _check_text(recipe, overrides if is_run or is_other_text else flatten(own))
    check_start(recipe)
    changes_model = any(dotted.startswith(("model", "tokenizer")) for dotted in overrides)
    if recipe.model.start is None or (is_run and not changes_model):
        return recipe
    return load_settings(Recipe, complete_start(values | _start_sections(recipe, values)))


def _open_layers(model: Any, folder: Path) -> None:
    """Load the layers of a run's recipe that come from users' files, from the copies in its folder."""
    if names := own_names(model):
        from multilin.architectures.own_file import open_files  # imports PyTorch

        open_files(names, folder)


def _named_layers(values: Mapping[str, Any], prefix: str, *, is_typed: bool) -> dict[str, Any]:
    """The fields that name architectures, with `prefix`, and with permanent names in place of layers' files."""
    model = {name: values[prefix + name] for name in ("architecture", "layers") if prefix + name in values}
    if not own_names(model):
        return {}
    from multilin.architectures.own_file import resolve_fields  # imports PyTorch

    return {prefix + name: value for name, value in resolve_fields(model, is_typed=is_typed).items()}


def _start_sections(recipe: Recipe, given: Values) -> Values:
    """The given fields of the sections `model` and `tokenizer`, with their values in the recipe.

    The recipe holds checked and converted values; for example, the given text '8' has become the number 8.
    """
    return {
        name: {field: getattr(getattr(recipe, name), field) for field in given[name]}
        for name in ("model", "tokenizer")
        if name in given
    }


def check_fields_of_start(recipe: Recipe, given: Values) -> None:
    """Raise if fields that are given besides a recipe contradict the model that it starts from.

    Args:
        recipe: the recipe, which already contains the given fields.
        given: nested fields and their values.

    Raises:
        InputError: a field contradicts the model, or the model does not exist.
    """
    sections = _start_sections(recipe, given)
    if recipe.model.start is not None and sections:
        start = {"start": recipe.model.start, "start_hash": recipe.model.start_hash}
        complete_start({**sections, "model": sections.get("model", {}) | start})


def check_start(recipe: Recipe) -> None:
    """Raise if a recipe gives `start_hash` or `lora`, but no model to start from."""
    if recipe.model.start is None and recipe.model.start_hash is not None:
        raise InputError("model.start_hash: given without model.start, which names the model; leave the hash out")
    if recipe.model.start is None and recipe.training.lora is not None:
        raise InputError("training.lora: given without model.start, but adapters need a trained model; give both")


def _check_text(recipe: Recipe, given: Mapping[str, Any]) -> None:
    """Raise if a mixture replaces a given source, or a loaded tokenizer or prepared text decides a given field.

    Args:
        recipe: the recipe, which already contains the given fields.
        given: dotted fields that were given together with the source.
    """
    if recipe.data.mix is not None and "data.source" in given:
        raise InputError(
            f"data.source: {shown(recipe.data.source)} given, but data.mix is read instead; leave one of them out"
        )
    trained = {"kind": given.get("tokenizer.kind"), "vocab_size": recipe.tokenizer.vocab_size}
    name = next((name for name, value in trained.items() if value is not None), None)
    if name is not None and (path := recipe.tokenizer.path) is not None:
        raise InputError(
            f"tokenizer.{name}: {shown(trained[name])} given, but the loaded tokenizer {shown(path)} decides "
            "this field; leave out this field or tokenizer.path"
        )
    packed = [name for name in given if name in DECIDED_BY_PREPARING and given[name] is not None]
    if packed and recipe.data.is_prepared:
        raise InputError(
            f"{packed[0]}: {shown(given[packed[0]])} given, but the prepared text {shown(recipe.data.name)} "
            "decides this field; leave it out, or give it to `multilin prepare`"
        )


def given_fields(name_or_path: str | Path | None, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The values, by dotted field, that a recipe and overrides give; arguments are the same as for `load_recipe`."""
    return flatten(_changed({} if name_or_path is None else _read(_find(name_or_path)), overrides))


def left_out_fields(name_or_path: str | Path | None, overrides: Mapping[str, Any], recipe: Recipe) -> list[str]:
    """The dotted fields whose values another choice has replaced; `recipe` is the result of `load_recipe`."""
    given = {} if name_or_path is None else flatten(_read(_find(name_or_path)))
    kept = given_fields(name_or_path, overrides)
    decided = DECIDED_BY_PREPARING if recipe.data.is_prepared else ()
    return [name for name, value in given.items() if value is not None and (name not in kept or name in decided)]


def save_recipe(recipe: Recipe, path: str | Path) -> None:
    """Write a recipe as a YAML file, which `load_recipe` reads back."""
    write_whole(path, to_yaml(dataclasses.asdict(recipe)))


def first_difference(old: Recipe, new: Recipe) -> tuple[str, Any, Any] | None:
    """The first field in which two recipes differ and that must not change on resume, with both values; else None."""
    flat_old, flat_new = flatten(dataclasses.asdict(old)), flatten(dataclasses.asdict(new))
    for name in flat_old | flat_new:
        if name not in CHANGEABLE_ON_RESUME and flat_old.get(name) != flat_new.get(name):
            return name, flat_old.get(name), flat_new.get(name)
    return None


def _changed(values: Values, overrides: Mapping[str, Any]) -> Values:
    """A recipe's values after overrides of dotted fields, without the fields that `without_replaced` drops."""
    defaults = {"model": {"architecture": ModelRecipe.architecture}, "tokenizer": {"kind": DEFAULT_KIND}}
    kept = without_replaced(values, nest(overrides), defaults)
    for dotted, value in overrides.items():
        put(kept, dotted, value)
    return kept


def _find(name_or_path: str | Path) -> Path:
    builtin, name = builtin_recipes(), str(name_or_path)
    if isinstance(name_or_path, str) and name in builtin:
        return builtin[name]
    path = Path(name_or_path)
    if path.is_dir() and (path / RECIPE_FILE).is_file():
        return path / RECIPE_FILE
    if path.is_dir() or (path.exists() and file_format(path) is not None):
        kind = f"a folder without {RECIPE_FILE}" if path.is_dir() else "a text, not a recipe"
        is_model = (path / "config.json").is_file()
        given = f"a model to start from {_as('model.start', name)}" if is_model else f"text {_as('data.source', name)}"
        raise InputError(f"recipe: {shown(name)} is {kind}; {given}")
    if path.exists():  # `_read` refuses what is not a regular file
        return path
    is_text = file_format(path) is not None or any(character in name for character in "/*:")
    is_yaml = path.suffix in (".yaml", ".yml")
    hint = "" if is_text or is_yaml else nearest(name, builtin)
    if not hint and not is_yaml:
        hint = f"; text {_as('data.source', name)}"
    raise InputError(
        f"recipe: {shown(name)} is neither a YAML file, the folder of a run, nor a built-in recipe "
        f"({', '.join(builtin)}){hint}"
    )


def _as(field: str, value: str) -> str:
    return f"is given as --{field} {shlex.quote(shorten(value))}"


def _read(path: Path) -> dict[str, Any]:
    values = read_yaml(path, "recipe")
    if values is not None and not isinstance(values, dict):
        raise InputError(
            f"recipe: {shorten(str(path))} should hold sections such as `model:` and `training:`, not {shown(values)}"
        )
    return without_empty(Recipe, values or {})
