"""A recipe is everything that decides a training run, as plain data: dataclasses here, YAML in files.

`load_recipe("demo", {"training.max_steps": 50})` starts from a built-in recipe, a YAML file, or the folder of an
earlier run, and changes single values. None stands for the default of the architecture or of the machine;
`multilin.training.resolve` fills these in, and the filled-in recipe is what a run writes down.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import field
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from annotated_types import MaxLen

from multilin.data.settings import DataRecipe, TokenizerRecipe
from multilin.errors import InputError, nearest, plural, shorten, shown
from multilin.files import write_whole
from multilin.inference.run_files import RECIPE_FILE
from multilin.settings import bounds, load_settings, settings
from multilin.settings.bounds import Fraction
from multilin.settings.inputs import read_yaml, to_yaml
from multilin.training.fields import Values, flatten, get, nest, overlay, put, without, without_replaced
from multilin.training.start import complete_start

DEFAULT_MAX_STEPS = 1000
SectionT = TypeVar("SectionT")
Trackers = Annotated[list[Literal["tensorboard", "wandb", "mlflow", "trackio"]], MaxLen(4)]


@settings
class ModelRecipe:
    """The network."""

    architecture: str = "additive"  # a registered architecture, or the baselines gpt2 and llama
    hidden_size: bounds.Width = 256  # width of the vectors between the layers
    num_layers: bounds.Depth | None = None  # layers; 6 where none are listed
    n_positions: bounds.BlockLength = 256  # context length: tokens in one training block
    options: bounds.Section = field(default_factory=dict)  # options of the architecture
    layers: bounds.LayerList | None = None  # hybrids: each layer's architecture and options, first to last
    config: bounds.Section = field(default_factory=dict)  # fields of the model's config that replace the preset's
    start: bounds.PathText | None = None  # run, folder or hub name whose weights, sizes and tokenizer it begins with
    start_hash: bounds.Name | None = None  # SHA-256 of these weights; a run records it

    @property
    def kind(self) -> str:
        """The architecture, or those of a hybrid's layers."""
        listed = dict.fromkeys(str(layer.get("architecture")) for layer in self.layers or [])
        return " + ".join(listed or [self.architecture])


@settings
class OptimizerRecipe:
    """The optimizer; what is not given is the default of the architecture, or of another optimizer that is named."""

    name: Literal["adamw", "normalized_sgd", "matrix_moment", "muon"] | None = None  # optimizer
    learning_rate: bounds.Rate | None = None  # peak learning rate, reached after the warm-up
    betas: tuple[Fraction, Fraction] | None = None  # adamw: decay rates of its two running means
    row_average: Fraction | None = None  # normalized_sgd: weight of the past in the average of an embedding's row
    row_order: Literal["normalize_then_average", "average_then_normalize"] | None = None  # normalized_sgd: for rows
    weight_decay: bounds.Strength | None = None  # decoupled decay of weight matrices (not of biases, norms, embeddings)
    clip_norm: bounds.Strength | None = None  # largest norm of the gradient; 0 does not clip
    nonfinite: Literal["stop", "skip"] = "stop"  # loss or gradient not finite: end the run, or skip the step


@settings
class ScheduleRecipe:
    """The learning rate over time; what is not given is the default of the architecture."""

    name: Literal["linear", "cosine", "constant", "tail", "inverse_sqrt"] | None = None  # course after the warm-up
    warmup_steps: bounds.StepCount | None = None  # steps in which the learning rate rises to its peak
    tail: bounds.Rate | None = None  # tail: the last 1/tail of the run falls to 0, 5 by default
    constant_steps: bounds.Steps | None = None  # inverse_sqrt: steps at the peak before it falls, 100 by default


@settings
class LoraRecipe:
    """Low-rank adapters: each matrix W becomes W + alpha / rank * B A, and A and B alone are trained."""

    rank: bounds.Count  # rows of A and columns of B, for each matrix
    alpha: bounds.Positive | None = None  # the update's scale times the rank; twice the rank by default
    dropout: Fraction = 0.0  # on what A reads, in training
    targets: bounds.Names | None = None  # ends of the names of modules; all matrices of the layers by default


