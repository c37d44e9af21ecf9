"""The parts of an architecture, and the registry of all architectures."""

import dataclasses
import importlib.metadata
import inspect
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from multilin.errors import InputError, as_input_error, nearest, plural
from multilin.layers.base import Layer
from multilin.settings import load_settings, settings
from multilin.settings.bounds import (
    Depth,
    Fraction,
    LayerWindows,
    Length,
    Rate,
    StepCount,
    Strength,
    Vocabulary,
    Width,
    Window,
)

ENTRY_POINTS = "multilin.architectures"


@settings
class LayerOptions:
    """Options of one layer. An architecture adds fields; the comment of a field is its help text."""

    @property
    def longest_text(self) -> int | None:
        """The most tokens that the layer can read: the field `context`, None (no limit) without this field."""
        return getattr(self, "context", None)

    def count_heads(self, hidden_size: int) -> int:
        """Number of heads of the layer; 1 for a layer without heads."""
        return int(getattr(self, "num_heads", 1))

    @classmethod
    def from_choices(cls, choices: "LayerOptions", **own: Any) -> Self:
        """Options of one layer: the values in `own`; for other fields, the values of the same name in `choices`."""
        known = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in vars(choices).items() if name in known} | own)


@settings
class TrainingDefaults:
    """Default training settings of an architecture, as in its source; a recipe may replace them."""

    optimizer: str = "adamw"  # adamw, normalized_sgd, matrix_moment or muon
    learning_rate: Rate = 5e-4  # peak of the schedule
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)  # decay rates of AdamW's two averages
    weight_decay: Strength = 0.01  # on matrices, not on biases, norms and embeddings
    schedule: str = "linear"  # after the warm-up: linear, cosine, constant, tail or inverse_sqrt
    warmup_steps: StepCount = 100  # steps until the peak
    clip_norm: Strength = 1.0  # largest norm of the gradient; 0 does not clip
    label_smoothing: Fraction = 0.0  # smoothing of the targets, in training only


@settings
class Sizes:
    """The sizes of a model, from which an architecture makes a preset."""

    hidden_size: Width  # width of the vectors between the layers, D
    num_layers: Depth  # number of layers
    vocab_size: Vocabulary  # size of the vocabulary, V
    n_positions: Length | None  # longest text in training; null if unbounded


@dataclass(frozen=True)
class Preset:
    """A whole model: options of its layers, fields of its config, and training defaults.

    layers: options of each layer, the first layer first.
    model: fields of MultilinConfig that the architecture sets (positions, tied output, norms, initialisation).
    training: default training settings.
    """

    layers: Sequence[LayerOptions]
    model: dict[str, Any] = field(default_factory=dict)
    training: TrainingDefaults = field(default_factory=TrainingDefaults)


@dataclass(frozen=True)
class Architecture:
    """One published system: its layer, the options of a layer, and how a whole model is laid out.

    name: its name in recipes and in config.json.
    title, source: shown to users; `source` is the paper or document whose equations it follows.
    layer: builds a layer from (hidden_size, options).
    options: dataclass of a layer's options.
    preset_options: dataclass of the options that a user may choose for a whole model.
    preset: makes a whole model from (sizes, preset options).
    variants: sets of preset options, by name; the contract tests also run with each of them.
    packs: whether several texts can share a row (document_ids); if False, the model refuses document_ids.
    """

    name: str
    title: str
    source: str
    layer: Callable[[int, Any], Layer]
    options: type
    preset_options: type
    preset: Callable[[Sizes, Any], Preset]
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    packs: bool = True

    def __post_init__(self) -> None:
        for options in (self.options, self.preset_options):
            if "__dataclass_fields__" not in vars(options):  # only the fields of LayerOptions would count
                raise InputError(f"architecture: {options.__name__} of {self.name!r} needs the decorator @settings")

    @property
    def description(self) -> str:
        """The docstring of the architecture's file: what it is, its formulas, its state."""
        return inspect.cleandoc(sys.modules[self.preset.__module__].__doc__ or "")

    def expand(self, sizes: Sizes, choices: Mapping[str, Any]) -> Preset:
        """The preset for these sizes and choices; fails if the choices are not valid."""
        return self.preset(sizes, load_settings(self.preset_options, choices, "model.options"))


_registry: dict[str, Architecture] = {}
_own: dict[str, Architecture] = {}  # from users' files, by permanent name
_left_out: set[str] = set()  # warnings about entry points that cannot be loaded


def register(architecture: Architecture) -> None:
    """Add an architecture to the registry."""
    if _registry.setdefault(architecture.name, architecture) is not architecture:
        raise InputError(f"architecture: {architecture.name!r} is the name of two architectures")


def adopt(architecture: Architecture) -> None:
    """Make an architecture from a user's file known by its permanent name; `architectures` does not list the file."""
    _own[architecture.name] = architecture


def architectures() -> dict[str, Architecture]:
    """Every architecture by name: the files in this folder, and entry points of installed packages.

    An entry point that cannot be loaded is left out, with a warning.
    """
    for entry in importlib.metadata.entry_points(group=ENTRY_POINTS):
        try:
            _register_installed(entry)
        except InputError as error:
            if str(error) not in _left_out:
                _left_out.add(str(error))
                warnings.warn(str(error), stacklevel=2)
    return dict(sorted(_registry.items()))


def _register_installed(entry: importlib.metadata.EntryPoint) -> None:
    name = f"architecture: the entry point {entry.name} = {entry.value}"
    with as_input_error(lambda reason: f"{name} cannot be loaded ({reason})"):
        register(entry.load())


def get_architecture(name: str) -> Architecture:
    """The architecture with this name.

    Raises:
        InputError: there is no such architecture; the message names the most similar name.
    """
    if name in _own:
        return _own[name]
    known = _registry if name in _registry else architectures()
    if name not in known:
        hint = nearest(name, known) or f"; known are {', '.join(known)}"
        raise InputError(f"architecture: {name!r} is not known{hint}")
    return known[name]


def spread_windows(windows: Literal["global"] | Window | LayerWindows, num_layers: int) -> list[int | None]:
    """The window of each layer, from a number for all layers, a list, or "global", which gives None to all layers.

    Raises:
        InputError: the length of the list is not the number of layers.
    """
    if not isinstance(windows, tuple):
        return [None if windows == "global" else int(windows)] * num_layers
    if len(windows) != num_layers:
        raise InputError(f"windows: {len(windows)} given, but the model has {plural(num_layers, 'layer')}")
    return list(windows)