@settings
class TrainingRecipe:
    """The run."""

    max_steps: bounds.Steps | None = None  # optimizer steps; 1000 by default, with minutes as many as fit
    minutes: bounds.Minutes | None = None  # end after this time at most, reading the text and saving included
    batch_size: bounds.Batch = 16  # most blocks per device and forward pass
    global_batch_size: bounds.Blocks | None = None  # blocks per step on all devices; batch_size x devices by default
    label_smoothing: Fraction | None = None  # probability spread over the whole vocabulary, in training only
    seed: bounds.Seed = 0  # seed of initial weights, data order and dropout
    precision: Literal["auto", "float32", "bf16", "int8"] = "auto"  # auto: bf16 where the hardware computes in it
    int8_backward: bool = True  # with precision int8, the gradient's products are int8 too, rounded at random
    normalize_gradients: bool = False  # bring each layer's incoming gradient to unit size, for half precision
    quantization: Literal["none", "sim_4bit", "sim_2bit", "ternary"] = "none"  # weights as if stored in few values
    master: Literal["device", "host"] = "device"  # where int8's float weights and the optimizer live; host is the CPU
    shard: Literal["none", "fsdp"] = "none"  # fsdp: each device holds a part of every tensor; none: all hold the whole
    communication: Literal["float", "int8"] = "float"  # how gradients travel between devices; int8 in blocks of 128
    gradient_checkpointing: bool = False  # recompute activations in the backward pass: less memory, more time
    compile: bool = False  # torch.compile the model
    eval_every_steps: bounds.StepCount = 100  # steps between validations; 0 validates after the last step only
    eval_max_tokens: bounds.Tokens | None = 100_000  # validation tokens read each time; null reads all
    save_every_steps: bounds.StepCount = 200  # steps between checkpoints; 0 saves after the last step only
    keep_checkpoints: bounds.Steps = 2  # newest checkpoints kept
    log_every_steps: bounds.Steps = 10  # steps between lines of metrics.jsonl
    lora: LoraRecipe | None = None  # train adapters alone: rank, alpha, dropout, targets
    report_to: Trackers = field(default_factory=list)  # also send metrics to: tensorboard, wandb, mlflow, trackio

    @property
    def length(self) -> str:
        """How long the run is, for a message."""
        return plural(self.num_steps, "step") if self.minutes is None else f"{self.minutes:g} minutes"

    @property
    def num_steps(self) -> int:
        """Optimizer steps at most."""
        return self.max_steps or (DEFAULT_MAX_STEPS if self.minutes is None else bounds.MOST_STEPS)

    def split(self, num_devices: int) -> tuple[int, int]:
        """Blocks of one forward pass, and forward passes of one step, on each of so many devices.

        Raises:
            InputError: the blocks of a step cannot be shared out evenly.
        """
        blocks = self.global_batch_size or self.batch_size * num_devices
        share, left = divmod(blocks, num_devices)
        if left:
            raise InputError(
                f"training.global_batch_size: {blocks} given, but {num_devices} processes take multiples of "
                f"{num_devices}; start another number of processes"
            )
        if share > self.batch_size and share % self.batch_size:
            multiple = self.batch_size * num_devices
            raise InputError(
                f"training.global_batch_size: {blocks} given, but forward passes of training.batch_size "
                f"{self.batch_size} on {plural(num_devices, 'device')} take multiples of {multiple}"
            )
        size = min(share, self.batch_size)
        return size, share // size


@settings
class Recipe:
    """Everything that decides a run."""

    model: ModelRecipe = field(default_factory=ModelRecipe)  # the network
    data: DataRecipe = field(default_factory=DataRecipe)  # the text
    tokenizer: TokenizerRecipe = field(default_factory=TokenizerRecipe)  # the tokenizer
    optimizer: OptimizerRecipe = field(default_factory=OptimizerRecipe)  # the optimizer
    schedule: ScheduleRecipe = field(default_factory=ScheduleRecipe)  # the learning rate over time
    training: TrainingRecipe = field(default_factory=TrainingRecipe)  # the run
    output: bounds.PathText = "runs/default"  # folder the run is written to, unless the recipe or sweep names one


# What only reports on a run, or says where it lies, may change when it is resumed.
CHANGEABLE_ON_RESUME = (
    "output", "training.eval_every_steps", "training.eval_max_tokens", "training.save_every_steps",
    "training.keep_checkpoints", "training.log_every_steps", "training.shard", "training.report_to",
)  # fmt: skip
_OF_START = (  # fields that a run's recipe records and another model to start from decides
    *(f"model.{name}" for name in ("architecture", "hidden_size", "num_layers", "options", "layers", "config")),
    *(f"tokenizer.{name}" for name in ("kind", "vocab_size", "path")),
)
DECIDED_BY_PREPARING = (
    "data.validation_fraction", "data.text_field", "data.encoding_errors", "tokenizer.kind", "tokenizer.vocab_size"
)  # fmt: skip


def builtin_recipes() -> dict[str, Path]:
    """The recipes that come with the package, name to file."""
    folder = Path(str(resources.files("multilin") / "recipes"))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


Changes = Annotated[dict[str, Any], Recipe]
"""Dotted fields of a recipe to their new values, as the command line takes them."""


def fill(section: SectionT, **defaults: Any) -> SectionT:
    """The same section of a recipe, with these values where it has none."""
    missing = {name: value for name, value in defaults.items() if getattr(section, name) is None}
    return dataclasses.replace(section, **missing)  # type: ignore[type-var]


def load_recipe(
    name_or_path: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> Recipe:
    """Read a recipe and change single values of it.

    Args:
        name_or_path: a built-in recipe, a YAML file, or the folder of a run; None starts from the defaults. A Path is
            no built-in recipe, whatever its name.
        overrides: dotted field ("training.max_steps", "model.options.window") to its new value.
        defaults: dotted fields that neither the recipe nor `overrides` gives, to values other than our defaults.

    Raises:
        InputError: no such recipe, not YAML, an unknown field or a value of a wrong type; a model to start from that
            is not there, or that a field contradicts.
    """
    overrides = overrides or {}
    path = None if name_or_path is None else _find(name_or_path)
    values = {} if path is None else _read(path)
    is_run = path is not None and path == Path(str(name_or_path), RECIPE_FILE)
    if is_run:
        if "output" not in values:
            raise InputError(f"recipe: {path} is cut short: it has no output, which a run writes last")
        values["output"] = str(name_or_path)  # the folder may have been moved since the run wrote it down
        if overrides.get("model.start") not in (None, get(values, "model.start")):
            values = without(values, _OF_START)
    if "model.start" in overrides:
        values = without(values, ["model.start_hash"])  # of the weights that the recipe names
    values = overlay(nest(defaults or {}), _changed(values, overrides))
    recipe = load_settings(Recipe, values)
    _check_text(recipe, overrides)
    check_start(recipe)
    changes_model = any(dotted.startswith(("model", "tokenizer")) for dotted in overrides)
    if recipe.model.start is None or (is_run and not changes_model):
        return recipe
    return load_settings(Recipe, complete_start(values | _start_sections(recipe, values)))


def _start_sections(recipe: Recipe, given: Values) -> Values:
    """The sections that a model to start from completes, with the fields that are given, as the recipe has them.

    A number may be given as a text, such as '8'.
    """
    return {
        name: {field: getattr(getattr(recipe, name), field) for field in given[name]}
        for name in ("model", "tokenizer")
        if name in given
    }


def check_fields_of_start(recipe: Recipe, given: Values) -> None:
    """Refuse fields, given besides a recipe, that contradict the model that it starts from.

    Args:
        recipe: with these fields.
        given: nested fields and their values.

    Raises:
        InputError: a field that contradicts the model; or it is not there.
    """
    sections = _start_sections(recipe, given)
    if recipe.model.start is not None and sections:
        start = {"start": recipe.model.start, "start_hash": recipe.model.start_hash}
        complete_start({**sections, "model": sections.get("model", {}) | start})


def check_start(recipe: Recipe) -> None:
    """Refuse a hash of weights, or adapters, without the model that they belong to."""
    if recipe.model.start is None and recipe.model.start_hash is not None:
        raise InputError("model.start_hash: given without model.start, the model that has these weights; leave it out")
    if recipe.model.start is None and recipe.training.lora is not None:
        raise InputError("training.lora: given without model.start, but adapters need a trained model; give both")


def _check_text(recipe: Recipe, overrides: Mapping[str, Any]) -> None:
    """Refuse a source that a mixture replaces, and what a loaded tokenizer or prepared text has decided."""
    if recipe.data.mix is not None and "data.source" in overrides:
        raise InputError(
            f"data.source: {shown(recipe.data.source)} given, but data.mix is read instead; leave one of them out"
        )
    trained = {"kind": overrides.get("tokenizer.kind"), "vocab_size": recipe.tokenizer.vocab_size}
    given = next((name for name, value in trained.items() if value is not None), None)
    if given is not None and (path := recipe.tokenizer.path) is not None:
        raise InputError(
            f"tokenizer.{given}: {shown(trained[given])} given, but the tokenizer {shown(path)} is loaded, which "
            "decides it; leave it or tokenizer.path out"
        )
    packed = [name for name in overrides if name in DECIDED_BY_PREPARING]
    if packed and recipe.data.is_prepared:
        raise InputError(
            f"{packed[0]}: {shown(overrides[packed[0]])} given, but {shown(recipe.data.name)} is prepared text, which "
            "decides it; leave it out, or give it to `multilin prepare`"
        )


def given_fields(name_or_path: str | Path | None, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The dotted fields that a recipe and changes of it give, to their values; arguments as for `load_recipe`."""
    return flatten(_changed({} if name_or_path is None else _read(_find(name_or_path)), overrides))


def save_recipe(recipe: Recipe, path: str | Path) -> None:
    """Write a recipe as YAML that `load_recipe` reads back to an equal one."""
    write_whole(path, to_yaml(dataclasses.asdict(recipe)))


def first_difference(old: Recipe, new: Recipe) -> tuple[str, Any, Any] | None:
    """The first field, dotted, that decides the run and differs between two recipes, with both values."""
    flat_old, flat_new = flatten(dataclasses.asdict(old)), flatten(dataclasses.asdict(new))
    for name in flat_old | flat_new:
        if name not in CHANGEABLE_ON_RESUME and flat_old.get(name) != flat_new.get(name):
            return name, flat_old.get(name), flat_new.get(name)
    return None


def _changed(values: Values, overrides: Mapping[str, Any]) -> Values:
    """The values with others in the place of dotted fields, and without the fields that these replace."""
    defaults = {"model": {"architecture": ModelRecipe.architecture}, "tokenizer": {"kind": TokenizerRecipe.kind}}
    kept = without_replaced(values, nest(overrides), defaults)
    for dotted, value in overrides.items():
        put(kept, dotted, value)
    return kept


def _find(name_or_path: str | Path) -> Path:
    builtin = builtin_recipes()
    if isinstance(name_or_path, str) and name_or_path in builtin:
        return builtin[name_or_path]
    path = Path(name_or_path)
    if path.is_dir() and (path / RECIPE_FILE).is_file():
        return path / RECIPE_FILE
    if path.is_file():
        return path
    raise InputError(
        f"recipe: {shown(str(name_or_path))} is neither a YAML file, the folder of a run, nor a built-in recipe "
        f"({', '.join(builtin)}){nearest(str(name_or_path), builtin)}"
    )


def _read(path: Path) -> dict[str, Any]:
    values = read_yaml(path, "recipe")
    if values is not None and not isinstance(values, dict):
        raise InputError(
            f"recipe: {shorten(str(path))} should hold sections such as `model:` and `training:`, not {shown(values)}"
        )
    return values or {}
